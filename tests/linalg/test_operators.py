"""Operators against the matrices that they stand for, and wrappers that lose nothing on the way."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

import blockhf
from blockhf.blocks import Block
from blockhf.curvature.auto import _Spending
from blockhf.curvature.double_backward import _Measured
from blockhf.ledger import Ledger
from blockhf.linalg import (
    BlockOperator,
    CountedProducts,
    Damped,
    Dense,
    DenseBlocks,
    Described,
    DiagonalBlock,
    ForwardingOperator,
    LinearOperator,
    Root,
    Scaled,
    Shifted,
)
from blockhf.meshes import SumOverRanks
from blockhf.policy import PolicyState
from blockhf.ranks import Alone
from blockhf.samples import Samples


def matrix(seed: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


M, V = matrix(0), matrix(2)[0]
W = matrix(3)[:2]  # three columns and one for a block of two rows
EYE = torch.eye(4, dtype=torch.float64)
ROWS = (slice(0, 2), slice(2, 4))


class Blocks(BlockOperator):
    """A symmetric matrix in two blocks of two rows, with products alone; it notes which are asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    @property
    def sizes(self) -> Sequence[int]:
        return [2, 2]

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        self.asked.append((row, column))
        return (M + M.T)[ROWS[row], ROWS[column]] @ vector


