"""The objective on some samples, in parts that fit into memory, each of which can be run again.

``Samples`` is what curvature and preconditioners see of a step: an objective, samples with their weights,
and the blocks. Whatever is run here leaves no trace in the model's buffers and draws the same random numbers
each time, and its cost goes to the ledger.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from blockhf.batches import Share, batch_size, proportions, take, tensors_of
from blockhf.blocks import Block
from blockhf.isolation import IsolatedBuffers, RandomState, frozen, twice_differentiable
from blockhf.ledger import Ledger, Shapes
from blockhf.objective import (
    Evaluation,
    Objective,
    Reduction,
    check_objective,
    evaluate,
    identity,
    modules_in,
    num_nodes,
)
from blockhf.ranks import Alone, Ranks
from blockhf.scalars import read

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Layers in whose training samples see each other, and which keep statistics of them."""

LARGE_BATCH = 256
"""Samples above which it matters how many are taken for what."""

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Layers that draw random numbers in training."""


@dataclass
class Part:
    """Some of the samples, with their share in the mean and the random numbers they were first run with.

    Attributes:
        batch: The samples.
        weight: Their share in the whole.
        place: That of the first sample among all those whose mean is taken.
        is_stand_in: Whether it is here only because this process has no samples.
        start: The random state before the first run; ``None`` until then.
        like: A part whose random numbers are drawn again, if that has run before.
    """

    batch: Any
    weight: float = 1.0
    place: int = 0
    is_stand_in: bool = False
    start: RandomState | None = None
    like: Part | None = None

    @property
    def shapes(self) -> Shapes:
        """Of the tensors of the batch; what an evaluation costs goes by them."""
        return Shapes(tuple(tensor.shape) for tensor in tensors_of(self.batch))


@dataclass
class Structure:
    """What one evaluation shows of an objective.

    Attributes:
        referenced: Modules that the objective refers to, called or not.
        modules: Those that it called, those within them, and those that it refers to.
        num_outputs: Outputs of a sample.
        num_tensors: Tensors of outputs.
        hides_outputs: Whether some of them cannot be told from other tensors without a graph to parameters;
            ``None`` until somebody has looked.
        num_positions: Predictions of a sample: places in a sequence or a picture.
        num_nodes: Operations in the graph of the loss.
        forward_flops: Counted operations of a forward pass over a sample; ``None`` until they are counted.
        is_checked: Whether its first step has been looked at.
    """

    referenced: Sequence[nn.Module] = ()
    modules: list[nn.Module] = field(default_factory=list)
    num_outputs: int = 0
    num_tensors: int = 0
    hides_outputs: bool | None = None
    num_positions: int = 1
    num_nodes: int = 0
    forward_flops: float | None = None
    is_checked: bool = False
    _kinds: dict[frozenset[Tensor], str] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        return self.num_nodes > 0

    @property
    def is_random(self) -> bool:
        """Whether parts may differ from the whole, or from themselves: by random numbers, or by BatchNorm."""
        return any(
            module.training and (isinstance(module, NORMS) or (isinstance(module, DROPOUTS) and module.p > 0))
            for module in self.modules or self.referenced
        )

    def note(self, evaluation: Evaluation, called: Iterable[nn.Module]) -> None:
        inner = [inner for module in called for inner in module.modules()]
        self.modules = list(dict.fromkeys([*inner, *self.referenced]))
        self.num_tensors = len(evaluation.outputs)
        number = evaluation.num_samples or 1
        self.num_outputs = sum(map(Tensor.numel, evaluation.outputs)) // number
        self.num_positions = max((_positions(own, number) for own in evaluation.outputs), default=1)
        self.num_nodes = num_nodes(evaluation)

    def kind_of(self, block: Block) -> str:
        """The class of the innermost module that has just the parameters of a block, if there is one."""
        wanted = frozenset(block.params)
        if wanted not in self._kinds:
            for module in self.modules:  # the outer ones come first
                own = frozenset(param for param in module.parameters() if param.requires_grad)
                self._kinds[own] = type(module).__name__
            self._kinds.setdefault(wanted, "")
        return self._kinds[wanted]

    def modes(self) -> Hashable:
        """Whether the modules are being trained, and which of their parameters.

        Modules without parameters and buffers, such as losses, may be made anew in each call.
        """
        return tuple(map(_mode, self.modules))


def _positions(output: Tensor, num_samples: int) -> int:
    """Predictions of a sample, taken for vectors in the output's last dimension, or its second, if any."""
    if output.dim() < 2 or len(output) % num_samples:
        return 1
    return max(1, output.numel() // num_samples // max(output.shape[-1], output.shape[1]))


def _mode(module: nn.Module) -> Hashable:
    params = [param.requires_grad for param in module.parameters(recurse=False)]
    owns = params or next(module.buffers(recurse=False), None) is not None
    return id(module) if owns else type(module).__qualname__, module.training, *params


def _weight(found: Any) -> float:
    try:
        weight = float(found)
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ValueError(
            f"reduction gave the weight {found!r} for a part of the batch, but weights must be finite "
            "numbers and not negative."
        )
    return weight


class Structures:
    """What is known of the objectives that were asked last, by their identity."""

    def __init__(self, limit: int = 8) -> None:
        self._limit = limit
        self._known: dict[Hashable, Structure] = {}

    def of(self, objective: Objective) -> tuple[Structure, Hashable]:
        """What is known of an objective, and the scope of its costs."""
        check_objective(objective)
        key = identity(objective)
        structure = self._known.pop(key, None) or Structure(modules_in(objective))
        self._known[key] = structure  # the last used is the last to be forgotten
        if len(self._known) > self._limit:
            del self._known[next(iter(self._known))]
        return structure, (key, structure.modes())


class Samples:
    """The objective on some samples near the current parameters.

    Args:
        objective: The user's function.
        batch: The samples, or ``None`` for an objective of no arguments.
        blocks: The blocks of the parameters.
        share: What part of the samples is in this process; ``None`` stands for all.
        sum_over: To how many samples a sum is scaled; ``None`` stands for those that there are.
        micro_batch_size: How many samples are in memory at a time.
        reduction: How the objective's loss sums up its samples.
        ranks: The processes that have the samples between them.
        ledger: Counts what is done.
        structure: What is known of the objective already.
        like: Parts whose random numbers these parts draw; the last one's go for all that come after.
    """

    def __init__(
        self,
        objective: Objective,
        batch: Any,
        blocks: Sequence[Block],
        *,
        share: Share | None = None,
        sum_over: int | None = None,
        micro_batch_size: int | None = None,
        reduction: Reduction = "mean",
        ranks: Ranks | None = None,
        ledger: Ledger | None = None,
        structure: Structure | None = None,
        like: Sequence[Part] = (),
    ) -> None:
        self.objective, self.batch, self.blocks = objective, batch, blocks
        self.micro_batch_size, self.reduction = micro_batch_size, reduction
        self.ranks = ranks or Alone()
        self.ledger = ledger or Ledger()
        self._structure = structure or Structure(modules_in(objective))
        self.devices = sorted({block.params[0].device for block in blocks}, key=str)
        self.num_samples = 1 if batch is None else batch_size(batch)
        self.share = share or Share(self.num_samples, self.num_samples)
        self.sum_over = sum_over or self.share.total
        self.parts = self._split()
        for index, part in enumerate(self.parts):
            part.like = like[min(index, len(like) - 1)] if like else None
        self._evaluation: Evaluation | None = None

    def on(
        self,
        batch: Any,
        share: Share | None,
        *,
        blocks: Sequence[Block] | None = None,
        ranks: Ranks | None = None,
        like: Sequence[Part] = (),
    ) -> Samples:
        """The same objective at the same point on other samples."""
        return type(self)(
            self.objective,
            batch,
            self.blocks if blocks is None else blocks,
            share=share,
            sum_over=self.sum_over,
            micro_batch_size=self.micro_batch_size,
            reduction=self.reduction,
            ranks=ranks or self.ranks,
            ledger=self.ledger,
            structure=self._structure,
            like=like,
        )

    def _split(self) -> list[Part]:
        """Parts of at most ``micro_batch_size`` samples whose weighted losses add up to the batch's.

        A sum is scaled to ``sum_over`` samples. A batch whose share is zero stands in for none at all: its
        weights are zero.
        """
        if self.batch is None:
            return [Part(None)]
        size = self.num_samples
        step, least = self.micro_batch_size or size, sum(proportions(self.batch)) or 1
        step = max(step // least, 1) * least
        parts = []
        for start in range(0, size, step):
            stop = min(start + step, size)
            weight = self.sum_over / size if self.reduction == "sum" else (stop - start) / size
            batch = self.batch if stop - start == size else take(self.batch, start, stop)
            place = self.share.before + start
            parts.append(Part(batch, self.share.weight * weight, place, is_stand_in=self.share.own == 0))
        if not isinstance(self.reduction, str):
            self._weigh(parts, self.reduction)
        return parts

    def _weigh(self, parts: Sequence[Part], weight_of: Callable[[Any], Any]) -> None:
        """Give each part its share in a weighted mean over all processes."""
        like = self.blocks[0].params[0]
        weights = [_weight(weight_of(part.batch)) if self.share.own else 0.0 for part in parts]
        (total,) = self.ranks.sum([torch.tensor(sum(weights), dtype=torch.float64, device=like.device)])
        sum_of_all = float(total)
        for part, weight in zip(parts, weights, strict=True):
            part.weight = weight / sum_of_all if sum_of_all else 0.0

    def wrong_with_parts(self) -> str | None:
        """What to say where the losses of two parts do not add up to that of both together."""
        if len(self.parts) < 2 or self.reduction != "mean":
            return None
        first, second = self.parts[:2]
        both = Part(take(self.batch, 0, batch_size(first.batch) + batch_size(second.batch)), like=first)
        losses = [self.loss(part) for part in (first, second, both)]
        (one,), (other,), (together,) = read(losses)
        share = batch_size(first.batch) / (batch_size(first.batch) + batch_size(second.batch))
        expected = share * one + (1 - share) * other
        tolerance = torch.finfo(self.params[0].dtype).eps ** 0.5 * max(abs(one), abs(other))
        if abs(expected - together) <= tolerance or self.structure.is_random:
            return None
        return (
            f"the losses of two micro-batches add up to {expected:.6g}, and that of both together is "
            f"{together:.6g}: the loss is no plain mean over samples. Pass reduction=function, where "
            "function(batch) is the sum of the "
            'weights, e.g. lambda batch: (batch["labels"] != -100).sum()'
        )

    @property
    def params(self) -> list[Tensor]:
        """The parameters of all blocks."""
        return [param for block in self.blocks for param in block.params]

    @property
    def structure(self) -> Structure:
        """What the objective looks like; where nothing is known, it is run for it."""
        if not self._structure.is_known:
            with self.ledger.once():
                self._run_isolated(self.parts[0])
        return self._structure

    @property
    def scope(self) -> Hashable:
        """What a trace or a check holds for: the objective, the modes of its modules, what is trained."""
        return identity(self.objective), self.structure.modes()

    def note_structure(self, evaluation: Evaluation, called: Iterable[nn.Module]) -> None:
        """Take down what an evaluation shows of the objective."""
        self._structure.note(evaluation, called)

    def evaluate(self, part: Part, *, fresh: bool = False) -> Evaluation:
        """An evaluation that can be differentiated twice and leaves no trace elsewhere.

        Unless it has to be ``fresh``, one that was kept is handed over, once.
        """
        if not fresh and (kept := self.take_kept(part)) is not None:
            return kept
        with self.ledger.counting("forward", part.shapes):
            evaluation = self._run_isolated(part)
        self.ledger.work.num_linearizations += 1
        self.ledger.work.linearized_samples += evaluation.num_samples or 1
        return evaluation

    def loss(self, part: Part) -> Tensor:
        """The objective's own loss on a part, without a graph to the parameters."""
        if (kept := self.take_kept(part)) is not None:
            return kept.loss.detach()
        with frozen(self.params), self.ledger.counting("forward", part.shapes):
            evaluation = self._run_isolated(part)
        self.ledger.work.evaluated_samples += evaluation.num_samples or 1
        return evaluation.loss.detach()

    def forward_flops(self) -> int:
        """Counted operations of a forward pass over the first part."""
        part = self.parts[0]
        if self.ledger.known("forward", part.shapes) is None:
            with self.ledger.once(), frozen(self.params), self.ledger.counting("forward", part.shapes):
                self._run_isolated(part)
        return self.ledger.known("forward", part.shapes) or 0

    def keep(self, evaluation: Evaluation) -> None:
        """Keep an evaluation of the only part for whoever asks next."""
        self._evaluation = evaluation

    def take_kept(self, part: Part) -> Evaluation | None:
        """The evaluation that was kept, if any; it is handed over once, so that nothing outlives its use."""
        kept, self._evaluation = self._evaluation, None
        return kept if part is self.parts[0] else None

    def release(self) -> None:
        """Let go of what holds a graph."""
        self._evaluation = None

    def run(self, part: Part) -> Evaluation:
        """Call the objective: random numbers as usual the first time, from then on the same ones again."""
        is_first = part.start is None and (part.like is None or part.like.start is None)
        start = self.start_of(part)
        with contextlib.nullcontext() if is_first else start.replayed():
            evaluation = evaluate(self.objective, part.batch)
        return replace(evaluation, reduction="sum" if self.reduction == "sum" else "mean")

    def start_of(self, part: Part) -> RandomState:
        """The random state that a part is run from: that of its first run, or the one now."""
        if part.start is None and part.like is not None:
            part.start = part.like.start
        if part.start is None:
            part.start = RandomState(self.devices)
        return part.start

    def isolated(self) -> IsolatedBuffers:
        """A context in which no buffer of the objective's modules moves for good."""
        return IsolatedBuffers(self._structure.referenced)

    def _run_isolated(self, part: Part) -> Evaluation:
        with twice_differentiable(), self.isolated() as buffers:
            evaluation = self.run(part)
            if not self._structure.is_known and evaluation.loss.requires_grad:
                self._structure.note(evaluation, buffers.modules)
        return evaluation


def look_at(
    objective: Objective,
    batch: Any,
    blocks: Sequence[Block],
    structure: Structure,
    ledger: Ledger,
    num_samples: int,
) -> None:
    """Run an objective of which nothing is known on two samples of a large batch, which leaves no trace.

    How many samples are taken for what depends on what a sample is; of a small batch all are taken. It is the
    samples of all processes that count, so that all do the same.
    """
    if structure.forward_flops is not None or num_samples <= LARGE_BATCH:
        return
    few = Samples(
        objective, take(batch, 0, min(2, batch_size(batch))), blocks, structure=structure, ledger=ledger
    )
    with RandomState(few.devices).replayed():
        assert few.structure is structure
        structure.forward_flops = few.forward_flops() / few.num_samples
