"""A walk of small steps, each on samples of its own, while other samples say that it leads downhill."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockhf.ledger import Ledger
from blockhf.meeting import Meeting
from blockhf.objective import check_any_outputs
from blockhf.options import coupled_decay
from blockhf.plan import Role, Sizes, draw_plan
from blockhf.point import Point
from blockhf.policies import AdamWalk, Stretch
from blockhf.policy import PolicyState, State
from blockhf.report import Phase, StepReport
from blockhf.rotation import rotation_flops
from blockhf.scalars import read
from blockhf.update import shrinkage
from blockhf.walkers import Party


@dataclass(frozen=True)
class Walked:
    """What came of a stretch of the walk.

    Attributes:
        own_loss: The objective's own loss before it, on the samples it was checked with.
        loss: The same with penalties, as a number.
        after: The same at the end.
        taken: Whether the parameters moved.
        rate: The rate.
        num_steps: Small steps of the whole stretch.
    """

    own_loss: Tensor
    loss: float
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
            loss=self.loss,
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


@dataclass(frozen=True)
class Checked:
    """Some of the samples that check a stretch over several batches.

    Attributes:
        own_loss: The objective's own loss on them, at what is shown.
        loss: The same with penalties, as a number.
        num_told: Samples so far.
        num_wanted: Samples until it is judged.
    """

    own_loss: Tensor
    loss: float
    num_told: int
    num_wanted: int

    def report(self, step: int, stretch: Stretch, ledger: Ledger, phases: dict[str, Phase]) -> StepReport:
        """The check as a step."""
        return StepReport(
            step=step,
            accepted=True,
            reason=f"a stretch of small steps is checked, with {self.num_told} of {self.num_wanted} samples",
            loss=self.loss,
            work={**ledger.summary(), "held_out_batch": self.num_told, "small_steps": 0},
            phases=phases,
        )


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
    party = Party(check.blocks, check.origin, stretch.rotation, state)
    rate = policy.rate_of(sum(map(len, check.origin)), state.shared)
    buffers, _ = _take_small_steps(policy, stretch, party, parts, met, rank, state.shared, rate)
    return _conclude(policy, stretch, state, check, party, rate, buffers)


def take_part(
    policy: AdamWalk, stretch: Stretch, state: PolicyState, met: Meeting, rank: int, seed: int
) -> Underway | None:
    """Take some small steps of a stretch that goes over several batches; arguments as for ``take_stretch``.

    The parameters stay what they are until it is checked, by ``end_stretch``. Where the loss is not finite,
    nothing has happened, and the result is none.
    """
    number, shared = stretch.num_steps * stretch.num_samples, state.shared
    shown = [block.values() for block in met.before.blocks]  # which a check may just have moved
    party = Party(met.before.blocks, shown, stretch.rotation, state)
    rate = policy.rate_of(sum(map(len, shown)), shared)
    role = draw_plan(met.sizes, Sizes(number, number), seed).gradient
    parts = [role] if stretch.num_steps == 1 else _parts(met.sizes, role.places, number, stretch.num_steps)
    buffers, loss = _take_small_steps(policy, stretch, party, parts, met, rank, shared, rate)
    for block, own in zip(met.before.blocks, shown, strict=True):
        block.assign_(own)
    ((value,),) = read([loss])
    if not math.isfinite(value):
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        return None
    shared["num_taken"] = int(shared.get("num_taken", 0)) + stretch.num_steps
    shared["count"] = int(shared.get("count", 0)) + stretch.num_steps
    party.take_down(party.joined(shown), is_on_its_way=True)
    wanted = int(shared.get("num_steps", policy.first_steps))
    return Underway(loss, value, rate, int(shared["num_taken"]), wanted)


def end_stretch(
    policy: AdamWalk, stretch: Stretch, state: PolicyState, met: Meeting, rank: int, seed: int
) -> Walked | Checked:
    """Check a stretch that went over several batches by new samples; arguments as for ``take_stretch``.

    Where a batch has not enough of them, what it says is kept until others have made it up.
    """
    told = list(state.shared.get("told", ()))
    num_told = sum(own[0] for own in told)
    number = min(max(stretch.num_checked - num_told, 1), sum(met.sizes))
    checked = draw_plan(met.sizes, Sizes(number, number), seed).gradient
    check = met.make_point(*checked.take(met.batch, rank))
    party = Party(check.blocks, check.origin, stretch.rotation, state)
    rate = policy.rate_of(sum(map(len, check.origin)), state.shared)
    known = None
    if number < stretch.num_checked:
        origin = party.joined(check.origin)
        own_loss, losses = _asked(check, party, [*_places(party, origin), *_averages(party, origin)])
        told.append([number, *losses])
        num_told += number
        if num_told < stretch.num_checked:
            if math.isfinite(losses[0]):
                state.shared["told"] = told
            return Checked(own_loss, losses[0], num_told, stretch.num_checked)
        shares = [own[0] / num_told for own in told]
        columns = zip(*(own[1:] for own in told), strict=True)
        known = own_loss, [sum(map(operator.mul, shares, column)) for column in columns]
        state.shared.pop("told", None)
    walked = _conclude(policy, stretch, state, check, party, rate, known=known)
    if not walked.taken:  # what its small steps have left behind may not be a number
        state.blocks.clear()
        state.shared["count"] = 0
    return walked


def _places(party: Party, origin: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """What is shown, and the middle, the end and the start of a stretch."""
    starts, ends = [own.start for own in party.walkers], [own.value for own in party.walkers]
    middles = [torch.lerp(start, end, 0.5) for start, end in zip(starts, ends, strict=True)]
    return [origin, middles, ends, starts]


def _averages(party: Party, origin: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """The mean of late small steps, and halfway between it and what is shown."""
    late = [own.average() for own in party.walkers]
    return [late, [torch.lerp(own, shown, 0.5) for own, shown in zip(late, origin, strict=True)]]


def _asked(check: Point, party: Party, places: Sequence[Sequence[Tensor]]) -> tuple[Tensor, list[float]]:
    """The objective's own loss at the first of some places, and the losses with penalties at all of them."""
    losses = check.losses_at(map(party.of_blocks, places))
    return losses[0] - check.penalty(losses[0]), [value for (value,) in read(losses)]


