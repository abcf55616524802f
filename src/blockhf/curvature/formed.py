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

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from blockhf.batches import rebuild, take, tensors_of
from blockhf.blocks import Block
from blockhf.curvature.base import Curvature, Products, disagreement
from blockhf.curvature.double_backward import DoubleBackward
from blockhf.curvature.gauss_newton import GaussNewton
from blockhf.curvature.host import Host
from blockhf.fx_graphs import TracingError
from blockhf.isolation import twice_differentiable
from blockhf.linalg import BlockOperator, DenseBlocks, Described
from blockhf.objective import Evaluation, check_outputs
from blockhf.policy import PolicyState
from blockhf.samples import Part, Samples


class FormingError(Exception):
    """The matrix cannot be formed; the message says why."""


@dataclass(frozen=True)
class Formed(Products):
    """Products with Gauss-Newton matrices that are formed once a step.

    Args:
        memory_budget: How many bytes the Jacobians may take at a time.
        max_size: The largest block to form.
    """

    memory_budget: int = 2**26
    max_size: int = 4096

    def linearize(
        self, curvature: Curvature, samples: Samples, num_products: Sequence[int], state: PolicyState
    ) -> BlockOperator:
        """The matrix; raises ``FormingError`` where it cannot be formed."""
        for block in samples.blocks:
            if block.size > self.max_size:
                raise FormingError(
                    f"block {block.name!r} has {block.size} parameters, more than max_size, {self.max_size}"
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
        key = _modes(samples)
        for part in samples.parts:
            self._add(samples, part, blocks, totals, is_checked=key in checked)
        if key not in checked:
            with samples.ledger.once():
                self._check(curvature, samples, dict(zip(indices, totals, strict=True)))
            checked.add(key)
        return totals

    def _add(
        self,
        samples: Samples,
        part: Part,
        blocks: Sequence[Block],
        totals: Sequence[Tensor],
        *,
        is_checked: bool,
    ) -> None:
        evaluation = samples.evaluate(part)
        if not is_checked:  # it walks through the whole graph
            check_outputs(evaluation)
        hessians = _output_hessians(evaluation)
        num_outputs = hessians.shape[-1]
        jacobian = _Jacobian(samples, part, blocks, num_outputs)
        bytes_per_sample = 3 * num_outputs * sum(block.size for block in blocks) * hessians.element_size()
        chunk = max(1, self.memory_budget // bytes_per_sample)
        with samples.ledger.counting("forming", part.shapes, tuple((b.name, b.size) for b in blocks)):
            for start in range(0, len(hessians), chunk):
                stop = min(start + chunk, len(hessians))
                own = hessians[start:stop] * part.weight
                for total, rows in zip(totals, jacobian.rows(start, stop), strict=True):
                    curved = own @ rows.view(stop - start, num_outputs, -1)
                    total.addmm_(rows.T, curved.flatten(0, 1))

    @staticmethod
    def _check(curvature: Curvature, samples: Samples, stored: Mapping[int, Tensor]) -> None:
        reference = DoubleBackward().operator(curvature, samples)
        formed = DenseBlocks(stored, lambda: reference)
        for index, matrix in stored.items():
            if off := disagreement(formed, reference, index, len(matrix), matrix):
                raise FormingError(
                    f"the samples see each other: the matrix of block {samples.blocks[index].name!r}, "
                    f"formed sample by sample, is off by {off:.1e}"
                )


def _output_hessians(evaluation: Evaluation) -> Tensor:
    """For each sample the matrix of second derivatives of the loss by the sample's outputs."""
    outputs = evaluation.outputs
    num_samples = evaluation.num_samples
    if any(output.dim() == 0 or output.shape[0] != num_samples for output in outputs):
        raise FormingError("the outputs do not have the samples first")
    slopes = torch.autograd.grad(
        evaluation.loss, outputs, create_graph=True, allow_unused=True, materialize_grads=True
    )
    flat = torch.cat([slope.flatten(1) if slope.dim() > 1 else slope[:, None] for slope in slopes], dim=1)
    columns = []
    for index in range(flat.shape[1]):
        seconds = (
            torch.autograd.grad(
                flat[:, index].sum(), outputs, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            if flat.requires_grad
            else [torch.zeros_like(output) for output in outputs]
        )
        columns.append(torch.cat([s.flatten(1) if s.dim() > 1 else s[:, None] for s in seconds], dim=1))
    return torch.stack(columns, dim=-1).detach()


class _Jacobian:
    """From a range of samples to each block's Jacobian, (samples · outputs) × parameters."""

    def __init__(self, samples: Samples, part: Part, blocks: Sequence[Block], num_outputs: int) -> None:
        self.objective, self.part, self.blocks, self.num_outputs = (
            samples.objective,
            part,
            blocks,
            num_outputs,
        )
        self.params = [param for block in blocks for param in block.params]
        self.sampled = [tensor.dim() > 0 for tensor in tensors_of(part.batch)]
        self._host = Host(samples.structure.modules)
        try:
            self._names = self._host.owners(self.params)
        except TracingError as error:
            raise FormingError(str(error)) from error

    def rows(self, start: int, stop: int) -> list[Tensor]:
        gradients = iter(self._gradients(*self._repeated(start, stop)))
        return [
            torch.cat([next(gradients).detach().flatten(1) for _ in block.params], dim=1)
            for block in self.blocks
        ]

    def _repeated(self, start: int, stop: int) -> tuple[list[Tensor], Tensor]:
        """The samples once per output, and the outputs' directions.

        A single backward pass over these is faster than a backward pass per output.
        """
        inputs = [
            tensor.repeat_interleave(self.num_outputs, 0) if own else tensor
            for tensor, own in zip(tensors_of(take(self.part.batch, start, stop)), self.sampled, strict=True)
        ]
        like = self.params[0]
        directions = torch.eye(self.num_outputs, dtype=like.dtype, device=like.device)
        return inputs, directions.repeat(stop - start, 1)

    def _gradients(self, inputs: Sequence[Tensor], directions: Tensor) -> Sequence[Tensor]:
        along = vmap(
            grad(self._output_along), in_dims=(None, [0 if own else None for own in self.sampled], 0)
        )
        try:
            with twice_differentiable():
                gradients: Sequence[Tensor] = along(
                    [param.detach() for param in self.params], inputs, directions
                )
        except Exception as error:  # whatever an operation without a batching rule may raise
            raise FormingError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
        return gradients

    def _output_along(self, values: Sequence[Tensor], inputs: Sequence[Tensor], direction: Tensor) -> Tensor:
        """One sample's outputs along a direction."""
        sample = [tensor[None] if own else tensor for tensor, own in zip(inputs, self.sampled, strict=True)]
        stand_ins = {name: values[index] for name, index in self._names.items()}

        def call() -> Any:
            return self.objective(rebuild(self.part.batch, sample))

        outputs, _ = functional_call(self._host, stand_ins, (call,), tie_weights=False)
        flat = [tensor.reshape(-1) for tensor in tensors_of(outputs) if tensor.is_floating_point()]
        return torch.cat(flat) @ direction


def _modes(samples: Samples) -> Any:
    """The modules and whether they are being trained: what a look at the objective holds for."""
    return tuple((id(module), module.training) for module in samples.structure.modules)
