"""A walk of small steps, each on samples of its own, while other samples say that it leads downhill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockhf.ledger import Ledger
from blockhf.meeting import Meeting
from blockhf.plan import Role, Sizes, draw_plan
from blockhf.policies import AdamWalk, Stretch
from blockhf.policy import PolicyState
from blockhf.report import Phase, StepReport
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


def take_stretch(
    policy: AdamWalk, stretch: Stretch, state: PolicyState, met: Meeting, rank: int, seed: int
) -> Walked:
    """Take small steps, each on samples of its own, and undo them where they lead uphill on others.

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
    shared, blocks = state.shared, check.blocks
    rate, count = policy.rate_of(sum(map(len, check.origin)), shared), int(shared.get("count", 0))
    values = [own.clone() for own in check.origin]
    means, squares = (
        [_copy(state.of(block.name).get(name), value) for block, value in zip(blocks, values, strict=True)]
        for name in ("mean", "square")
    )
    buffers: list[tuple[Tensor, Tensor]] = []
    for number in range(stretch.num_steps):
        point = met.make_point(*parts[number % len(parts)].take(met.batch, rank), values)
        _, gradient = point.gradient()
        if number == 0:
            met.before.protect(point.buffers)
            buffers = [(buffer, buffer.clone()) for buffer in point.buffers]
        point.commit(None)
        count += 1
        for index, (block, group) in enumerate(zip(blocks, met.groups, strict=True)):
            own = rate * float(group["lr"])
            policy.move(values[index], gradient[index], means[index], squares[index], own, count)
            block.assign_(values[index])
    change = [
        value - start if (decay := shrinkage(group)) == 0 else value - start - decay * start
        for value, start, group in zip(values, check.origin, met.groups, strict=True)
    ]
    trials = ([torch.zeros_like(own) for own in change], [own / 2 for own in change], change)
    losses = [check.loss_at(own) for own in trials]
    (before,), (half,), (after,) = read(losses)
    taken, factor = policy.judge(before, half, after)
    policy.update(rate, factor, shared)
    if taken:
        check.move(change)
        shared["count"] = count
        for block, mean, square in zip(blocks, means, squares, strict=True):
            state.of(block.name).update(mean=mean, square=square)
    else:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    if shared["is_over"]:
        state.blocks.clear()
    own_loss = losses[0] - check.penalty(losses[0])
    return Walked(own_loss, before, after if taken else before, taken, rate)


def _shared_out(stretch: Stretch, sizes: Sequence[int], seed: int) -> tuple[Role, list[Role]]:
    """Samples to check the stretch with, and those of small steps, which may take turns."""
    num_parts = min(stretch.num_steps, (sum(sizes) - stretch.num_checked) // stretch.num_samples)
    number = num_parts * stretch.num_samples
    plan = draw_plan(sizes, Sizes(number, number, stretch.num_checked), seed)
    assert plan.held_out is not None
    assert plan.gradient.places is not None
    # Each part is spread over the whole batch, in whatever order that comes.
    places = plan.gradient.places.view(-1, num_parts).T.contiguous()
    return plan.held_out, [Role(sizes, own) for own in places]


def _copy(kept: Tensor | None, like: Tensor) -> Tensor:
    """What was kept, or zeros where there is nothing, or where the block has other parameters by now."""
    return torch.zeros_like(like) if kept is None or len(kept) != len(like) else kept.to(like).clone()
