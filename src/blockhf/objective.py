"""The objective's contract, batches and parts of batches, and the objective near one point.

An objective is the user's own code. It takes a batch and returns the outputs and the loss::

    def objective(batch):
        inputs, targets = batch
        outputs = model(inputs)                             # J is taken of these ...
        return outputs, F.cross_entropy(outputs, targets)   # ... and H of this, with respect to them

``Problem`` is that objective during one step of the optimizer: on one batch, near one point. Every
policy of the optimizer asks its questions there, and there they are counted.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook

from blockhf._torch import is_functorch_wrapper, own_buffers
from blockhf.blocks import Block
from blockhf.flops import Meter
from blockhf.operators import BlockMatrix

Objective = Callable[..., Any]
Reduction = Literal["mean", "sum"]

_WRITE = "Write `return outputs, loss`, where the loss is computed from the outputs."


@dataclass(frozen=True)
class Evaluation:
    """What an objective returned: its differentiable outputs, in a row, and its loss."""

    outputs: tuple[Tensor, ...]
    loss: Tensor
    num_samples: int | None = None
    reduction: Reduction = "mean"


def evaluate(objective: Objective, batch: Any = None) -> Evaluation:
    """Call the objective and check what comes back.

    ``batch=None`` calls it without arguments, which is torch's closure convention.
    """
    returned = objective() if batch is None else objective(batch)
    if isinstance(returned, Tensor):
        outputs, loss = None, returned
    elif isinstance(returned, tuple) and len(returned) == 2:
        outputs, loss = returned
    else:
        raise ValueError(f"The objective returned a {type(returned).__name__}, not a pair. {_WRITE}")
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"The objective's loss is a {type(loss).__name__}, not a tensor, so it has no gradient. "
            "Leave out .item() and float()."
        )
    if loss.numel() != 1:
        raise ValueError(
            f"The objective's loss has shape {tuple(loss.shape)}, but must be one number. "
            "Write loss.mean(), or loss.sum() together with reduction='sum'."
        )
    tensors = tuple(
        tensor for tensor in tensors_of(outputs) if tensor.is_floating_point() and tensor.requires_grad
    )
    num_samples = None if batch is None else batch_size(batch)
    return Evaluation(tensors, loss.reshape(()), num_samples)


def check_outputs(evaluation: Evaluation) -> None:
    """Raise unless the loss is a function of the outputs and no output is one of another output.

    Without that, the derivatives of the loss with respect to the outputs are not what they seem.
    """
    outputs, loss = evaluation.outputs, evaluation.loss
    if not outputs:
        raise ValueError(
            "The objective gave no outputs that can be differentiated, so there is nothing to take J of. "
            + _WRITE
        )
    edges = [_edge(output) for output in outputs]
    if not loss.requires_grad or not _ancestors(loss).intersection(edges):
        raise ValueError(
            "The loss does not depend on the outputs through the graph: it was computed from other "
            "tensors, or from a detached or re-computed copy. " + _WRITE
        )
    if len(outputs) > 1:
        for i, output in enumerate(outputs):
            if edges.count(edges[i]) > 1 or not _ancestors(output).isdisjoint(edges):
                raise ValueError(
                    f"Output {i}, of shape {tuple(output.shape)}, is computed from another output. Return "
                    "only those tensors from which the loss is computed at last, e.g. the logits."
                )


def tensors_of(nest: Any) -> Iterator[Tensor]:
    """The tensors of any nesting of tuples, lists and mappings, in order."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from tensors_of(value)
    elif isinstance(nest, (tuple, list)):
        for value in nest:
            yield from tensors_of(value)


def batch_size(batch: Any) -> int:
    """The common first dimension of the tensors of a batch.

    >>> batch_size({"image": torch.zeros(5, 3), "label": torch.zeros(5)})
    5
    """
    sizes = sorted({tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim() > 0})
    if not sizes:
        raise ValueError(
            "The batch holds no tensor with a sample dimension. Pass tensors, or tuples, lists or dicts of "
            "them; or call step(objective) with an objective of no arguments."
        )
    if len(sizes) > 1:
        raise ValueError(
            f"The tensors of the batch have different first dimensions: {', '.join(map(str, sizes))}. "
            "Put the samples first in each of them."
        )
    if sizes == [0]:
        raise ValueError("The batch is empty.")
    return sizes[0]


def take(batch: Any, start: int, stop: int) -> Any:
    """The samples ``start`` to ``stop`` of a batch, in the same nesting.

    Numbers, ``None`` and whatever else is no tensor with a sample dimension are passed on as they are.

    >>> take({"x": torch.arange(4), "scale": 0.5}, 1, 3)
    {'x': tensor([1, 2]), 'scale': 0.5}
    """
    return _mapped(batch, lambda tensor: tensor[start:stop] if tensor.dim() > 0 else tensor)


