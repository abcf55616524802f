"""Jacobians sample by sample: one backward pass for each output of a sample, for all samples at once.

The objective is run on one sample at a time under ``vmap``. Objectives that differentiate inside (physics
residuals with ``requires_grad_()`` and ``autograd.grad``) cannot be run so; they are recorded first, on one
sample, which turns their derivatives into plain operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from blockhf.batches import rebuild, take, tensors_of
from blockhf.blocks import Block
from blockhf.curvature.host import Host
from blockhf.curvature.reasons import in_words
from blockhf.curvature.rewrites import record
from blockhf.fx_graphs import TracingError
from blockhf.isolation import twice_differentiable
from blockhf.objective import Evaluation
from blockhf.samples import Part, Samples


class FormingError(Exception):
    """The matrix cannot be formed; the message says why."""


def _flat(tensor: Tensor) -> Tensor:
    """One row for each sample, also where a sample has a single number."""
    return tensor.reshape(len(tensor), -1)


def output_hessians(evaluation: Evaluation) -> Tensor:
    """For each sample the matrix of second derivatives of the loss by the sample's outputs."""
    outputs = evaluation.outputs
    num_samples = evaluation.num_samples
    if any(output.dim() == 0 or output.shape[0] != num_samples for output in outputs):
        raise FormingError("the outputs do not have the samples first")
    slopes = torch.autograd.grad(
        evaluation.loss, outputs, create_graph=True, allow_unused=True, materialize_grads=True
    )
    flat = torch.cat([_flat(slope) for slope in slopes], dim=1)
    columns = []
    for index in range(flat.shape[1]):
        seconds = (
            torch.autograd.grad(
                flat[:, index].sum(), outputs, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            if flat.requires_grad
            else [torch.zeros_like(output) for output in outputs]
        )
        columns.append(torch.cat([_flat(second) for second in seconds], dim=1))
    return torch.stack(columns, dim=-1).detach()


Outputs = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""From the values of parameters and the tensors of one sample to the sample's outputs in a row."""


class PerSampleJacobian:
    """From a range of samples to each block's Jacobian, (samples · outputs) × parameters.

    Args:
        samples: The objective.
        part: The samples.
        blocks: Of these parameters.
        num_outputs: How many a sample has.
        cache: Keeps what was recorded, from step to step.
    """

    def __init__(
        self,
        samples: Samples,
        part: Part,
        blocks: Sequence[Block],
        num_outputs: int,
        cache: dict[Any, Any],
    ) -> None:
        self.objective, self.part = samples.objective, part
        self.blocks, self.num_outputs = blocks, num_outputs
        self.params = [param for block in blocks for param in block.params]
        self.sampled = [tensor.dim() > 0 for tensor in tensors_of(part.batch)]
        self._host = Host(samples.structure.modules)
        kinds = [(tensor.shape[1:], tensor.dtype) for tensor in tensors_of(part.batch)]
        key = samples.scope, tuple(kinds), tuple(map(id, self.params))
        self._cache = cache
        self._key = key
        try:
            self._names = self._host.owners(self.params)
        except TracingError as error:
            raise FormingError(str(error)) from error

    def rows(self, start: int, stop: int) -> list[Tensor]:
        """Of the samples from ``start`` to ``stop``."""
        gradients = iter(self._gradients(*self._repeated(start, stop)))
        return [
            torch.cat([_flat(next(gradients).detach()) for _ in block.params], dim=1) for block in self.blocks
        ]

    def _repeated(self, start: int, stop: int) -> tuple[list[Tensor], Tensor]:
        """The samples once per output, and the outputs' directions.

        A single backward pass over these is faster than a backward pass per output.
        """
        inputs = [
            tensor.detach().repeat_interleave(self.num_outputs, 0) if own else tensor.detach()
            for tensor, own in zip(tensors_of(take(self.part.batch, start, stop)), self.sampled, strict=True)
        ]
        like = self.params[0]
        directions = torch.eye(self.num_outputs, dtype=like.dtype, device=like.device)
        return inputs, directions.repeat(stop - start, 1)

    def _gradients(self, inputs: Sequence[Tensor], directions: Tensor) -> Sequence[Tensor]:
        recorded = self._cache.get("one sample", {}).get(self._key)
        try:
            return self._differentiated(recorded or self._run, inputs, directions)
        except Exception as error:  # whatever an operation without a batching rule may raise
            if recorded is not None:
                raise FormingError(in_words(error)) from error
        try:
            recorded = self._cache.setdefault("one sample", {})[self._key] = self._record(inputs)
            return self._differentiated(recorded, inputs, directions)
        except Exception as error:
            self._cache.get("one sample", {}).pop(self._key, None)
            raise FormingError(in_words(error)) from error

    def _differentiated(
        self, outputs: Outputs, inputs: Sequence[Tensor], directions: Tensor
    ) -> Sequence[Tensor]:
        def along(values: Sequence[Tensor], inputs: Sequence[Tensor], direction: Tensor) -> Tensor:
            sample = [own[None] if cut else own for own, cut in zip(inputs, self.sampled, strict=True)]
            return outputs(values, sample) @ direction

        dims = [0 if own else None for own in self.sampled]
        values = [param.detach() for param in self.params]
        with twice_differentiable():
            gradients: Sequence[Tensor] = vmap(grad(along), in_dims=(None, dims, 0))(
                values, inputs, directions
            )
        return gradients

    def _run(self, values: Sequence[Tensor], sample: Sequence[Tensor]) -> Tensor:
        """One sample's outputs by the objective itself."""
        stand_ins = {name: values[index] for name, index in self._names.items()}

        def call() -> Any:
            return self.objective(rebuild(self.part.batch, sample))

        outputs, _ = functional_call(self._host, stand_ins, (call,), tie_weights=False)
        flat = [tensor.reshape(-1) for tensor in tensors_of(outputs) if tensor.is_floating_point()]
        return torch.cat(flat)

    def _record(self, inputs: Sequence[Tensor]) -> Outputs:
        """One sample's outputs as a graph of plain operations."""
        sample = [own[:1].clone() if cut else own for own, cut in zip(inputs, self.sampled, strict=True)]
        with twice_differentiable():
            run = self._run
            graph = record(
                lambda values, own: run(values, own), [param.detach() for param in self.params], sample
            )
        # Autograd detaches what it saves; derivatives inside the objective are to be differentiated again.
        for node in list(graph.graph.nodes):
            if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
        graph.recompile()
        return lambda values, sample: graph(list(values), list(sample))
