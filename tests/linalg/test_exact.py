"""Exact solutions from a stored root, on the smaller side, against dense solves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockhf.linalg import BlockOperator, Cholesky, CountedProducts, Root, Scaled, Status, System
from blockhf.meshes.distributed import SumOverRanks
from blockhf.ranks import Ranks


class Rooted(BlockOperator):
    """One block, known by its root."""

    def __init__(self, rows: Tensor, slopes: Tensor) -> None:
        self.own = Root(rows, slopes)

    @property
    def sizes(self) -> list[int]:
        return [self.own.rows.shape[1]]

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        return self.own.rows.T @ (self.own.rows @ vector)

    def root(self, block: int) -> Root | None:
        return self.own


def rooted(num_rows: int, num_columns: int, *, dtype: torch.dtype = torch.float64, rank: int = 99) -> Rooted:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)
    if rank < min(rows.shape):
        left, values, right = torch.linalg.svd(rows, full_matrices=False)
        rows = left[:, :rank] * values[:rank] @ right[:rank]
    return Rooted(rows.to(dtype), torch.randn(num_rows, generator=generator, dtype=torch.float64).to(dtype))


def solved(operator: Rooted, rhs: Tensor, damping: float) -> Tensor:
    rows = operator.own.rows.double()
    identity = torch.eye(rows.shape[1], dtype=torch.float64)
    return torch.linalg.solve(rows.T @ rows + damping * identity, rhs.double())


SHAPES = pytest.mark.parametrize("shape", [(5, 12), (12, 5), (6, 6)], ids=str)


@SHAPES
@pytest.mark.parametrize("in_range", [True, False])
@pytest.mark.parametrize("damping", [1e-6, 0.3])
def test_the_solution_is_that_of_the_dense_matrix(
    shape: tuple[int, int], in_range: bool, damping: float
) -> None:
    operator = rooted(*shape)
    own = operator.own
    rhs = -(own.rows.T @ own.slopes) if in_range else torch.arange(1.0, shape[1] + 1, dtype=torch.float64)
    counted = CountedProducts(operator)
    solution = Cholesky().solve(System(counted, 0, rhs, damping=damping), {})
    expected = solved(operator, rhs, damping)
    torch.testing.assert_close(solution.x, expected, rtol=1e-6, atol=1e-9)
    assert solution.status is Status.CONVERGED
    assert solution.model == pytest.approx(-0.5 * float(expected @ rhs), rel=1e-6)
    assert solution.residual < 1e-6
    assert counted.num_products == [0]


def test_the_matrix_is_formed_once_for_several_dampings() -> None:
    operator = rooted(5, 12)
    smaller = operator.own.smaller
    before = smaller.clone()
    for damping in (0.1, 1.0):
        Cholesky().solve(System(operator, 0, torch.ones(12, dtype=torch.float64), damping=damping), {})
    assert operator.own.smaller is smaller
    assert torch.equal(smaller, before)


@pytest.mark.parametrize("shape", [(5, 12), (12, 5)], ids=str)
def test_without_damping_a_singular_system_has_the_shortest_solution(shape: tuple[int, int]) -> None:
    operator = rooted(*shape, rank=3)
    own = operator.own
    solution = Cholesky().solve(System(operator, 0, -(own.rows.T @ own.slopes)), {})
    expected = -torch.linalg.pinv(own.rows, rtol=1e-8) @ own.slopes
    torch.testing.assert_close(own.rows @ solution.x, own.rows @ expected, rtol=1e-4, atol=1e-4)


def test_a_tiny_damping_loses_no_digits_where_nothing_is_subtracted() -> None:
    """Woodbury's form has the right-hand side minus nearly itself, over the damping."""
    operator = rooted(5, 12)
    own = operator.own
    rhs = -(own.rows.T @ own.slopes)
    solution = Cholesky().solve(System(operator, 0, rhs, damping=1e-14), {})
    expected = -torch.linalg.pinv(own.rows) @ own.slopes
    torch.testing.assert_close(solution.x, expected, rtol=1e-10, atol=1e-12)


@SHAPES
def test_solutions_in_float32(shape: tuple[int, int]) -> None:
    operator = rooted(*shape, dtype=torch.float32)
    own = operator.own
    rhs = -(own.rows.T @ own.slopes)
    solution = Cholesky().solve(System(operator, 0, rhs, damping=0.1), {})
    assert solution.x.dtype == torch.float32
    torch.testing.assert_close(solution.x.double(), solved(operator, rhs, 0.1), rtol=1e-3, atol=1e-4)


def test_what_rounding_makes_of_a_gradient_near_zero_is_in_the_range() -> None:
    operator = rooted(5, 12)
    own = operator.own
    small = own.slopes * 1e-12
    near = Rooted(own.rows, small)
    rhs = -(own.rows.T @ small) + 1e-15 * torch.linalg.vector_norm(own.rows) * small.norm()
    solution = Cholesky().solve(System(near, 0, rhs, damping=1e-13), {})
    assert float(solution.x.norm()) < 1e-10  # Woodbury would divide the rounding by the damping


