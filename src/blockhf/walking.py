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
    """

    own_loss: Tensor
    before: float
    after: float
    taken: bool
    rate: float

    def report(self, step: int, stretch: Stretch, ledger: Ledger, phases: dict[str, Phase]) -> StepReport:
        """The stretch as a step."""
        how = f"{stretch.num_steps} small steps of {stretch.num_samples} samples at a rate of {self.rate:.2g}"
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
        self.start = self.value.clone()
        self.sides = [Side(*own) for own in state["sides"]] if "sides" in state else sides
        self._rotation = Rotation(self.sides, state, shown)
        self._mean, self._square = (_copy(state.get(name), shown) for name in ("mean", "square"))
        self._total, self._num_added = torch.zeros_like(shown), 0

    def move(self, policy: AdamWalk, gradient: Tensor, rate: float, count: int, *, adds: bool) -> None:
        """Take a small step, the ``count``-th; ``adds`` it to the average."""
        self._rotation.learn(gradient, self._mean, count)
        turned = policy.direction(self._rotation.there(gradient), self._mean, self._square, count)
        self.value.add_(self._rotation.back(turned), alpha=rate)
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

    def kept(self, shown: Tensor) -> State:
        """What to keep where these are the parameters."""
        return {
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
    shared = state.shared
    sides = affordable_sides(check.blocks, stretch.rotation)
    walkers = [
        _Walker(block, shown, own, state.of(block.name))
        for block, shown, own in zip(check.blocks, check.origin, sides, strict=True)
    ]
    rate = policy.rate_of(sum(map(len, check.origin)), shared)
    buffers = _take_small_steps(policy, stretch, walkers, parts, met, rank, rate, int(shared.get("count", 0)))
    starts, ends = [own.start for own in walkers], [own.value for own in walkers]
    middles = [(start + end) / 2 for start, end in zip(starts, ends, strict=True)]
    places = [check.origin, middles, ends]
    if any(own.is_elsewhere for own in walkers):
        places.append(starts)
    losses = [_loss_at(check, own) for own in places]
    (before,), (half,), (after,), *rest = read(losses)
    first = rest[0][0] if rest else before
    taken, factor = judged = policy.judge(first, half, after)
    policy.update(stretch, rate, judged, shared)
    if not taken:
        check.move([torch.zeros_like(own) for own in check.origin])
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    else:
        found = [(before, check.origin), (after, ends)]
        if factor <= 1:  # where noise has a part in it
            found += _averages(check, walkers)
        after, shown = min(found, key=lambda pair: _or_infinity(pair[0]))
        for walker, own in zip(walkers, shown, strict=True):
            state.blocks[walker.block.name] = walker.kept(own)
        check.move([own - origin for own, origin in zip(shown, check.origin, strict=True)])
        shared["count"] = int(shared.get("count", 0)) + stretch.num_steps
        check.refresh_statistics()
    own_loss = losses[0] - check.penalty(losses[0])
    return Walked(own_loss, before, after if taken else before, taken, rate)


def _take_small_steps(
    policy: AdamWalk,
    stretch: Stretch,
    walkers: Sequence[_Walker],
    parts: Sequence[Role],
    met: Meeting,
    rank: int,
    rate: float,
    count: int,
) -> list[tuple[Tensor, Tensor]]:
    """Walk; the result are the buffers of the model, with what they held before."""
    buffers: list[tuple[Tensor, Tensor]] = []
    for walker in walkers:
        walker.block.assign_(walker.value)
    for number in range(stretch.num_steps):
        taken = parts[number % len(parts)].take(met.batch, rank)
        point = met.make_point(*taken, [own.value for own in walkers])
        _, gradient = point.gradient()
        if number == 0:
            met.before.protect(point.buffers)
            buffers = [(buffer, buffer.clone()) for buffer in point.buffers]
        point.commit(None)
        is_late = 2 * number >= stretch.num_steps
        for walker, own, group in zip(walkers, gradient, met.groups, strict=True):
            walker.move(policy, own, rate * float(group["lr"]), count + number + 1, adds=is_late)
    for walker, group in zip(walkers, met.groups, strict=True):
        walker.decay(shrinkage(group))
    flops = (rotation_flops(own.sides, count + 1, count + stretch.num_steps) for own in walkers)
    point.samples.ledger.add("rotation", sum(flops))
    return buffers


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
    places = plan.gradient.places
    if places is None:  # all of them
        places = torch.arange(number, device="cpu")
    # Each part is spread over the whole batch, in whatever order that comes.
    return checked, [Role(sizes, own) for own in places.view(-1, num_parts).T.contiguous()]


def _copy(kept: Tensor | None, like: Tensor) -> Tensor:
    """What was kept, or zeros where there is nothing, or where the block has other parameters by now."""
    return torch.zeros_like(like) if kept is None or len(kept) != len(like) else kept.to(like).clone()