def rebuild(batch: Any, tensors: Iterable[Tensor]) -> Any:
    """The same nesting with other tensors, given in the order of ``tensors_of``."""
    others = iter(tensors)
    return _mapped(batch, lambda _: next(others))


def _mapped(nest: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, Mapping):
        values = {key: _mapped(value, function) for key, value in nest.items()}
        if not isinstance(nest, dict) and not hasattr(nest, "__copy__"):
            return values  # a shallow copy might share its items with the original
        part: Any = copy.copy(nest)  # keeps the class, e.g. that of a tokenizer's output
        for key, value in values.items():
            part[key] = value
        return part
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(_mapped(value, function) for value in nest))
    if isinstance(nest, (tuple, list)):
        return type(nest)(_mapped(value, function) for value in nest)
    return nest


class RandomState:
    """The state of the random numbers of the CPU and of some devices, now or put back."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self._modules = [(torch.get_device_module(d), d) for d in devices if d.type not in ("cpu", "meta")]
        self._cpu = torch.get_rng_state()
        self._others = [module.get_rng_state(device) for module, device in self._modules]

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for (module, device), state in zip(self._modules, self._others, strict=True):
            module.set_rng_state(state, device)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw from this state on; afterwards it is as if nothing had been drawn."""
        outside = RandomState(self.devices)
        self.restore()
        try:
            yield
        finally:
            outside.restore()


class IsolatedBuffers(contextlib.AbstractContextManager["IsolatedBuffers"]):
    """Lets modules write into copies of their buffers; ``commit`` makes the copies' values real.

    So the running statistics of BatchNorm, and whatever else a forward pass keeps in a buffer, move
    only where the caller says so. Modules are found as they are called, wherever they come from.
    """

    def __init__(self) -> None:
        self._swapped: dict[tuple[nn.Module, str], tuple[Tensor, Tensor]] = {}
        self.modules: dict[nn.Module, None] = {}  # those that were called, in order

    def __enter__(self) -> IsolatedBuffers:
        self._swapped.clear()
        self.modules.clear()
        self._hook = register_module_forward_pre_hook(self._isolate)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        for (module, name), (original, stand_in) in self._swapped.items():
            # A module may have put a new tensor in place instead of writing into the old one.
            now = own_buffers(module).get(name)
            self._swapped[module, name] = (original, stand_in if now is None else now)
            own_buffers(module)[name] = original

    def _isolate(self, module: nn.Module, _: Any) -> None:
        self.modules[module] = None
        for name, buffer in own_buffers(module).items():
            if buffer is not None and (module, name) not in self._swapped and not _transient(buffer):
                stand_in = buffer.clone()
                self._swapped[module, name] = (buffer, stand_in)
                own_buffers(module)[name] = stand_in

    @torch.no_grad()
    def commit(self) -> None:
        for (module, name), (original, stand_in) in self._swapped.items():
            if original.shape == stand_in.shape:
                original.copy_(stand_in)
            else:  # the module put in a tensor of another size
                own_buffers(module)[name] = stand_in.detach()


@dataclass
class Part:
    """A part of a batch, with its share in the total and the random numbers it was first run with.

    ``place`` is that of its first sample among all those whose mean is taken.
    """

    objective: Objective
    batch: Any
    weight: float
    devices: Sequence[torch.device]
    start: RandomState | None = None
    place: int = 0

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the tensors of its batch; what an evaluation costs goes by them."""
        return tuple(tuple(tensor.shape) for tensor in tensors_of(self.batch))

    def evaluate(self) -> Evaluation:
        """The first time, draw random numbers as usual; from then on, draw the same ones again."""
        if self.start is None:
            self.start = RandomState(self.devices)
            return evaluate(self.objective, self.batch)
        with self.start.replayed():
            return evaluate(self.objective, self.batch)


@dataclass
class Work:
    """What a step has asked of the objective, in samples, so that costs can be compared."""

    gradient_samples: int = 0
    evaluated_samples: int = 0
    linearized_samples: int = 0
    num_gradients: int = 0
    num_evaluations: int = 0
    num_linearizations: int = 0


@dataclass(frozen=True)
class Share:
    """What part of a set of samples is here, where several processes have them between them.

    Attributes:
        own: How many are here.
        total: How many there are.
        before: How many have a place before those that are here.
    """

    own: int
    total: int
    before: int = 0

    @classmethod
    def of(cls, counts: Sequence[int], place: int) -> Share:
        """The share of one of several processes, from how many samples each has.

        >>> Share.of([3, 5, 2], 1)
        Share(own=5, total=10, before=3)
        """
        return cls(counts[place], sum(counts), sum(counts[:place]))

    @property
    def weight(self) -> float:
        return self.own / self.total if self.total else 0.0


Total = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Adds up tensors over the processes that have the samples between them."""


