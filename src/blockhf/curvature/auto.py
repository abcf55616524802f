"""The choice between the ways to a product, block by block."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from functools import cache

import torch

from blockhf.curvature.dense import Formed, FormedMatrix, FormingError, lazily
from blockhf.curvature.gauss_newton import GaussNewton
from blockhf.curvature.graph import DoubleBackward
from blockhf.curvature.products import Curvature, Noted
from blockhf.curvature.traced import Traced, TracingError
from blockhf.objective import Problem
from blockhf.operators import BlockMatrix

# Costs in gradients on the curvature batch, as measured on two cores; see benchmarks/costs.py.
_PRODUCT = 1.2
_JACOBIAN_PER_OUTPUT = 1.0

_LONGEST_GRAPH = 2000
"""Nodes of the loss's graph up to which tracing takes seconds; unrolled recurrences have more."""


class Auto:
    """Forms small blocks, traces the others, and falls back to the double backward.

    A block is formed where that is estimated to take less time than its CG steps. If the objective cannot
    be formed or traced, one warning says why, and the next way is taken from then on.

    Args:
        compile: As for ``Traced``.
        memory_budget: As for ``Traced``.
    """

    def __init__(self, *, compile: bool = False, memory_budget: int = 0) -> None:
        self.formed = Formed()
        self.traced = Traced(compile=compile, memory_budget=memory_budget)
        self.graph = DoubleBackward(memory_budget=memory_budget)
        self._no_forming: str | None = None
        self._no_tracing: str | None = None

    def linearize(self, curvature: Curvature, problem: Problem, num_products: Sequence[int]) -> BlockMatrix:
        small = self._worth_forming(curvature, problem, num_products)
        notes = [""] * len(problem.blocks)
        dense = {}
        if small:
            try:
                matrices = self.formed.form(curvature, problem, small)
                dense = dict(zip(small, matrices, strict=True))
                for index in small:
                    size = problem.blocks[index].size
                    notes[index] = f"formed, {size} x {size}: cheaper than {num_products[index]} products"
            except FormingError as error:
                self._no_forming = str(error)
                self._warn("forming small blocks", error, "other products")
        if len(dense) == len(problem.blocks):
            return Noted(FormedMatrix(dense, lazily(lambda: self.graph.linearize(curvature, problem))), notes)
        matrix, note = self._product(curvature, problem)
        notes = [own or note for own in notes]
        return Noted(FormedMatrix(dense, lambda: matrix) if dense else matrix, notes)

    def _product(self, curvature: Curvature, problem: Problem) -> tuple[BlockMatrix, str]:
        if self._no_tracing is None and problem.batch is not None:
            if problem.num_nodes > _LONGEST_GRAPH:
                note = f"double backward: tracing {problem.num_nodes} operations would take long"
                return self.graph.linearize(curvature, problem), note
            try:
                matrix = self.traced.linearize(curvature, problem)
                return matrix, getattr(matrix, "notes", ["traced"])[0]
            except TracingError as error:
                self._no_tracing = str(error)
                self._warn("tracing", error, "the double backward")
        reason = self._no_tracing or "no batch to trace with"
        return self.graph.linearize(curvature, problem), f"double backward: {reason}"

    def _worth_forming(
        self, curvature: Curvature, problem: Problem, num_products: Sequence[int]
    ) -> list[int]:
        if self._no_forming is not None or not isinstance(curvature, GaussNewton) or problem.batch is None:
            return []
        device = problem.devices[0]
        gradient = problem.seconds_per_sample * problem.num_curvature_samples
        rows = problem.num_curvature_samples * problem.num_outputs
        small, saved = [], -_JACOBIAN_PER_OUTPUT * problem.num_outputs * gradient
        for index, block in enumerate(problem.blocks):
            multiply = 2 * rows * block.size**2 / _multiplications_per_second(str(device))
            gain = num_products[index] * _PRODUCT * gradient - multiply
            if block.size <= self.formed.max_size and gain > 0:
                small.append(index)
                saved += gain
        return small if saved > 0 else []

    def _warn(self, what: str, error: Exception, instead: str) -> None:
        warnings.warn(
            f"{what.capitalize()} is not possible for this objective: {error}. It goes on with {instead}.",
            stacklevel=2,
        )


@cache
def _multiplications_per_second(device: str) -> float:
    """The rate of a matrix product, measured once."""
    matrix = torch.ones(512, 512, device=device)
    seconds = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for the device
        seconds = min(seconds, time.perf_counter() - start)
    return 2 * 512**3 / seconds
