"""A model's curvature at one point, as operators on blocks.

A curvature says *which* matrix: ``GaussNewton``, ``Hessian``, ``EmpiricalFisher``, ``MonteCarloFisher``.
``linearize`` makes that matrix, over all parts of the curvature batch, ready for many products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from blockhf.blocks import Block
from blockhf.curvature.fisher import EmpiricalFisher, MonteCarloFisher
from blockhf.curvature.gauss_newton import GaussNewton
from blockhf.curvature.hessian import Hessian
from blockhf.objective import Evaluation, Part, Problem, RandomState
from blockhf.operators import BlockMatrix

__all__ = ["Curvature", "EmpiricalFisher", "GaussNewton", "Hessian", "MonteCarloFisher", "linearize"]


class Curvature(Protocol):
    """Which matrix describes the loss near a point."""

    def at(self, evaluation: Evaluation, blocks: Sequence[Block]) -> BlockMatrix:
        """The matrix at the point and on the samples of the evaluation."""
        ...


def linearize(curvature: Curvature, problem: Problem) -> BlockMatrix:
    """The matrix on the problem's curvature batch.

    One part is linearized once. Of several parts only one is in memory at a time, as the limit on
    micro-batches demands, so each is linearized anew for each product, on the same random numbers.
    """
    parts = [_LinearizedPart(curvature, problem, part) for part in problem.curvature_parts()]
    if len(parts) > 1:
        return _SumOfParts(parts)
    matrix, weight = parts[0].matrix(), parts[0].part.weight
    return matrix if weight == 1.0 else _Scaled(matrix, weight)


class _LinearizedPart:
    def __init__(self, curvature: Curvature, problem: Problem, part: Part) -> None:
        self.curvature, self.problem, self.part = curvature, problem, part
        self._draws: RandomState | None = None

    def matrix(self) -> BlockMatrix:
        evaluation = self.problem.linearizable(self.part)
        if self._draws is None:
            self._draws = RandomState(self.problem.devices)
            return self.curvature.at(evaluation, self.problem.blocks)
        with self._draws.replayed():
            return self.curvature.at(evaluation, self.problem.blocks)


@dataclass(frozen=True, eq=False)
class _Scaled:
    matrix: BlockMatrix
    weight: float

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        return self.matrix.product(row, column, vector) * self.weight


@dataclass(frozen=True, eq=False)
class _SumOfParts:
    parts: Sequence[_LinearizedPart]

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        total: Tensor | None = None
        for part in self.parts:
            product = part.matrix().product(row, column, vector) * part.part.weight
            total = product if total is None else total.add_(product)
        assert total is not None
        return total