def test_no_damping_and_a_gradient_of_other_samples_is_left_to_cg() -> None:
    operator = rooted(5, 12)
    rhs = operator.own.rows.T @ torch.ones(5, dtype=torch.float64)
    solution = Cholesky().solve(System(operator, 0, rhs, rtol=1e-12, max_steps=50), {})
    assert solution.num_steps > 0
    torch.testing.assert_close(operator.product(0, 0, solution.x), rhs, rtol=1e-6, atol=1e-8)


@SHAPES
def test_in_its_own_units_a_solution_does_not_depend_on_the_parameters_units(shape: tuple[int, int]) -> None:
    plain = rooted(*shape)
    units = 10.0 ** torch.arange(shape[1], dtype=torch.float64).remainder(5)
    found = []
    for scale in (torch.ones_like(units), units):
        operator = Rooted(plain.own.rows * scale, plain.own.slopes)
        own = operator.own
        rhs = -(own.rows.T @ own.slopes)
        damping = 1e-3 * own.mean_diagonal
        solution = Cholesky(rescales=True).solve(System(operator, 0, rhs, damping=damping), {})
        found.append(solution.x * scale)
        image = own.rows @ solution.x
        curvature = 2 * (solution.model + float(rhs @ solution.x)) - damping * float(
            solution.x.square().sum()
        )
        assert curvature == pytest.approx(float(image @ image), rel=1e-5)
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-9)


def test_what_is_not_finite_gives_no_solution() -> None:
    operator = rooted(5, 12)
    operator.own.rows[0, 0] = torch.nan
    rhs = torch.ones(12, dtype=torch.float64)
    solution = Cholesky().solve(System(operator, 0, rhs, damping=0.1), {})
    assert solution.status is Status.NON_FINITE
    assert not solution.x.any()


def test_a_scaled_matrix_has_a_scaled_root() -> None:
    operator = rooted(5, 12)
    scaled = Scaled(operator, 4.0)
    root = scaled.root(0)
    assert root is not None
    vector = torch.ones(12, dtype=torch.float64)
    torch.testing.assert_close(root.rows.T @ (root.rows @ vector), scaled.product(0, 0, vector))
    torch.testing.assert_close(root.rows.T @ root.slopes, 4 * operator.own.rows.T @ operator.own.slopes)
    assert scaled.mean_diagonal(0, vector) == pytest.approx(root.mean_diagonal)


class Twice(Ranks):
    """Two ranks that have the same samples."""

    def sum(self, tensors: list[Tensor]) -> list[Tensor]:  # type: ignore[override]
        return [2 * own for own in tensors]

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor])

    def sum_operator(self, operator: BlockOperator) -> BlockOperator:
        return SumOverRanks(operator, self, torch.device("cpu"))


class WithOutputs(Rooted):
    """A root that says what its rows are the derivatives of."""

    def scaled_outputs(self, outputs: Any = None) -> Tensor:
        return self.own.slopes


def test_the_root_of_a_sum_over_ranks_has_the_rows_of_all() -> None:
    own = rooted(5, 12).own
    both = SumOverRanks(WithOutputs(own.rows, own.slopes), Twice(), torch.device("cpu"))
    root = both.root(0)
    assert root is not None
    torch.testing.assert_close(root.rows.T @ root.rows, 2 * own.rows.T @ own.rows)
    torch.testing.assert_close(root.rows.T @ root.slopes, 2 * own.rows.T @ own.slopes)


def test_where_outputs_are_unknown_the_root_of_a_sum_over_ranks_is_too_and_cg_solves() -> None:
    operator = rooted(5, 12)
    vector = torch.ones(12, dtype=torch.float64)
    both = SumOverRanks(operator, Twice(), torch.device("cpu"))
    assert both.root(0) is None
    assert both.mean_diagonal(0, vector) == pytest.approx(2 * operator.own.mean_diagonal)
    solution = Cholesky().solve(System(both, 0, vector, damping=0.5, rtol=1e-12, max_steps=60), {})
    assert solution.num_steps > 0
    torch.testing.assert_close(2 * solution.x, solved(operator, vector, 0.25), rtol=1e-8, atol=1e-10)


def test_the_mean_diagonal_is_estimated_where_nothing_is_stored() -> None:
    class Hidden(Rooted):
        def root(self, block: int) -> Root | None:
            return None

    rows = torch.diag(torch.arange(1.0, 13.0, dtype=torch.float64))
    hidden = Hidden(rows, torch.zeros(12, dtype=torch.float64))
    assert hidden.mean_diagonal(0, rows[0]) == pytest.approx(float(rows.diagonal().square().mean()))