@dataclass
class Problem:
    """The objective on one batch near the current parameters.

    Where several processes have the samples between them, each has a problem on its own samples, and what
    comes out is that of all samples together.

    Args:
        objective: The user's function.
        batch: The gradient batch, or ``None`` for an objective of no arguments.
        blocks: The blocks of the parameters.
        curvature_batch: The samples for curvature: a number of them, to be taken from the front of the
            batch, or a batch of its own, or ``None`` for the whole batch.
        micro_batch_size: How many samples are in memory at a time.
        reduction: How the objective's loss sums up its samples.
        held_out_batch: Samples that neither gradient nor curvature may see.
        seen_batch: As many of those that the gradient has seen, to compare.
        population: How many samples there are in all, where that is known.
        sum_over: To how many samples a sum is scaled; zero stands for those of the gradient.
        share: What part of the gradient's samples is in the batch; ``None`` stands for all.
        curvature_share: The same of the curvature batch.
        held_out_share: The same of the held-out batch.
        seen_share: The same of the seen batch.
        total: Adds up over the processes; ``None`` where there is but one.
        linearize: From a problem, and about how many products are wanted with each block, to the matrix.
        work: What has been asked of the objective.
        meter: Counts the floating point operations.
    """

    objective: Objective
    batch: Any
    blocks: Sequence[Block]
    curvature_batch: Any = None
    micro_batch_size: int | None = None
    reduction: Reduction = "mean"
    held_out_batch: Any = None
    seen_batch: Any = None
    population: int | None = None
    sum_over: int = 0
    share: Share | None = None
    curvature_share: Share | None = None
    held_out_share: Share | None = None
    seen_share: Share | None = None
    total: Total | None = None
    linearize: Callable[[Problem, Sequence[int]], BlockMatrix] | None = None
    work: Work = field(default_factory=Work)
    meter: Meter = field(default_factory=Meter)

    def __post_init__(self) -> None:
        self.devices = sorted({block.params[0].device for block in self.blocks}, key=str)
        if self.batch is None:
            if self.curvature_batch is not None and not isinstance(self.curvature_batch, int):
                raise ValueError("A curvature batch was given without a gradient batch. Give both.")
            self.num_samples = self.num_curvature_samples = self.sum_over = 1
            self.parts = [Part(self.objective, None, 1.0, self.devices)]
            self._whole = True
        else:
            self.num_samples = batch_size(self.batch)
            self.sum_over = self.sum_over or (self.share.total if self.share else self.num_samples)
            self.parts = self.split(self.batch, self.share)
            self.num_curvature_samples = (
                min(self.curvature_batch or self.num_samples, self.num_samples)
                if self.curvature_batch is None or isinstance(self.curvature_batch, int)
                else batch_size(self.curvature_batch)
            )
            self._whole = (
                not self._curvature_is_given
                and self.num_curvature_samples == self.num_samples
                and self.curvature_share == self.share
                and len(self.parts) == 1
            )
        self._evaluation: Evaluation | None = None
        self._matrix: BlockMatrix | None = None
        self._buffers = IsolatedBuffers()

    @property
    def seen(self) -> float:
        """What part the gradient's samples are of all there are."""
        return self.sum_over / self.population if self.population else 0.0

    @property
    def num_curvature_total(self) -> int:
        """Samples of curvature, wherever they are."""
        return self.curvature_share.total if self.curvature_share else self.num_curvature_samples

    @property
    def _curvature_is_given(self) -> bool:
        return not (self.curvature_batch is None or isinstance(self.curvature_batch, int))

    def split(self, batch: Any, share: Share | None = None) -> list[Part]:
        """Parts of at most ``micro_batch_size`` samples whose weighted losses add up to the batch's.

        A sum is scaled to the number of samples of the gradient. A batch whose share is zero stands in for
        none at all: its weights are zero.
        """
        size = batch_size(batch)
        share = share or Share(size, size)
        step = self.micro_batch_size or size
        parts = []
        for start in range(0, size, step):
            stop = min(start + step, size)
            weight = (stop - start) / size if self.reduction == "mean" else self.sum_over / size
            part = batch if stop - start == size else take(batch, start, stop)
            parts.append(
                Part(self.objective, part, share.weight * weight, self.devices, place=share.before + start)
            )
        return parts

    def differentiate(self) -> tuple[Tensor, list[Tensor]]:
        """The loss and, for each block, its flat gradient, on the gradient batch.

        The modules' buffers move here, once a step, and only for good when ``commit`` is called.
        """
        loss: Any = 0.0
        gradient: list[Tensor] = []
        with self._buffers:
            for part in self.parts:
                with self.meter.counting("gradient", part.shapes):
                    with self._kernels():
                        evaluation = part.evaluate()
                    self._check_gradient(evaluation)
                    if part is self.parts[0]:
                        self._measure(evaluation)
                    flat = self._flat_gradient(evaluation.loss, part.weight)
                loss = loss + _scaled(evaluation.loss.detach(), part.weight)
                gradient = [a.add_(b) for a, b in zip(gradient, flat, strict=True)] if gradient else flat
                if self._whole:
                    self._evaluation = evaluation
                self.work.gradient_samples += evaluation.num_samples or 1
        self.work.num_gradients += 1
        loss, *gradient = self.summed([loss, *gradient])
        return loss, gradient

    def summed(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The sums over the processes that have the samples between them."""
        return tensors if self.total is None else self.total(tensors)

    def commit(self, update: Sequence[Tensor] | None) -> None:
        """Move the parameters by ``update``, if any, and keep what the gradient pass wrote into buffers."""
        if update is not None:
            for block, value, change in zip(self.blocks, self.origin, update, strict=True):
                block.assign_(value + change)
        self._buffers.commit()

    def curvature_parts(self) -> list[Part]:
        """The parts of the curvature batch, which draw the same random numbers as the gradient's parts."""
        if self._whole:
            return list(self.parts)
        batch = (
            self.curvature_batch
            if self._curvature_is_given
            else take(self.batch, 0, self.num_curvature_samples)
        )
        parts = self.split(batch, self.curvature_share)
        for i, part in enumerate(parts):
            part.start = self.parts[min(i, len(self.parts) - 1)].start
        return parts

    def matrix(self, num_products: Sequence[int] = ()) -> BlockMatrix:
        """The curvature on the curvature batch, ready for about so many products with each block.

        It is made once; whoever asks again gets the same.
        """
        if self._matrix is None:
            if self.linearize is None:
                raise ValueError("The problem was made without a way to its curvature. Give it linearize.")
            self._matrix = self.linearize(self, num_products or [0] * len(self.blocks))
        return self._matrix

    def release(self) -> None:
        """Let go of what may hold graphs and residuals."""
        self._matrix = self._evaluation = None

    def __enter__(self) -> Problem:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def held_out(self) -> Problem | None:
        """The same problem on the samples that neither gradient nor curvature has seen, if there are any.

        Its own gradient and curvature are taken from all of them.
        """
        return self._elsewhere(self.held_out_batch, self.held_out_share)

    def seen_again(self) -> Problem | None:
        """The same problem on a few of the samples that the gradient has seen, if they are asked for."""
        return self._elsewhere(self.seen_batch, self.seen_share)

    def _elsewhere(self, batch: Any, share: Share | None) -> Problem | None:
        if batch is None:
            return None
        return replace(
            self,
            batch=batch,
            curvature_batch=None,
            held_out_batch=None,
            seen_batch=None,
            share=share,
            curvature_share=share,
        )

    def restricted(self, blocks: Sequence[Block], batch: Any, share: Share, total: Total | None) -> Problem:
        """The curvature of some of the blocks on other samples, at the same point; it has no gradient."""
        other = replace(
            self,
            batch=batch,
            blocks=blocks,
            curvature_batch=None,
            held_out_batch=None,
            seen_batch=None,
            share=share,
            curvature_share=share,
            total=total,
        )
        other.num_outputs, other.num_nodes = self.num_outputs, self.num_nodes
        other._buffers.modules = self._buffers.modules
        for part in other.parts:  # the gradient's draws were made for other samples
            part.start = RandomState(self.devices)
        return other

    def linearizable(self, part: Part, *, fresh: bool = False) -> Evaluation:
        """An evaluation of ``part`` that can be differentiated twice and leaves no trace elsewhere.

        Unless it has to be ``fresh``, the gradient's own is passed on where it is one.
        """
        if not fresh and self._evaluation is not None and part is self.parts[0]:
            evaluation, self._evaluation = self._evaluation, None
        else:
            with twice_differentiable(), IsolatedBuffers(), self.meter.counting("forward", part.shapes):
                evaluation = part.evaluate()
            self.work.num_linearizations += 1
            self.work.linearized_samples += evaluation.num_samples or 1
        return replace(evaluation, reduction=self.reduction)

    def loss_of(self, part: Part) -> Tensor:
        """The objective's own loss on a part of the curvature batch, here."""
        if self._evaluation is not None and part is self.parts[0]:
            evaluation, self._evaluation = self._evaluation, None
            return evaluation.loss.detach()
        return self.run(part)

    def run(self, part: Part) -> Tensor:
        """A forward pass over a part that leaves no trace; returns the loss."""
        counting = self.meter.counting("forward", part.shapes)
        with self._frozen(), IsolatedBuffers(), twice_differentiable(), counting:
            evaluation = part.evaluate()
        self.work.evaluated_samples += evaluation.num_samples or 1
        return evaluation.loss.detach()

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that the objective called in the gradient pass, and those within them."""
        return list(dict.fromkeys(inner for module in self._buffers.modules for inner in module.modules()))

    @cached_property
    def origin(self) -> list[Tensor]:
        """For each block, a flat copy of the parameters as they were when the step began."""
        return [block.values() for block in self.blocks]

    def loss_at(self, update: Sequence[Tensor]) -> Tensor:
        """The loss on the gradient batch at the parameters plus ``update``; the parameters stay.

        Kernels, random numbers and the order of the sum are those of ``differentiate``, so that the two
        losses can be compared to the last bit.
        """
        loss: Any = 0.0
        try:
            for block, value, change in zip(self.blocks, self.origin, update, strict=True):
                block.visit_(value + change)
            with self._frozen(), IsolatedBuffers(), self._kernels():
                for part in self.parts:
                    with self.meter.counting("forward", part.shapes):
                        evaluation = part.evaluate()
                    loss = loss + _scaled(evaluation.loss.detach(), part.weight)
        finally:
            for block, value in zip(self.blocks, self.origin, strict=True):
                block.visit_(value)
        self.work.num_evaluations += 1
        self.work.evaluated_samples += self.num_samples
        (total,) = self.summed([loss])
        return total

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        """Where curvature shares the pass of the gradient, kernels that autograd can differentiate twice."""
        return twice_differentiable() if self._whole else contextlib.nullcontext()

    def _flat_gradient(self, loss: Tensor, weight: float) -> list[Tensor]:
        params = [param for block in self.blocks for param in block.params]
        gradients = iter(torch.autograd.grad(loss, params, retain_graph=self._whole, allow_unused=True))
        flat = []
        for block in self.blocks:
            own = [next(gradients) for _ in block.params]
            if any(gradient is not None and gradient.is_sparse for gradient in own):
                raise ValueError(
                    f"A gradient of block {block.name!r} is sparse. Build the layer with sparse=False."
                )
            flat.append(_scaled(block.flatten(own), weight))
        return flat

    def _check_gradient(self, evaluation: Evaluation) -> None:
        if not evaluation.loss.requires_grad:
            raise ValueError(
                "The loss does not depend on any parameter through the graph. Leave out detach(), .data "
                "and torch.no_grad() in the objective."
            )

    def _measure(self, evaluation: Evaluation) -> None:
        """Note what the choice of the products goes by: outputs per sample and the length of the graph."""
        self.num_outputs = sum(map(Tensor.numel, evaluation.outputs)) // (evaluation.num_samples or 1)
        self.num_nodes = len({node for node, _ in _ancestors(evaluation.loss)})

    @contextlib.contextmanager
    def _frozen(self) -> Iterator[None]:
        """No graph to the parameters, while derivatives inside the objective still work."""
        params = [param for block in self.blocks for param in block.params]
        for param in params:
            param.requires_grad_(False)
        try:
            yield
        finally:
            for param in params:
                param.requires_grad_(True)


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Choose kernels that autograd can differentiate twice, for the length of the context."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        yield


def _transient(tensor: Tensor) -> bool:
    """Whether it is a wrapper that ``vmap`` and its like made and that ends with them."""
    return is_functorch_wrapper(tensor)


def _scaled(tensor: Tensor, weight: float) -> Tensor:
    return tensor if weight == 1.0 else tensor * weight


def _edge(tensor: Tensor) -> tuple[Any, int]:
    """The place of ``tensor`` in the graph: the node that made it and the number among its results."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _ancestors(tensor: Tensor) -> set[tuple[Any, int]]:
    """The edges of the graph behind ``tensor``, its own not among them."""
    found: set[tuple[Any, int]] = set()
    seen, todo = set(), [_edge(tensor)[0]]
    while todo:
        for edge in todo.pop().next_functions:
            node = edge[0]
            if node is not None:
                found.add(edge)
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
    return found
