"""The choice between the ways to a product, block by block.

The choice goes by counted multiplications, never by the clock: the same run makes the same choice again, so
a resumed run continues bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blockhf.curvature.double_backward import DoubleBackward
from blockhf.curvature.formed import Formed, FormedMatrix, FormingError, lazily
from blockhf.curvature.gauss_newton import GaussNewton
from blockhf.curvature.products import Curvature, Noted
from blockhf.curvature.traced import Traced
from blockhf.fx_graphs import TracingError
from blockhf.objective import Problem, batch_size
from blockhf.operators import BlockMatrix

_SMALLEST = 500_000
"""Parameters times samples from which on it pays to look for another way than the double backward."""

_LONGEST_GRAPH = 1000
"""Nodes of the loss's graph up to which tracing takes seconds; unrolled recurrences have more.

They are traced only where ``compile=True`` says that the run is long.
"""


class Auto:
    """Forms small blocks, traces the others, and falls back to the double backward.

    Blocks are formed where that takes fewer multiplications than their CG steps. The multiplications of a
    forward pass are counted once for each shape of the batch. Where the objective cannot be traced, one
    warning says why, and products are by double backward from then on. The report has the choice and its
    reason.

    Args:
        compile: As for ``Traced``.
        memory_budget: As for ``Traced``.
    """

    def __init__(self, *, compile: bool = False, memory_budget: int = 0) -> None:
        self.formed = Formed()
        self.traced = Traced(compile=compile, memory_budget=memory_budget)
        self.graph = DoubleBackward(memory_budget=memory_budget)
        self._forward: dict[Any, int] = {}
        self._no_forming = ""
        self._no_tracing = ""

    def linearize(self, curvature: Curvature, problem: Problem, num_products: Sequence[int]) -> BlockMatrix:
        size = sum(block.size for block in problem.blocks) * problem.num_curvature_samples
        if problem.batch is None or size < _SMALLEST:
            reason = "no batch to trace with" if problem.batch is None else "too small for other ways to pay"
            return _by_double_backward(self.graph.linearize(curvature, problem), problem, reason)

        dense: dict[int, Tensor] = {}
        small = self._worth_forming(curvature, problem, num_products)
        if small:
            try:
                dense = dict(zip(small, self.formed.form(curvature, problem, small), strict=True))
            except FormingError as error:
                self._no_forming = f" (cannot be formed: {error})"
        others = lazily(lambda: self._product(curvature, problem))
        wanted = any(number for index, number in enumerate(num_products) if index not in dense)
        if wanted:
            others()

        def describe() -> list[str]:
            notes = others().notes if wanted else ["no products"] * len(problem.blocks)
            return [
                f"formed, {block.size} x {block.size}: cheaper than {num_products[index]} products"
                if index in dense
                else notes[index] + self._no_forming
                for index, block in enumerate(problem.blocks)
            ]

        return Noted(FormedMatrix(dense, others), describe)

    def _product(self, curvature: Curvature, problem: Problem) -> Noted:
        reason = self._no_tracing
        if not reason and problem.num_nodes > _LONGEST_GRAPH and not self.traced.compile:
            reason = f"tracing a graph of {problem.num_nodes} nodes takes long; compile=True asks for it"
        if not reason:
            try:
                return self.traced.linearize(curvature, problem)
            except TracingError as error:
                reason = self._no_tracing = str(error)
                warnings.warn(
                    f"This objective cannot be traced: {error}. Products are by double backward instead. To "
                    "have it so without a warning, pass products=DoubleBackward().",
                    stacklevel=2,
                )
        return _by_double_backward(self.graph.linearize(curvature, problem), problem, reason)

    def _worth_forming(
        self, curvature: Curvature, problem: Problem, num_products: Sequence[int]
    ) -> list[int]:
        sizes = [block.size for block in problem.blocks]
        if self._no_forming or not isinstance(curvature, GaussNewton) or min(sizes) > self.formed.max_size:
            return []
        gradient = 3 * self._count(problem) * problem.num_curvature_samples
        rows = problem.num_curvature_samples * problem.num_outputs
        small, saved = [], -gradient * problem.num_outputs
        for index, size in enumerate(sizes):
            gain = 4 / 3 * gradient * num_products[index] - 2 * rows * size**2
            if size <= self.formed.max_size and gain > 0:
                small.append(index)
                saved += gain
        return small if saved > 0 else []

    def _count(self, problem: Problem) -> float:
        """Multiplications and additions of the forward pass of one sample."""
        part = problem.curvature_parts()[0]
        num_samples = batch_size(part.batch)
        if num_samples not in self._forward:
            with problem.meter.once(), FlopCounterMode(display=False) as counter:
                problem.run(part)
            self._forward[num_samples] = counter.get_total_flops()
        return self._forward[num_samples] / num_samples


def _by_double_backward(matrix: BlockMatrix, problem: Problem, reason: str) -> Noted:
    return Noted(matrix, lambda: [f"double backward: {reason}"] * len(problem.blocks))
