"""Operators against the matrices that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockhf.operators import Counted, Damped, Dense, DiagonalBlock, LinearOperator


def matrix(seed: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


M, V = matrix(0), matrix(2)[0]
EYE = torch.eye(4, dtype=torch.float64)


class Blocks:
    """A matrix in two blocks of two rows each, and a record of the blocks that were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        self.asked.append((row, column))
        return M[2 * row : 2 * row + 2, 2 * column : 2 * column + 2] @ vector


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        pytest.param(Dense(M), M, id="dense"),
        pytest.param(Damped(Dense(M), 0.3), M + 0.3 * EYE, id="damped"),
        pytest.param(Damped(Dense(M), 0.0), M, id="damped by zero"),
        pytest.param(Damped(Damped(Dense(M), 0.3), 0.2), M + 0.5 * EYE, id="damped twice"),
        pytest.param(Counted(Damped(Dense(M), 1.0)), M + EYE, id="counted"),
    ],
)
def test_an_operator_multiplies_like_its_matrix(operator: LinearOperator, expected: Tensor) -> None:
    kept = V.clone()
    torch.testing.assert_close(operator @ V, expected @ V)
    assert torch.equal(V, kept)


@pytest.mark.parametrize("index", [0, 1])
def test_a_diagonal_block_asks_for_nothing_but_itself(index: int) -> None:
    blocks = Blocks()
    rows = slice(2 * index, 2 * index + 2)
    torch.testing.assert_close(DiagonalBlock(blocks, index) @ V[:2], M[rows, rows] @ V[:2])
    assert blocks.asked == [(index, index)]


def test_damping_does_not_write_into_the_product() -> None:
    class Remembers:
        product = torch.ones(4, dtype=torch.float64)

        def __matmul__(self, vector: Tensor) -> Tensor:
            return self.product

    operator = Damped(Remembers(), 2.0)
    torch.testing.assert_close(operator @ V, 1 + 2 * V)
    torch.testing.assert_close(operator @ V, 1 + 2 * V)


def test_a_counter_counts_each_product_once() -> None:
    inner = Counted(Dense(M))
    outer = Counted(Damped(inner, 0.1))
    assert (outer.num_products, inner.num_products) == (0, 0)
    for _ in range(3):
        outer @ V
    inner @ V
    assert (outer.num_products, inner.num_products) == (3, 4)