class Able(Blocks):
    """The same with every ability that a matrix may have, each of them noted where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[str] = []

    def products(self, row: int, column: int, vectors: Tensor) -> Tensor:
        self.used.append("products")
        return (M + M.T)[ROWS[row], ROWS[column]] @ vectors

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        self.used.append("gram")
        return super().gram(columns, vectors)

    def dense(self, block: int) -> Tensor | None:
        self.used.append("dense")
        return (M + M.T)[ROWS[block], ROWS[block]] if block == 0 else None

    def root(self, block: int) -> Root | None:
        self.used.append("root")
        return Root(M[:1, :2], M[:1, 0]) if block == 0 else None

    def scaled_outputs(self, outputs: Sequence[Sequence[Tensor]] | None = None) -> Tensor | None:
        self.used.append("scaled_outputs")
        return V if outputs is None else outputs[0][0] * 2

    def mean_diagonal(self, block: int, like: Tensor) -> float:
        self.used.append("mean_diagonal")
        return 3.0

    def has_influence(self, block: int) -> bool:
        self.used.append("has_influence")
        return block == 0

    def note(self, block: int) -> str:
        self.used.append("note")
        return f"note {block}"

    @property
    def num_bytes(self) -> int:
        self.used.append("num_bytes")
        return 128


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        pytest.param(Dense(M), M, id="dense"),
        pytest.param(Damped(Dense(M), 0.3), M + 0.3 * EYE, id="damped"),
        pytest.param(Damped(Dense(M), 0.0), M, id="damped by zero"),
        pytest.param(Damped(Damped(Dense(M), 0.3), 0.2), M + 0.5 * EYE, id="damped twice"),
    ],
)
def test_an_operator_multiplies_like_its_matrix(operator: LinearOperator, expected: Tensor) -> None:
    kept = V.clone()
    torch.testing.assert_close(operator @ V, expected @ V)
    assert torch.equal(V, kept)


@pytest.mark.parametrize("index", [0, 1])
def test_a_diagonal_block_asks_for_nothing_but_itself(index: int) -> None:
    blocks = Blocks()
    own = (M + M.T)[ROWS[index], ROWS[index]]
    torch.testing.assert_close(DiagonalBlock(blocks, index) @ V[:2], own @ V[:2])
    assert blocks.asked == [(index, index)]


def test_damping_does_not_write_into_the_product() -> None:
    class Remembers:
        product = torch.ones(4, dtype=torch.float64)

        def __matmul__(self, vector: Tensor) -> Tensor:
            return self.product

    operator = Damped(Remembers(), 2.0)
    torch.testing.assert_close(operator @ V, 1 + 2 * V)
    torch.testing.assert_close(operator @ V, 1 + 2 * V)


def test_a_counter_counts_each_product_once_by_its_column() -> None:
    inner = CountedProducts(Blocks())
    outer = CountedProducts(Scaled(inner, 0.1))
    assert (outer.num_products, inner.num_products) == ([0, 0], [0, 0])
    for _ in range(3):
        outer.product(0, 1, V[:2])
    inner.product(1, 0, V[:2])
    assert (outer.num_products, inner.num_products) == ([0, 3], [1, 3])
    outer.products(0, 0, W)
    assert (outer.num_products, inner.num_products) == ([4, 3], [5, 3])


# --- what a matrix of products alone can do -----------------------------------------------------------

COLUMNS, VECTORS = [0, 1, 0], [V[:2], V[2:], W[:, 0]]


def gram_by_hand() -> Tensor:
    whole = torch.zeros(4, 3, dtype=torch.float64)
    for index, (column, vector) in enumerate(zip(COLUMNS, VECTORS, strict=True)):
        whole[ROWS[column], index] = vector
    return whole.T @ (M + M.T) @ whole


@pytest.mark.parametrize("make", [Blocks, Able, lambda: Scaled(Blocks(), 1.0)])
def test_several_columns_and_gram_matrices_are_those_of_the_dense_matrix(
    make: Callable[[], BlockOperator],
) -> None:
    operator = make()
    for row, column in ((0, 0), (0, 1), (1, 0)):
        expected = (M + M.T)[ROWS[row], ROWS[column]] @ W
        torch.testing.assert_close(operator.products(row, column, W), expected)
    torch.testing.assert_close(operator.gram(COLUMNS, VECTORS), gram_by_hand())


def test_a_matrix_of_products_alone_stores_nothing_and_has_nothing_to_say() -> None:
    operator = Blocks()
    assert (operator.dense(0), operator.note(0), operator.num_bytes) == (None, "", 0)


def test_stored_blocks_stand_in_for_their_products_and_for_no_others() -> None:
    other = Able()
    stored = DenseBlocks({1: EYE[:2, :2]}, lambda: other)
    assert torch.equal(stored.product(1, 1, V[:2]), V[:2])
    assert torch.equal(stored.products(1, 1, W), W)
    assert (other.asked, other.used) == ([], [])
    torch.testing.assert_close(stored.product(0, 1, V[:2]), other.product(0, 1, V[:2]))
    torch.testing.assert_close(stored.products(1, 0, W), other.products(1, 0, W))
    torch.testing.assert_close(stored.gram(COLUMNS, VECTORS), gram_by_hand())
    assert (stored.dense(0), stored.sizes) == (None, [2, 2])


def test_stored_blocks_alone_have_no_product_between_them() -> None:
    stored = DenseBlocks({0: EYE[:2, :2], 1: EYE})
    assert stored.sizes == [2, 4]
    torch.testing.assert_close(stored.gram([0, 0], [V[:2], W[:, 0]]), torch.stack([V[:2], W[:, 0]]) @
                               torch.stack([V[:2], W[:, 0]]).T)  # fmt: skip
    with pytest.raises(ValueError, match=r"^The matrix has its stored diagonal blocks alone\.$"):
        stored.product(0, 1, V)


# --- wrappers ----------------------------------------------------------------------------------------

# Each wrapper in a setting in which it changes nothing.
WRAPPERS: dict[type[ForwardingOperator], Callable[[BlockOperator], ForwardingOperator]] = {
    ForwardingOperator: ForwardingOperator,
    Scaled: lambda inner: Scaled(inner, 1.0),
    Shifted: lambda inner: Shifted(inner, [0.0, 0.0]),
    Described: lambda inner: Described(inner, lambda: [inner.note(0), inner.note(1)]),
    CountedProducts: CountedProducts,
    SumOverRanks: lambda inner: SumOverRanks(inner, Alone(), torch.device("cpu")),
    _Measured: lambda inner: _Measured(inner, inner.num_bytes, Ledger(), ()),
    _Spending: lambda inner: _Spending(inner, two_numbers(), PolicyState()),
}


def two_numbers() -> Samples:
    """An objective, so that there is something to count."""
    weights = torch.nn.Parameter(torch.ones(2))
    own = [Block(name, (weights,)) for name in ("first", "second")]
    return Samples(lambda batch: (batch * weights, (batch * weights).sum()), torch.ones(3, 2), own)


QUESTIONS: dict[str, Callable[[BlockOperator], object]] = {
    "sizes": lambda operator: operator.sizes,
    "product": lambda operator: operator.product(0, 1, V[:2]),
    "products": lambda operator: operator.products(0, 1, W),
    "gram": lambda operator: operator.gram(COLUMNS, VECTORS),
    "dense": lambda operator: [operator.dense(0), operator.dense(1)],
    "root": lambda operator: [operator.root(0), operator.root(1)],
    "scaled_outputs": lambda operator: operator.scaled_outputs([[V[:2]]]),
    "mean_diagonal": lambda operator: operator.mean_diagonal(0, V[:2]),
    "has_influence": lambda operator: [operator.has_influence(0), operator.has_influence(1)],
    "note": lambda operator: [operator.note(0), operator.note(1)],
    "num_bytes": lambda operator: operator.num_bytes,
}


def wrappers(base: type[ForwardingOperator] = ForwardingOperator) -> Iterator[type[ForwardingOperator]]:
    yield base
    for derived in base.__subclasses__():
        if derived.__module__.startswith("blockhf."):
            yield from wrappers(derived)


def test_the_table_has_every_wrapper_and_every_ability() -> None:
    for module in pkgutil.walk_packages(blockhf.__path__, "blockhf."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    assert set(wrappers()) == set(WRAPPERS)
    public = {name for name, _ in inspect.getmembers(BlockOperator) if not name.startswith("_")}
    assert public == set(QUESTIONS)
    # What a wrapper does not override has to be that of the matrix inside, and not the default.
    assert public <= set(vars(ForwardingOperator))


@pytest.mark.parametrize("ability", QUESTIONS)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=[wrapper.__name__ for wrapper in WRAPPERS])
def test_a_wrapper_loses_no_ability(
    wrap: Callable[[BlockOperator], ForwardingOperator], ability: str
) -> None:
    inner = Able()
    expected, actual = QUESTIONS[ability](Able()), QUESTIONS[ability](wrap(inner))
    torch.testing.assert_close(actual, expected) if isinstance(actual, Tensor) else None
    assert repr(actual) == repr(expected)
    # Two make several products one by one, so that each is counted.
    singly = ability == "products" and wrap in (WRAPPERS[_Measured], WRAPPERS[_Spending])
    if ability not in ("sizes", "product") and not singly:
        assert ability in inner.used


@pytest.mark.parametrize("weight", [0.0, -2.5])
def test_a_scaled_matrix_is_scaled_in_every_respect(weight: float) -> None:
    inner, scaled = Able(), Scaled(Able(), weight)
    for ability in ("product", "products", "gram"):
        torch.testing.assert_close(QUESTIONS[ability](scaled), weight * QUESTIONS[ability](inner))  # type: ignore[operator]
    stored, own = inner.dense(0), scaled.dense(0)
    assert stored is not None
    assert own is not None
    torch.testing.assert_close(own, weight * stored)
    assert scaled.dense(1) is None


def test_a_shifted_matrix_is_shifted_in_every_respect() -> None:
    inner, shifts = Able(), [0.5, 2.0]
    shifted = Shifted(inner, shifts)
    for block in (0, 1):
        torch.testing.assert_close(
            shifted.product(block, block, V[:2]), inner.product(block, block, V[:2]) + shifts[block] * V[:2]
        )
        torch.testing.assert_close(
            shifted.products(block, block, W), inner.products(block, block, W) + shifts[block] * W
        )
        assert shifted.mean_diagonal(block, V[:2]) == inner.mean_diagonal(block, V[:2]) + shifts[block]
        assert shifted.has_influence(block)
        assert shifted.root(block) is None
    torch.testing.assert_close(shifted.product(0, 1, V[:2]), inner.product(0, 1, V[:2]))
    whole = torch.zeros(4, 3, dtype=torch.float64)
    for index, (column, vector) in enumerate(zip(COLUMNS, VECTORS, strict=True)):
        whole[ROWS[column], index] = vector
    added = whole.T @ torch.diag(torch.tensor([0.5, 0.5, 2.0, 2.0], dtype=torch.float64)) @ whole
    torch.testing.assert_close(shifted.gram(COLUMNS, VECTORS), gram_by_hand() + added)
    stored, own = inner.dense(0), shifted.dense(0)
    assert stored is not None
    assert own is not None
    torch.testing.assert_close(own, stored + 0.5 * torch.eye(len(stored), dtype=stored.dtype))
    assert shifted.dense(1) is None


def test_notes_are_written_when_they_are_asked_for() -> None:
    notes = ["", ""]
    described = Described(Blocks(), lambda: notes)
    notes[1] = "later"
    assert [described.note(0), described.note(1)] == ["", "later"]
