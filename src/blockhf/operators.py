"""Symmetric matrices that are known only through their products. No autograd here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class LinearOperator(Protocol):
    """A symmetric matrix known only through its products."""

    def __matmul__(self, vector: Tensor, /) -> Tensor: ...


class BlockMatrix(Protocol):
    """A symmetric matrix in blocks, known only through the products of each block."""

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        """The block at ``row`` and ``column``, times a vector of the column's block."""
        ...


def gram(matrix: BlockMatrix, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
    """The products ``vᵢᵀ A vⱼ`` of some vectors, each of the block that ``columns`` names for it.

    A matrix may have a method ``gram`` of its own that is cheaper than products.
    """
    if hasattr(matrix, "gram"):
        result: Tensor = matrix.gram(columns, vectors)
        return result
    return gram_by_products(matrix, columns, vectors)


def gram_by_products(matrix: BlockMatrix, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
    """The same for any matrix: a product for each vector and each block."""
    rows = sorted(set(columns))
    result = vectors[0].new_empty(len(vectors), len(vectors))
    for j, (column, vector) in enumerate(zip(columns, vectors, strict=True)):
        products = {row: matrix.product(row, column, vector) for row in rows}
        result[:, j] = torch.stack(
            [other @ products[row] for row, other in zip(columns, vectors, strict=True)]
        )
    return result


@dataclass(frozen=True)
class DiagonalBlock:
    """One block on the diagonal of a matrix in blocks."""

    matrix: BlockMatrix
    index: int

    def __matmul__(self, vector: Tensor) -> Tensor:
        return self.matrix.product(self.index, self.index, vector)


@dataclass(frozen=True)
class Damped:
    """``operator + damping * I``, never formed.

    >>> Damped(Dense(torch.eye(2)), 0.5) @ torch.ones(2)
    tensor([1.5000, 1.5000])
    """

    operator: LinearOperator
    damping: float

    def __matmul__(self, vector: Tensor) -> Tensor:
        product = self.operator @ vector
        return product if self.damping == 0.0 else product.add(vector, alpha=self.damping)


@dataclass(frozen=True)
class Dense:
    """A matrix that is there."""

    matrix: Tensor

    def __matmul__(self, vector: Tensor) -> Tensor:
        return self.matrix @ vector


class Counted:
    """An operator that counts its products."""

    def __init__(self, operator: LinearOperator) -> None:
        self.operator = operator
        self.num_products = 0

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.num_products += 1
        return self.operator @ vector
