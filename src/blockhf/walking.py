"""A walk: small steps, each on samples of its own, of which other samples say how much is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockhf.isolation import Restored
from blockhf.ledger import Ledger
from blockhf.point import Point
from blockhf.policies import AdamWalk, Stretch
from blockhf.policy import PolicyState
from blockhf.report import Phase, StepReport
from blockhf.scalars import read


@dataclass(frozen=True)
class Walked:
    """What came of a walk.

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
        """The walk as a step."""
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


def walk(
    policy: AdamWalk,
    state: PolicyState,
    check: Point,
    points: Sequence[Callable[[Sequence[Tensor]], Point]],
    groups: Sequence[dict[str, Any]],
    restored: Restored,
) -> Walked:
    """Take small steps, and of them what lowers the loss on other samples.

    Args:
        policy: How to walk.
        state: What it keeps: averages of each block, and the rate.
        check: The starting point on the samples that the walk is checked with.
        points: For each small step, makes the point on its samples at given parameters.
        groups: The parameter groups, one for each block.
        restored: Puts all back where an exception ends the walk.
    """
    shared, blocks = state.shared, check.blocks
    rate, count = policy.rate_of(shared), int(shared.get("count", 0))
    values = [own.clone() for own in check.origin]
    averages = [
        [state.of(block.name).get(name, torch.zeros_like(value)).to(value).clone() for name in ("mean", "square")]
        for block, value in zip(blocks, values, strict=True)
    ]
    buffers: list[tuple[Tensor, Tensor]] = []
    for number, make_point in enumerate(points):
        point = make_point(values)
        _, gradient = point.gradient()
        if number == 0:
            restored.protect(point.buffers)
            buffers = [(buffer, buffer.clone()) for buffer in point.buffers]
        point.commit(None)
        count += 1
        for block, group, value, own, average in zip(blocks, groups, values, gradient, averages, strict=True):
            policy.move(value, own, *average, rate * float(group["lr"]), count)
            block.assign_(value)
    change = [value - start for value, start in zip(values, check.origin, strict=True)]
    still = [torch.zeros_like(own) for own in change]
    losses = [check.loss_at(own) for own in (still, [own / 2 for own in change], change)]
    (before,), (half,), (after,) = read(losses)
    taken, factor = policy.judge(before, half, after)
    own_loss = losses[0] - check.penalty(losses[0])
    policy.update(factor, shared)
    if taken:
        check.move(change)
        shared["count"] = count
        for block, (mean, square) in zip(blocks, averages, strict=True):
            state.of(block.name).update(mean=mean, square=square)
    else:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    if shared["is_over"]:
        state.blocks.clear()
    return Walked(own_loss, before, after if taken else before, bool(taken), rate)
