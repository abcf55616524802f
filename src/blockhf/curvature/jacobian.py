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

from blockhf.batches import rebuild, tensors_of
from blockhf.blocks import Block
from blockhf.curvature.host import Host
from blockhf.curvature.loss_hessian import HessianProduct, closed_forms, second_derivatives
from blockhf.curvature.reasons import in_words
from blockhf.curvature.rewrites import record
from blockhf.fx_graphs import TracingError
from blockhf.isolation import twice_differentiable
from blockhf.objective import Evaluation
from blockhf.samples import Part, Samples

_LARGEST = 2**30
"""Bytes that the second derivatives of the loss by the outputs may take."""


class FormingError(Exception):
    """The matrix cannot be formed; the message says why."""


def _flat(tensor: Tensor) -> Tensor:
    """One row for each sample, also where a sample has a single number."""
    return tensor.reshape(len(tensor), -1)


class SampleHessians:
    """For each sample the matrix ``H`` of second derivatives of the loss by the sample's outputs.

    Where it is known in closed form it is not stored: for predictions at many positions it would be large.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        outputs, num_samples = evaluation.outputs, evaluation.num_samples
        if any(output.dim() == 0 or output.shape[0] != num_samples for output in outputs):
            raise FormingError("the outputs do not have the samples first")
        self.num_samples = num_samples or 1
        self._shapes = [output.shape[1:] for output in outputs]
        self._widths = [shape.numel() for shape in self._shapes]
        self.num_outputs = sum(self._widths)
        self.like = outputs[0].detach()
        product = second_derivatives(evaluation)
        self._forms = None if product is None else closed_forms(outputs, product)
        self._stored: Tensor | None = None
        if self._forms is None:
            self._stored = self._store(product)

    def times(self, start: int, stop: int, rows: Tensor) -> Tensor:
        """``H`` times Jacobians of the samples from ``start`` to ``stop``: samples, outputs, parameters."""
        if self._stored is not None:
            return self._stored[start:stop] @ rows
        assert self._forms is not None
        columns = rows.movedim(-1, 0)
        pieces = zip(self._forms, torch.split(columns, self._widths, dim=2), self._shapes, strict=True)
        curved = [
            form.of_samples(start, stop).times(own.reshape(*own.shape[:2], *shape)).reshape(own.shape)
            for form, own, shape in pieces
        ]
        return torch.cat(curved, dim=2).movedim(0, -1).to(rows.dtype)

    @property
    def cancelling(self) -> float:
        """How large the terms are that may cancel in ``H``, as far as is known."""
        return max((form.cancelling for form in self._forms or ()), default=0.0)

    def dense(self) -> Tensor:
        """All of them, stored."""
        if self._stored is None:
            identity = torch.eye(self.num_outputs, dtype=self.like.dtype, device=self.like.device)
            self._check_size()
            self._stored = self.times(0, self.num_samples, identity.expand(self.num_samples, -1, -1))
        return self._stored

    def _check_size(self) -> None:
        size = self.num_samples * self.num_outputs**2 * self.like.element_size()
        if size > _LARGEST:
            raise FormingError(
                f"the second derivatives of the loss by {self.num_outputs} outputs of a sample would take "
                f"{size / 2**20:.0f} MiB"
            )

    def _store(self, product: HessianProduct | None) -> Tensor:
        self._check_size()
        stored = self.like.new_zeros(self.num_samples, self.num_outputs, self.num_outputs)
        for index in range(self.num_outputs if product is not None else 0):
            assert product is not None
            column = self.like.new_zeros(self.num_samples, self.num_outputs)
            column[:, index] = 1
            pieces = zip(torch.split(column, self._widths, dim=1), self._shapes, strict=True)
            seconds = product([own.reshape(-1, *shape) for own, shape in pieces])
            stored[:, :, index] = torch.cat([_flat(second) for second in seconds], dim=1)
        return stored


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
        length: Where there are samples of several kinds, how many there are of the kind that is meant.
        outputs: Which of the objective's outputs are of that kind.
    """

    def __init__(
        self,
        samples: Samples,
        part: Part,
        blocks: Sequence[Block],
        num_outputs: int,
        cache: dict[Any, Any],
        length: int | None = None,
        outputs: Sequence[int] | None = None,
    ) -> None:
        self._length, self._outputs = length, outputs
        self.objective, self.part = samples.objective, part
        self.blocks, self.num_outputs = blocks, num_outputs
        self.params = [param for block in blocks for param in block.params]
        self.sampled = [
            tensor.dim() > 0 and length in (None, len(tensor)) for tensor in tensors_of(part.batch)
        ]
        self._host = Host(samples.structure.modules)
        kinds = [(tensor.shape[1:], tensor.dtype) for tensor in tensors_of(part.batch)]
        key = samples.scope, tuple(kinds), tuple(map(id, self.params)), tuple(self.sampled)
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
            tensor.detach()[start:stop].repeat_interleave(self.num_outputs, 0)
            if own
            else _one(tensor.detach())
            for tensor, own in zip(tensors_of(self.part.batch), self.sampled, strict=True)
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
        found = [tensor for tensor in tensors_of(outputs) if tensor.is_floating_point()]
        chosen = found if self._outputs is None else [found[index] for index in self._outputs]
        return torch.cat([tensor.reshape(-1) for tensor in chosen])

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


def _one(tensor: Tensor) -> Tensor:
    """One sample of a kind that is not meant, or a number that belongs to all samples."""
    return tensor[:1] if tensor.dim() > 0 else tensor
