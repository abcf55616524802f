"""The objective at one point: its gradient, its loss nearby, and its curvature there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockhf.batches import Share
from blockhf.curvature import Curvature, Products
from blockhf.isolation import frozen, twice_differentiable
from blockhf.linalg import BlockOperator, Shifted
from blockhf.objective import Evaluation
from blockhf.policy import PolicyState
from blockhf.samples import NORMS, Part, Samples


@dataclass(frozen=True)
class Linearizer:
    """Which matrix describes the loss near a point, and how to multiply with it."""

    curvature: Curvature
    products: Products
    state: PolicyState


class Point:
    """The objective near the current parameters, on given samples.

    Where several processes have the samples between them, what comes out is that of all samples together.

    Args:
        samples: The objective, the samples and the blocks.
        linearizer: The way to the curvature.
        origin: For each block, a flat copy of the parameters; ``None`` has it made.
        weight_decay: By the names of blocks, the factors of L2 penalties ``factor * ||w||² / 2``, which are
            part of loss, gradient and curvature.

    Attributes:
        own_loss: The objective's own loss, without penalties, once ``gradient`` has been called.
        keeps_graph: Whether the curvature is taken from the very samples of the gradient, so that the two
            can share a forward pass.
    """

    keeps_graph: bool
    own_loss: Tensor

    def __init__(
        self,
        samples: Samples,
        linearizer: Linearizer,
        origin: Sequence[Tensor] | None = None,
        weight_decay: Mapping[str, float] | None = None,
    ) -> None:
        self.samples, self.linearizer, self.keeps_graph = samples, linearizer, False
        self.origin = [block.values() for block in samples.blocks] if origin is None else origin
        self.blocks = samples.blocks
        self._weight_decay = weight_decay or {}
        self.decays = [self._weight_decay.get(block.name, 0.0) for block in samples.blocks]
        self._buffers = samples.isolated()
        self._operator: BlockOperator | None = None

    def on(self, batch: Any, share: Share, **rest: Any) -> Point:
        """The same objective and parameters on other samples; arguments as for ``Samples.on``."""
        blocks = rest.get("blocks")
        samples = self.samples.on(batch, share, **rest)
        return Point(samples, self.linearizer, None if blocks else self.origin, self._weight_decay)

    def apart(self, taken: tuple[Any, Share] | None) -> Point | None:
        """The same on samples of their own, of which gradient and curvature are both taken."""
        if taken is None:
            return None
        other = self.on(*taken)
        other.keeps_graph = len(other.samples.parts) == 1
        return other

    def gradient(self, *, looks: bool = True) -> tuple[Tensor, list[Tensor]]:
        """The loss and, for each block, its flat gradient.

        Buffers that modules write move here, once a step, and only for good when ``commit`` is called.

        Args:
            looks: Whether to take down what the objective's structure is.
        """
        loss: Any = 0.0
        gradient: list[Tensor] = []
        samples, work = self.samples, self.samples.ledger.work
        with self._buffers:
            for part in samples.parts:
                with samples.ledger.counting("gradient", part.shapes):
                    evaluation = self._evaluate(part)
                    flat = self._flat_gradient(evaluation.loss, part.weight)
                loss = loss + _scaled(evaluation.loss.detach(), part.weight)
                gradient = [a.add_(b) for a, b in zip(gradient, flat, strict=True)] if gradient else flat
                if looks and part is samples.parts[0]:
                    samples.note_structure(evaluation, self._buffers.modules)
                if self.keeps_graph:
                    samples.keep(evaluation)
                work.gradient_samples += evaluation.num_samples or 1
        work.num_gradients += 1
        self.own_loss, *gradient = samples.ranks.sum([loss, *gradient])
        penalties = map(self.penalty_gradient, range(len(self.blocks)))
        gradient = [
            own if more is None else own + more for own, more in zip(gradient, penalties, strict=True)
        ]
        return self._penalized(self.own_loss), gradient

    def penalty_gradient(self, index: int) -> Tensor | None:
        """The gradient of a block's penalty, if it has one."""
        return self.decays[index] * self.origin[index] if self.decays[index] else None

    def penalty(self, like: Tensor) -> Tensor:
        """The penalties at the parameters, as numbers of a kind."""
        return self._penalized(torch.zeros_like(like))

    def _penalized(self, loss: Tensor, place: Sequence[Tensor] | None = None) -> Tensor:
        for decay, value in zip(self.decays, place or self.origin, strict=True):
            if decay:
                loss = loss + (decay / 2 * (value @ value)).to(loss)
        return loss

    def loss_at(self, update: Sequence[Tensor]) -> Tensor:
        """The loss at the parameters plus ``update``; the parameters stay.

        Kernels, random numbers and the order of the sum are those of ``gradient``, so that the two losses
        can be compared to the last bit.
        """
        (loss,) = self.losses_at([self._moved(update)])
        return loss

    def losses_at(self, places: Iterable[Sequence[Tensor]]) -> list[Tensor]:
        """The losses at some values of the parameters; the parameters stay."""
        losses = []
        with self._away():
            for place in places:
                loss: Any = 0.0
                for part, evaluation in zip(self.samples.parts, self._evaluations_at(place), strict=True):
                    loss = loss + _scaled(evaluation.loss.detach(), part.weight)
                (total,) = self.samples.ranks.sum([loss])
                losses.append(self._penalized(total, place))
        return losses

    def outputs_at(self, update: Sequence[Tensor]) -> list[list[Tensor]]:
        """The outputs there, of each part of the samples of this process."""
        structure, place = self.samples.structure, self._moved(update)
        with self._away():
            if structure.hides_outputs is None:
                with self.samples.ledger.once():  # a resumed run looks again
                    found = self._evaluations_at(place)
                structure.hides_outputs = any(len(each.outputs) != structure.num_tensors for each in found)
            found = self._evaluations_at(place, with_graph=structure.hides_outputs)
        return [list(each.outputs) for each in found]

    def _moved(self, update: Sequence[Tensor]) -> list[Tensor]:
        return [value + change for value, change in zip(self.origin, update, strict=True)]

    @contextlib.contextmanager
    def _away(self) -> Iterator[None]:
        """Within, parameters may be written unseen by autograd; at the end they are where they were."""
        try:
            yield
        finally:
            for block, value in zip(self.blocks, self.origin, strict=True):
                block.visit_(value)

    def _evaluations_at(self, place: Sequence[Tensor], *, with_graph: bool = False) -> list[Evaluation]:
        samples = self.samples
        still = contextlib.nullcontext() if with_graph else frozen(samples.params)
        found = []
        for block, value in zip(self.blocks, place, strict=True):
            block.visit_(value)
        with still, samples.isolated(), self._kernels():
            for part in samples.parts:
                with samples.ledger.counting("forward", part.shapes):
                    found.append(samples.run(part).detached())
        samples.ledger.work.num_evaluations += 1
        samples.ledger.work.evaluated_samples += samples.num_samples
        return found

    @contextlib.contextmanager
    def linearize(self, num_products: Sequence[int] = ()) -> Iterator[BlockOperator]:
        """The curvature, ready for about so many products with each block; released at the end.

        Inside of another ``linearize`` of the same point it is that one's operator.
        """
        if self._operator is not None:
            yield self._operator
            return
        own = self.linearizer
        budget = num_products or [0] * len(self.blocks)
        operator = own.products.linearize(own.curvature, self.samples, budget, own.state)
        self._operator = self.samples.ranks.sum_operator(operator)
        if any(self.decays):
            self._operator = Shifted(self._operator, self.decays)
        try:
            yield self._operator
        finally:
            self._operator = None
            self.samples.release()

    def commit(self, update: Sequence[Tensor] | None) -> None:
        """Move the parameters by ``update``, if any, and keep what the gradient pass wrote into buffers."""
        if update is not None:
            self.move(update)
        self._buffers.commit()

    def move(self, update: Sequence[Tensor]) -> None:
        """Move the parameters alone."""
        self.move_to(self._moved(update))

    def move_to(self, place: Sequence[Tensor]) -> None:
        """Give the parameters these values."""
        for block, value in zip(self.blocks, place, strict=True):
            block.assign_(value)

    def refresh_statistics(self) -> None:
        """Take the running statistics of BatchNorm layers anew, at the parameters as they are now.

        Those of the gradient pass are of the parameters before the step, and averages over steps lag behind:
        with few, large updates the model would be tested with statistics of another one.
        """
        norms = [
            module
            for module in self.samples.structure.modules
            if isinstance(module, NORMS) and module.training and module.running_mean is not None
        ]
        if not norms:
            return
        samples, momenta = self.samples, [module.momentum for module in norms]
        with frozen(samples.params), samples.isolated() as buffers, self._kernels():
            try:
                for number, part in enumerate(samples.parts, start=1):
                    for module in norms:
                        module.momentum = 1 / number  # the mean over the parts
                    with samples.ledger.counting("forward", part.shapes):
                        samples.run(part)
            finally:
                for module, momentum in zip(norms, momenta, strict=True):
                    module.momentum = momentum
        buffers.commit(("running_mean", "running_var"))

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers that ``commit`` writes to."""
        return self._buffers.originals

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        """Where curvature shares the pass of the gradient, kernels that autograd can differentiate twice."""
        return twice_differentiable() if self.keeps_graph else contextlib.nullcontext()

    def _evaluate(self, part: Part) -> Evaluation:
        with self._kernels():
            evaluation = self.samples.run(part)
        if not evaluation.loss.requires_grad:
            raise ValueError(
                "The loss does not depend on any parameter through the graph. Leave out detach(), .data, "
                "torch.no_grad() and backward() in the objective."
            )
        return evaluation

    def _gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        try:
            return torch.autograd.grad(
                loss, self.samples.params, retain_graph=self.keeps_graph, allow_unused=True
            )
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise ValueError(
                "The graph of the loss is gone: the objective calls backward() itself. Leave that, and "
                "zero_grad(), to the optimizer: return outputs and loss."
            ) from error

    def _flat_gradient(self, loss: Tensor, weight: float) -> list[Tensor]:
        gradients = iter(self._gradients(loss))
        flat = []
        for block in self.blocks:
            own = [next(gradients) for _ in block.params]
            if any(gradient is not None and gradient.is_sparse for gradient in own):
                raise ValueError(
                    f"A gradient of block {block.name!r} is sparse. Build the layer with sparse=False."
                )
            flat.append(_scaled(block.flatten(own), weight))
        return flat


def _scaled(tensor: Tensor, weight: float) -> Tensor:
    if weight == 0.0:  # nothing of it counts, whatever it is: the mean over no labels is not a number
        return torch.zeros_like(tensor)
    return tensor if weight == 1.0 else tensor * weight
