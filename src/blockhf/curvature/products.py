"""How products with a curvature matrix are made: what the ways to them have in common."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockhf.blocks import Block
from blockhf.objective import Evaluation, Part, Problem
from blockhf.operators import BlockMatrix, gram


class Curvature(Protocol):
    """Which matrix describes the loss near a point."""

    def at(self, evaluation: Evaluation, blocks: Sequence[Block]) -> BlockMatrix:
        """The matrix at the point and on the samples of the evaluation."""
        ...


class Products(Protocol):
    """A way to products with the matrix on a problem's curvature batch.

    The matrix may have ``notes``, one for each block, which go into the report.
    """

    def linearize(self, curvature: Curvature, problem: Problem, num_products: Sequence[int]) -> BlockMatrix:
        """The matrix, ready for about ``num_products[b]`` products with block ``b``."""
        ...


class JacobianForm(abc.ABC):
    """A matrix of the form ``Jᵀ H J``, whose products have a middle."""

    @abc.abstractmethod
    def halves(self, column: int, vector: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """``J v`` and ``H J v``: a product before the way back."""

    @abc.abstractmethod
    def way_back(self, row: int, curved: Sequence[Tensor]) -> Tensor:
        """The product from its second half."""


class PartMatrix(BlockMatrix, Protocol):
    """The matrix on one part of the batch, and how much memory its products hold on to."""

    @property
    def num_bytes(self) -> int: ...


def over_parts(
    problem: Problem, linearize: Callable[[Part], Callable[[], PartMatrix]], memory_budget: int
) -> BlockMatrix:
    """The matrix on all parts of the curvature batch.

    One part is linearized once. Of several, the first are kept for as long as ``memory_budget`` bytes
    last, and the others are linearized anew for each product, on the same random numbers.

    Args:
        problem: The problem.
        linearize: From a part to a function that linearizes it, the same way each time.
        memory_budget: How many bytes the parts that are kept may hold together.
    """
    parts = problem.curvature_parts()
    makers = [linearize(part) for part in parts]
    weights = [part.weight for part in parts]
    if len(parts) == 1:
        return _scaled(makers[0](), weights[0])
    kept: list[BlockMatrix | None] = [None] * len(parts)
    for index, make in enumerate(makers):
        if memory_budget <= 0:
            break
        matrix = make()
        memory_budget -= matrix.num_bytes
        if memory_budget < 0:
            break
        kept[index] = matrix
    return _SumOfParts(makers, weights, kept)


def _scaled(matrix: BlockMatrix, weight: float) -> BlockMatrix:
    return matrix if weight == 1.0 else _Scaled(matrix, weight)


@dataclass(frozen=True, eq=False)
class _Scaled:
    matrix: BlockMatrix
    weight: float

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        return self.matrix.product(row, column, vector) * self.weight

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        return gram(self.matrix, columns, vectors) * self.weight


@dataclass(frozen=True, eq=False)
class _SumOfParts:
    makers: Sequence[Callable[[], BlockMatrix]]
    weights: Sequence[float]
    kept: Sequence[BlockMatrix | None]

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        total: Tensor | None = None
        for make, weight, kept in zip(self.makers, self.weights, self.kept, strict=True):
            product = (kept or make()).product(row, column, vector).mul_(weight)
            total = product if total is None else total.add_(product)
        assert total is not None
        return total

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        total: Tensor | None = None
        for make, weight, kept in zip(self.makers, self.weights, self.kept, strict=True):
            part = gram(kept or make(), columns, vectors) * weight
            total = part if total is None else total + part
        assert total is not None
        return total


@dataclass(frozen=True, eq=False)
class Noted:
    """A matrix with a word on each of its blocks, which may change while it is used."""

    matrix: BlockMatrix
    describe: Callable[[], Sequence[str]]

    @property
    def notes(self) -> Sequence[str]:
        return self.describe()

    @property
    def dense(self) -> Mapping[int, Tensor]:
        """Those diagonal blocks that are there."""
        dense: Mapping[int, Tensor] = getattr(self.matrix, "dense", {})
        return dense

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        return self.matrix.product(row, column, vector)

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        return gram(self.matrix, columns, vectors)


def inner(halves: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> Tensor:
    """The products ``(J vᵢ)ᵀ (H J vⱼ)`` from all ``J v`` and ``H J v``."""
    return torch.stack(
        [torch.stack([sum_of_products(left, right) for _, right in halves]) for left, _ in halves]
    )


def sum_of_products(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(left, right, strict=True)]).sum()


def closeness(one: Tensor, other: Tensor) -> tuple[float, float]:
    """The relative difference of two results that should be equal, and how large rounding may make it."""
    scale = float(torch.linalg.vector_norm(other)) or 1.0
    difference = float(torch.linalg.vector_norm(one - other)) / scale
    return difference, torch.finfo(other.dtype).eps ** 0.5


def disagreement(
    matrix: BlockMatrix, reference: BlockMatrix, index: int, size: int, like: Tensor
) -> float | None:
    """How far two matrices that should be equal are apart on one vector, if by more than rounding."""
    vector = torch.sin(torch.arange(size, device=like.device)).to(like.dtype)
    expected = reference.product(index, index, vector)
    difference, rounding = closeness(matrix.product(index, index, vector), expected)
    return difference if difference > rounding and bool(expected.isfinite().all()) else None
