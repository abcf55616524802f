"""A walk of small steps, each on samples of its own, while other samples say that it leads downhill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from blockhf.blocks import Block
from blockhf.ledger import Ledger
from blockhf.meeting import Meeting
from blockhf.objective import check_any_outputs
from blockhf.plan import Role, Sizes, draw_plan
from blockhf.point import Point
from blockhf.policies import AdamWalk, Stretch
from blockhf.policy import PolicyState, State
from blockhf.report import Phase, StepReport
from blockhf.rotation import Rotation, Side, affordable_sides, rotation_flops
from blockhf.scalars import read
from blockhf.update import shrinkage


@dataclass(frozen=True)
class Walked:
    """What came of a stretch of the walk.

    Attributes:
        own_loss: The objective's own loss before it, on the samples it was checked with.
        before: The loss there with penalties, as a number.
        after: The same at the end.
        taken: Whether the parameters moved.
        rate: The rate.
        num_steps: Small steps of the whole stretch.
    """

    own_loss: Tensor
    before: float
    after: float
    taken: bool
    rate: float
    num_steps: int

    def report(self, step: int, stretch: Stretch, ledger: Ledger, phases: dict[str, Phase]) -> StepReport:
        """The stretch as a step."""
        how = f"{self.num_steps} small steps of {stretch.num_samples} samples at a rate of {self.rate:.2g}"
        return StepReport(
            step=step,
            accepted=self.taken,
            reason=how if self.taken else f"{how} led uphill",
            loss=self.before,
            loss_after=self.after,
            work={
                **ledger.summary(),
                "gradient_batch": stretch.num_samples,
                "held_out_batch": stretch.num_checked,
                "small_steps": stretch.num_steps,
            },
            phases=phases,
        )


@dataclass(frozen=True)
class Underway:
    """A part of a stretch that goes over several batches.

    Attributes:
        own_loss: The objective's own loss at the first of its small steps.
        loss: The same as a number.
        rate: The rate.
        num_taken: Small steps of the stretch so far.
        num_wanted: Small steps of the whole stretch.
    """

    own_loss: Tensor
    loss: float
    rate: float
    num_taken: int
    num_wanted: int

    def report(self, step: int, stretch: Stretch, ledger: Ledger, phases: dict[str, Phase]) -> StepReport:
        """The part as a step."""
        words = "small step" if stretch.num_steps == 1 else "small steps"
        return StepReport(
            step=step,
            accepted=True,
            reason=(
                f"{stretch.num_steps} {words} of {stretch.num_samples} samples at a rate of {self.rate:.2g}, "
                f"{self.num_taken} of {self.num_wanted} until they show"
            ),
            loss=self.loss,
            work={
                **ledger.summary(),
                "gradient_batch": stretch.num_samples,
                "small_steps": stretch.num_steps,
            },
            phases=phases,
        )


class _Walker:
    """A block on its way: where it is, and what it keeps from small step to small step."""

    def __init__(self, block: Block, shown: Tensor, sides: Sequence[Side], state: State) -> None:
        shapes = [list(param.shape) for param in block.params]
        if state.get("shapes", shapes) != shapes:  # some of its parameters are frozen by now, or thawed
            state = {}
        offset = state.get("offset")
        self.block, self.shapes = block, shapes
        self.is_elsewhere = offset is not None
        self.value = shown.clone() if offset is None else shown + offset.to(shown)
        self.start = shown + state["start"].to(shown) if "start" in state else self.value.clone()
        self.sides = [Side(*own) for own in state["sides"]] if "sides" in state else sides
        self._rotation = Rotation(self.sides, state, shown)
        self._mean, self._square = (_copy(state.get(name), shown) for name in ("mean", "square"))
        self._num_added = int(state.get("num_added", 0))
        self._total = _copy(state.get("total"), shown).add_(shown, alpha=self._num_added)

    def move(self, policy: AdamWalk, gradient: Tensor, rate: float, count: int, *, adds: bool) -> None:
        """Take a small step, the ``count``-th, which uses the gradient up; ``adds`` it to the average."""
        self._rotation.learn(gradient, self._mean, self._square, count)
        turned = policy.direction(self._rotation.there_(gradient), self._mean, self._square, count)
        self.value.add_(self._rotation.back_(turned), alpha=rate)
        self.block.assign_(self.value)
        if adds:
            self._total.add_(self.value)
            self._num_added += 1

    def decay(self, share: float) -> None:
        """Shrink by a share of where it started."""
        if share:
            self.value.sub_(self.start, alpha=share)
            self._total.sub_(self.start, alpha=share * self._num_added)

    def average(self) -> Tensor:
        """The mean over the small steps that were added."""
        return self._total / self._num_added

    def kept(self, shown: Tensor, *, is_on_its_way: bool = False) -> State:
        """What to keep where these are the parameters, after a stretch or on its way."""
        way = {
            "start": self.start - shown,
            "total": self._total.sub(shown, alpha=self._num_added),
            "num_added": self._num_added,
        }
        return {
            **(way if is_on_its_way else {}),
            "shapes": self.shapes,
            "sides": [list(astuple(side)) for side in self.sides],
            "mean": self._mean,
            "square": self._square,
            **({} if shown is self.value else {"offset": self.value - shown}),
            **self._rotation.state(),
        }


def take_stretch(
    policy: AdamWalk, stretch: Stretch, state: PolicyState, met: Meeting, rank: int, seed: int
) -> Walked:
    """Take small steps, each on samples of its own, and undo them where they lead uphill on others.

    Small steps go on from where the last ones ended. What they show, as parameters of the model, may be an
    average of them.

    Args:
        policy: How to walk.
        stretch: How many small steps, and of how many samples.
        state: What the policy keeps: averages of each block, and the rate.
        met: The samples, and the way to points on them.
        rank: The number of this process.
        seed: Of the draws.
    """
    checked, parts = _shared_out(stretch, met.sizes, seed)
    check = met.make_point(*checked.take(met.batch, rank))
    walkers = _walkers(stretch, state, check)
    rate = policy.rate_of(sum(map(len, check.origin)), state.shared)
    buffers, _ = _take_small_steps(policy, stretch, walkers, parts, met, rank, state.shared, rate)
    return _conclude(policy, stretch, state, check, walkers, rate, buffers)


def take_part(
    policy: AdamWalk, stretch: Stretch, state: PolicyState, met: Meeting, rank: int, seed: int
) -> Underway | None:
    """Take some small steps of a stretch that goes over several batches; arguments as for ``take_stretch``.

    The parameters stay what they are until it is checked, by ``end_stretch``. Where the loss is not finite,
    nothing has happened, and the result is none.
    """
    number, shared = stretch.num_steps * stretch.num_samples, state.shared
    places = draw_plan(met.sizes, Sizes(number, number), seed).gradient.places
    shown = [block.values() for block in met.before.blocks]  # which a check may just have moved
    walkers = [
        _Walker(block, own, sides, state.of(block.name))
        for block, own, sides in zip(
            met.before.blocks, shown, affordable_sides(met.before.blocks, stretch.rotation), strict=True
        )
    ]
    rate = policy.rate_of(sum(map(len, shown)), shared)
    parts = _parts(met.sizes, places, number, stretch.num_steps)
    buffers, loss = _take_small_steps(policy, stretch, walkers, parts, met, rank, shared, rate)
    for walker, own in zip(walkers, shown, strict=True):
        walker.block.assign_(own)
    ((value,),) = read([loss])
    if not math.isfinite(value):
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        return None
    shared["num_taken"] = int(shared.get("num_taken", 0)) + stretch.num_steps
    shared["count"] = int(shared.get("count", 0)) + stretch.num_steps
    for walker, own in zip(walkers, shown, strict=True):
        state.blocks[walker.block.name] = walker.kept(own, is_on_its_way=True)
    wanted = int(shared.get("num_steps", policy.first_steps))
    return Underway(loss, value, rate, int(shared["num_taken"]), wanted)


def end_stretch(
    policy: AdamWalk, stretch: Stretch, state: PolicyState, met: Meeting, rank: int, seed: int
) -> Walked:
    """Check a stretch that went over several batches by new samples; arguments as for ``take_stretch``."""
    number = stretch.num_checked
    checked = draw_plan(met.sizes, Sizes(number, number), seed).gradient
    check = met.make_point(*checked.take(met.batch, rank))
    walkers = _walkers(stretch, state, check)
    rate = policy.rate_of(sum(map(len, check.origin)), state.shared)
    walked = _conclude(policy, stretch, state, check, walkers, rate, [])
    if not walked.taken:  # what its small steps have left behind may not be a number
        state.blocks.clear()
        state.shared["count"] = 0
    return walked


def _walkers(stretch: Stretch, state: PolicyState, check: Point) -> list[_Walker]:
    sides = affordable_sides(check.blocks, stretch.rotation)
    return [
        _Walker(block, shown, own, state.of(block.name))
        for block, shown, own in zip(check.blocks, check.origin, sides, strict=True)
    ]


def _conclude(
    policy: AdamWalk,
    stretch: Stretch,
    state: PolicyState,
    check: Point,
    walkers: Sequence[_Walker],
    rate: float,
    buffers: Sequence[tuple[Tensor, Tensor]],
) -> Walked:
    """Judge a stretch by the samples of a point, and show what has the lowest loss there, or undo it."""
    starts, ends = [own.start for own in walkers], [own.value for own in walkers]
    middles = [(start + end) / 2 for start, end in zip(starts, ends, strict=True)]
    places = [check.origin, middles, ends]
    if stretch.ends or any(own.is_elsewhere for own in walkers):
        places.append(starts)
    losses = [_loss_at(check, own) for own in places]
    (before,), (half,), (after,), *rest = read(losses)
    first = rest[0][0] if rest else before
    num_steps = int(state.shared["num_taken"]) if stretch.ends else stretch.num_steps
    taken, factor = judged = policy.judge(first, half, after)
    policy.update(stretch, rate, judged, state.shared)
    if not taken:
        check.move([torch.zeros_like(own) for own in check.origin])
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    else:
        found = [(before, check.origin), (after, ends)]
        if policy.averages and factor <= 1:  # where noise has a part in it
            found += _averages(check, walkers)
        after, shown = min(found, key=lambda pair: _or_infinity(pair[0]))
        for walker, own in zip(walkers, shown, strict=True):
            state.blocks[walker.block.name] = walker.kept(own)
        check.move([own - origin for own, origin in zip(shown, check.origin, strict=True)])
        if not stretch.ends:
            state.shared["count"] = int(state.shared.get("count", 0)) + stretch.num_steps
        check.refresh_statistics()
    own_loss = losses[0] - check.penalty(losses[0])
    return Walked(own_loss, before, after if taken else before, taken, rate, num_steps)


def _take_small_steps(
    policy: AdamWalk,
    stretch: Stretch,
    walkers: Sequence[_Walker],
    parts: Sequence[Role],
    met: Meeting,
    rank: int,
    shared: State,
    rate: float,
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Walk; the result are the buffers of the model, with what they held before, and the first loss."""
    buffers: list[tuple[Tensor, Tensor]] = []
    losses: list[Tensor] = []
    count, before = int(shared.get("count", 0)), int(shared.get("num_taken", 0)) if stretch.is_part else 0
    whole = int(shared.get("num_steps", policy.first_steps)) if stretch.is_part else stretch.num_steps
    for walker in walkers:
        walker.block.assign_(walker.value)
    for number in range(stretch.num_steps):
        taken = parts[number % len(parts)].take(met.batch, rank)
        point = met.make_point(*taken, [own.value for own in walkers])
        _, gradient = point.gradient(looks=number == 0)
        if number == 0:
            check_any_outputs(met.structure.num_tensors)
            met.before.protect(point.buffers)
            buffers = [(buffer, buffer.clone()) for buffer in point.buffers]
            losses.append(point.own_loss)
        point.commit(None)
        is_late = 2 * (before + number) >= whole
        for walker, own, group in zip(walkers, gradient, met.groups, strict=True):
            walker.move(policy, own, rate * float(group["lr"]), count + number + 1, adds=is_late)
    for walker, group in zip(walkers, met.groups, strict=True):
        walker.decay(shrinkage(group) * stretch.num_steps / whole)
    flops = (rotation_flops(own.sides, count + 1, count + stretch.num_steps) for own in walkers)
    point.samples.ledger.add("rotation", sum(flops))
    return buffers, losses[0]