def _conclude(
    policy: AdamWalk,
    stretch: Stretch,
    state: PolicyState,
    check: Point,
    party: Party,
    rate: float,
    buffers: Sequence[tuple[Tensor, Tensor]] = (),
    known: tuple[Tensor, list[float]] | None = None,
) -> Walked:
    """Judge a stretch by samples of its own, and show what has the lowest loss there, or undo it.

    They are those of the point, unless the losses, also of the averages, are known already.
    """
    origin = party.joined(check.origin)
    places = _places(party, origin)
    if not (stretch.ends or party.is_elsewhere):  # what is shown is its start
        places.pop()
    own_loss, (before, half, after, *rest) = known or _asked(check, party, places)
    num_steps = int(state.shared["num_taken"]) if stretch.ends else stretch.num_steps
    taken, factor = judged = policy.judge(rest[0] if rest else before, half, after)
    found: list[tuple[float, Sequence[Tensor]]] = [(before, origin), (after, places[2])]
    gains = False
    if taken and policy.averages and factor <= 1:  # where noise has a part in it
        averages = _averages(party, origin)
        means = rest[1:] or _asked(check, party, averages)[1]
        found += zip(means, averages, strict=True)
        gains = policy.gains(before, means[0], after)
    policy.update(stretch, rate, judged, state.shared, gains=gains)
    if not taken:
        check.move_to(check.origin)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    else:
        after, shown = min(found, key=lambda pair: _or_infinity(pair[0]))
        party.take_down(shown)
        check.move_to(party.of_blocks(shown))
        if not stretch.ends:
            state.shared["count"] = int(state.shared.get("count", 0)) + stretch.num_steps
        check.refresh_statistics()
    return Walked(own_loss, before, after if taken else before, taken, rate, num_steps)


def _take_small_steps(
    policy: AdamWalk,
    stretch: Stretch,
    party: Party,
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
    walkers, joint = party.walkers, [own.joint for own in party.walkers]
    rates = party.shared_out([rate * float(group["lr"]) for group in met.groups])
    decays = party.shared_out([coupled_decay(group) for group in met.groups])
    for number in range(stretch.num_steps):
        for walker in walkers:
            walker.show()
        taken = parts[number % len(parts)].take(met.batch, rank)
        point = met.make_point(*taken, [own.value for own in walkers], joint)
        _, gradient = point.gradient(looks=number == 0)
        if number == 0:
            check_any_outputs(met.structure.num_tensors)
            met.before.protect(point.buffers)
            buffers = [(buffer, buffer.clone()) for buffer in point.buffers]
            losses.append(point.own_loss)
        point.commit(None)
        is_late = 2 * (before + number) >= whole
        for walker, own, decay, pace in zip(walkers, gradient, decays, rates, strict=True):
            walker.move(policy, own, decay, pace, count + number + 1, adds=is_late)
    shares = [shrinkage(group) * stretch.num_steps / whole for group in met.groups]
    for walker, share in zip(walkers, party.shared_out(shares), strict=True):
        walker.decay(share)
    sides = [side for walker in walkers for own in walker.sides for side in own]
    point.samples.ledger.add("rotation", rotation_flops(sides, count + 1, count + stretch.num_steps))
    return buffers, losses[0]


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
