"""Small blocks, formed explicitly: many CG steps for the price of a few.

The Gauss-Newton matrix of a block with few parameters is cheap to write down. The Jacobian of each
sample's outputs takes one backward pass per output, for all small blocks at once, and the sum of
``JᵢᵀHᵢJᵢ`` one matrix product. After that a CG step costs next to nothing.

It needs samples that do not see each other, so no BatchNorm in train mode, and no random numbers in the
network. The matrix is checked against a product by double backward before it is first relied upon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from blockhf.blocks import Block
from blockhf.curvature.base import Curvature, Products, coarsest, disagreement
from blockhf.curvature.double_backward import DoubleBackward
from blockhf.curvature.gauss_newton import GaussNewton
from blockhf.curvature.jacobian import FormingError, PerSampleJacobian, SampleHessians
from blockhf.linalg import BlockOperator, DenseBlocks, Described
from blockhf.objective import check_outputs
from blockhf.policy import PolicyState
from blockhf.samples import Part, Samples

_CHUNK = 2**26
"""The most bytes of Jacobians at a time."""


def num_bytes(block: Block) -> int:
    """Of the block's matrix."""
    return block.size**2 * block.params[0].element_size()


@dataclass(frozen=True)
class Formed(Products):
    """Products with Gauss-Newton matrices that are formed once a step.

    Args:
        memory_budget: How many bytes the matrices of all blocks may take; Jacobians take no more at a time,
            and at most 64 MiB.
    """

    memory_budget: int = 2**31

    def linearize(
        self, curvature: Curvature, samples: Samples, num_products: Sequence[int], state: PolicyState
    ) -> BlockOperator:
        """The matrix; raises ``FormingError`` where it cannot be formed."""
        if (size := sum(map(num_bytes, samples.blocks))) > self.memory_budget:
            raise FormingError(
                f"the matrices would take {size / 2**20:.3g} MiB, more than the memory_budget of "
                f"{self.memory_budget / 2**20:.3g} MiB"
            )
        everything = range(len(samples.blocks))
        fallback = cache(lambda: DoubleBackward().operator(curvature, samples))
        stored = dict(zip(everything, self.form(curvature, samples, everything, state), strict=True))
        notes = [f"formed, {block.size} x {block.size}" for block in samples.blocks]
        return Described(DenseBlocks(stored, fallback), lambda: notes)

    def form(
        self, curvature: Curvature, samples: Samples, indices: Sequence[int], state: PolicyState
    ) -> list[Tensor]:
        """The matrices of some blocks."""
        if not isinstance(curvature, GaussNewton):
            raise FormingError(f"{type(curvature).__name__} is not formed, only GaussNewton is")
        if samples.batch is None:
            raise FormingError("an objective of no arguments has no samples to tell apart")
        blocks = [samples.blocks[index] for index in indices]
        totals = [block.params[0].new_zeros(block.size, block.size) for block in blocks]
        checked: set[Any] = state.cache.setdefault("checked", set())
        key = samples.scope
        terms = None if key in checked else _Terms([0.0] * len(blocks))
        for part in samples.parts:
            if part.weight == 0 and len(samples.parts) > 1:
                continue  # without a label its mean is no number
            self._add(samples, part, blocks, totals, terms, state.cache)
        if terms is not None:
            with samples.ledger.once():
                self._check(curvature, samples, dict(zip(indices, totals, strict=True)), terms)
            checked.add(key)
        return totals

    def _add(
        self,
        samples: Samples,
        part: Part,
        blocks: Sequence[Block],
        totals: Sequence[Tensor],
        terms: _Terms | None,
        cache: dict[Any, Any],
    ) -> None:
        evaluation = samples.evaluate(part)
        if terms is not None:
            check_outputs(evaluation)  # it walks through the whole graph
            terms.eps = coarsest(evaluation.outputs)
        hessians = SampleHessians(evaluation)
        num_outputs = hessians.num_outputs
        jacobian = PerSampleJacobian(samples, part, blocks, num_outputs, cache)
        bytes_per_sample = (
            3 * num_outputs * sum(block.size for block in blocks) * hessians.like.element_size()
        )
        chunk = max(1, min(self.memory_budget, _CHUNK) // bytes_per_sample)
        with samples.ledger.counting("forming", part.shapes, tuple((b.name, b.size) for b in blocks)):
            for start in range(0, hessians.num_samples, chunk):
                stop = min(start + chunk, hessians.num_samples)
                for place, (total, rows) in enumerate(zip(totals, jacobian.rows(start, stop), strict=True)):
                    curved = hessians.times(start, stop, rows.view(stop - start, num_outputs, -1))
                    curved = curved.flatten(0, 1) * part.weight
                    if terms is not None:
                        norm = float(rows.norm())
                        largest = hessians.cancelling * abs(part.weight) * norm
                        terms.sizes[place] += max(float(curved.norm()), largest) * norm
                    total.addmm_(rows.T, curved)

    @staticmethod
    def _check(curvature: Curvature, samples: Samples, stored: Mapping[int, Tensor], terms: _Terms) -> None:
        reference = DoubleBackward().operator(curvature, samples)
        formed = DenseBlocks(stored, lambda: reference)
        for (index, matrix), size in zip(stored.items(), terms.sizes, strict=True):
            if off := disagreement(formed, reference, index, matrix, eps=terms.eps, size=size):
                raise FormingError(
                    f"the samples see each other: the matrix of block {samples.blocks[index].name!r}, "
                    f"formed sample by sample, is off by {off:.1e}"
                )


@dataclass
class _Terms:
    """What a formed matrix is the sum of: how large it is at most, block by block, and how coarse."""

    sizes: list[float]
    eps: float = 0.0
