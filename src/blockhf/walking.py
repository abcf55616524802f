"""A walk of small steps, each on samples of its own, while other samples say that it leads downhill."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockhf._torch import copy_each
from blockhf.blocks import Block
from blockhf.ledger import Ledger
from blockhf.meeting import Meeting
from blockhf.objective import check_any_outputs
from blockhf.options import coupled_decay
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


class _Walker:
    """Blocks of one device and type on their way, as one flat vector, with what they keep on it."""

    def __init__(
        self,
        blocks: Sequence[Block],
        shown: Sequence[Tensor],
        sides: Sequence[Sequence[Side]],
        states: Sequence[State],
    ) -> None:
        self.blocks, self._sizes = blocks, [block.size for block in blocks]
        self._shapes = [[list(param.shape) for param in block.params] for block in blocks]
        # Where some parameters are frozen by now, or thawed, nothing of a block is known.
        states = [
            state if state.get("shapes", own) == own else {}
            for state, own in zip(states, self._shapes, strict=True)
        ]
        names = ", ".join(block.name for block in blocks)
        self.joint = Block(names, tuple(param for block in blocks for param in block.params))
        self.is_elsewhere = any("offset" in state for state in states)
        self._shown, self._states = shown, states
        self.value = self._at("offset")
        self._mean, self._square = (self._kept(name) for name in ("mean", "square"))
        # The sum of small steps: those before are kept by how far they are from what is shown.
        self._num_kept = max(int(state.get("num_added", 0)) for state in states)
        self._total: Tensor | None = None
        self._num_added = 0
        self.sides = [
            [Side(*one) for one in state["sides"]] if "sides" in state else own
            for state, own in zip(states, sides, strict=True)
        ]
        self._rotations = list(map(Rotation, self.sides, states, shown))
        self._into = list(zip(self.joint.params, self.joint.unflatten(self.value), strict=True))

    def split(self, vector: Tensor) -> Sequence[Tensor]:
        """The parts of a vector that are those of the blocks, as views."""
        return torch.split(vector, self._sizes)

    def show(self) -> None:
        """Write where they are into the parameters."""
        with torch.no_grad():
            copy_each(self._into)

    def move(
        self,
        policy: AdamWalk,
        gradient: Tensor,
        decays: Sequence[float],
        rates: Sequence[float],
        count: int,
        *,
        adds: bool,
    ) -> None:
        """Take a small step, the ``count``-th, which uses the gradient up; ``adds`` it to the average."""
        if any(decays):
            for own, value, decay in zip(self.split(gradient), self.split(self.value), decays, strict=True):
                own.add_(value, alpha=decay)
        kept = map(self.split, (gradient, self._mean, self._square))
        for rotation, own, mean, square in zip(self._rotations, *kept, strict=True):
            rotation.learn(own, mean, square, count)
            rotation.there_(own)
        turned = policy.direction(gradient, self._mean, self._square, count)
        for rotation, own in zip(self._rotations, self.split(turned), strict=True):
            rotation.back_(own)
        if len(set(rates)) == 1:
            self.value.add_(turned, alpha=rates[0])
        else:
            for value, own, rate in zip(self.split(self.value), self.split(turned), rates, strict=True):
                value.add_(own, alpha=rate)
        if adds:
            self._total = self.value.clone() if self._total is None else self._total.add_(self.value)
            self._num_added += 1

    @property
    def start(self) -> Tensor:
        """Where the stretch has begun."""
        return self._at("start", "offset")

    def decay(self, shares: Sequence[float]) -> None:
        """Shrink each block by a share of where it started."""
        if any(shares):
            num_added = self._num_kept + self._num_added
            self._total = torch.zeros_like(self.value) if self._total is None else self._total
            for vector, number in ((self.value, 1), (self._total, num_added)):
                for own, start, share in zip(*map(self.split, (vector, self.start)), shares, strict=True):
                    own.sub_(start, alpha=share * number)

    def average(self) -> Tensor:
        """The mean over the small steps that were added."""
        if self._total is not None and not self._num_kept:
            return self._total / self._num_added
        shown = torch.cat(list(self._shown))
        return self._summed(shown).div_(self._num_kept + self._num_added).add_(shown)

    def _summed(self, shown: Tensor) -> Tensor:
        """How far the small steps that were added are from what is shown, added up."""
        total = self._kept("total")
        return total if self._total is None else total.add_(self._total).sub_(shown, alpha=self._num_added)

    def _at(self, *names: str) -> Tensor:
        """Where the first of some distances from what is shown leads that is known of a block."""
        found = []
        for state, own in zip(self._states, self._shown, strict=True):
            distance = next((state[name] for name in names if name in state), None)
            found.append(own if distance is None else own + distance.to(own))
        return torch.cat(found)

    def _kept(self, name: str) -> Tensor:
        """What was kept of the blocks under a name, or zeros, as one vector."""
        if not any(name in state for state in self._states):
            return self.value.new_zeros(len(self.value))
        pairs = zip(self._states, self._shown, strict=True)
        return torch.cat(
            [state[name].to(own) if name in state else torch.zeros_like(own) for state, own in pairs]
        )

    def kept(self, shown: Tensor, *, is_on_its_way: bool = False) -> list[State]:
        """What to keep of each block where these are the parameters, after a stretch or on its way."""
        named = {"mean": self._mean, "square": self._square}
        if shown is not self.value:
            named["offset"] = self.value - shown
        if is_on_its_way and (self._num_kept or self._num_added):
            named["total"] = self._summed(shown)
        parts = {name: self.split(vector) for name, vector in named.items()}
        return [
            {
                **{name: own[index] for name, own in parts.items()},
                **(self._on_its_way(index) if is_on_its_way else {}),
                "shapes": self._shapes[index],
                "sides": [[side.place, side.rows, side.columns, side.axis] for side in self.sides[index]],
                **self._rotations[index].state(),
            }
            for index in range(len(self.blocks))
        ]

    def _on_its_way(self, index: int) -> State:
        """What to keep of a block in the middle of a stretch alone."""
        state, own = self._states[index], self._shown[index]
        start = state["start"] if "start" in state else state.get("offset", torch.zeros_like(own))
        return {"start": start, "num_added": self._num_kept + self._num_added}


class _Party:
    """All blocks on their way. Those of one device and type are walked as one vector, which is faster.

    Args:
        blocks: The blocks.
        shown: Where their parameters are.
        rotation: What the rotations of a small step may cost.
        state: What is kept of them.
    """

    def __init__(
        self, blocks: Sequence[Block], shown: Sequence[Tensor], rotation: float, state: PolicyState
    ) -> None:
        self._state = state
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, own in enumerate(shown):
            kinds.setdefault((own.device, own.dtype), []).append(index)
        self._places = list(kinds.values())
        known = blocks, shown, affordable_sides(blocks, rotation), [state.of(block.name) for block in blocks]
        self.walkers = [_Walker(*own) for own in zip(*map(self.shared_out, known), strict=True)]

    @property
    def is_elsewhere(self) -> bool:
        """Whether what is shown is not where the small steps are."""
        return any(own.is_elsewhere for own in self.walkers)

    def shared_out(self, of_blocks: Sequence[Any]) -> list[list[Any]]:
        """What there is of each block, walker by walker."""
        return [[of_blocks[place] for place in places] for places in self._places]

    def joined(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """From a vector of each block those of the walkers."""
        return list(map(torch.cat, self.shared_out(vectors)))

    def of_blocks(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """From a vector of each walker those of the blocks, in their order."""
        found: dict[int, Tensor] = {}
        for walker, places, vector in zip(self.walkers, self._places, vectors, strict=True):
            found.update(zip(places, walker.split(vector), strict=True))
        return [found[place] for place in sorted(found)]

    def take_down(self, shown: Sequence[Tensor], *, is_on_its_way: bool = False) -> None:
        """Keep what is needed to go on from here, where these vectors of the walkers are the parameters."""
        for walker, own in zip(self.walkers, shown, strict=True):
            for block, kept in zip(walker.blocks, walker.kept(own, is_on_its_way=is_on_its_way), strict=True):
                self._state.blocks[block.name] = kept


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
    party = _Party(check.blocks, check.origin, stretch.rotation, state)
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
    party = _Party(met.before.blocks, shown, stretch.rotation, state)
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
    party = _Party(check.blocks, check.origin, stretch.rotation, state)
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


def _places(party: _Party, origin: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """What is shown, and the middle, the end and the start of a stretch."""
    starts, ends = [own.start for own in party.walkers], [own.value for own in party.walkers]
    middles = [torch.lerp(start, end, 0.5) for start, end in zip(starts, ends, strict=True)]
    return [origin, middles, ends, starts]


def _averages(party: _Party, origin: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """The mean of late small steps, and halfway between it and what is shown."""
    late = [own.average() for own in party.walkers]
    return [late, [torch.lerp(own, shown, 0.5) for own, shown in zip(late, origin, strict=True)]]


def _asked(check: Point, party: _Party, places: Sequence[Sequence[Tensor]]) -> tuple[Tensor, list[float]]:
    """The objective's own loss at the first of some places, and the losses with penalties at all of them."""
    losses = check.losses_at(map(party.of_blocks, places))
    return losses[0] - check.penalty(losses[0]), [value for (value,) in read(losses)]


def _conclude(
    policy: AdamWalk,
    stretch: Stretch,
    state: PolicyState,
    check: Point,
    party: _Party,
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
    party: _Party,
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