def _averages(check: Point, walkers: Sequence[_Walker]) -> list[tuple[float, Sequence[Tensor]]]:
    """The mean of late small steps, and halfway between it and what was shown before, with their losses."""
    late = [own.average() for own in walkers]
    mixed = [(own + shown) / 2 for own, shown in zip(late, check.origin, strict=True)]
    (first,), (second,) = read([_loss_at(check, own) for own in (late, mixed)])
    return [(first, late), (second, mixed)]


def _loss_at(check: Point, values: Sequence[Tensor]) -> Tensor:
    return check.loss_at([value - origin for value, origin in zip(values, check.origin, strict=True)])


def _or_infinity(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _shared_out(stretch: Stretch, sizes: Sequence[int], seed: int) -> tuple[Role, list[Role]]:
    """Samples to check the stretch with, and those of small steps, which may take turns."""
    num_left = sum(sizes) - (0 if stretch.is_set else stretch.num_checked)
    num_parts = min(stretch.num_steps, num_left // stretch.num_samples)
    number = num_parts * stretch.num_samples
    plan = draw_plan(sizes, Sizes(number, number, 0 if stretch.is_set else stretch.num_checked), seed)
    checked = (
        plan.held_out or draw_plan(sizes, Sizes(stretch.num_checked, stretch.num_checked), seed).gradient
    )
    return checked, _parts(sizes, plan.gradient.places, number, num_parts)


def _parts(sizes: Sequence[int], places: Tensor | None, number: int, num_parts: int) -> list[Role]:
    """So many samples, or all, in parts that are each spread over the whole batch, in whatever order."""
    if places is None:
        places = torch.arange(number, device="cpu")
    return [Role(sizes, own) for own in places.view(-1, num_parts).T.contiguous()]


def _copy(kept: Tensor | None, like: Tensor) -> Tensor:
    """What was kept, or zeros where there is nothing, or where the block has other parameters by now."""
    return torch.zeros_like(like) if kept is None or len(kept) != len(like) else kept.to(like).clone()
