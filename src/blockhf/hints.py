"""What a newcomer may want to know at the first step: habits from other optimizers that cost time here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockhf.plan import Plan
from blockhf.policies import FixedStep, Search

HABIT = 0.01
"""A learning rate up to which it looks like one of Adam's or SGD's."""

_LR = (
    "lr is {lr:g}, so steps are {lr:g} times as long as the best that the search finds. Leave lr at 1, "
    "unless that is meant."
)
_ONE_BLOCK = (
    "all {number} parameter tensors are one block, as they were passed without groups. "
    "BlockHF(blocks.by_module(model)) makes a block of each submodule; blocks.single(model) says that one is "
    "meant."
)
_SMALL_BATCH = (
    "a batch of {number} samples is too small to hold any out, so step lengths are chosen on the samples "
    "that the directions come from. Pass {enough} samples or more, better some thousands: "
    "for batch in blockhf.gather(loader, 4096)."
)


def at_first_step(
    groups: Sequence[Mapping[str, Any]], search: Search, plan: Plan, population: int | None
) -> list[str]:
    """Sentences on what looks like a habit.

    Args:
        groups: The parameter groups.
        search: How far steps go.
        plan: Which samples are taken for what.
        population: How many samples there are in all, where that is known.
    """
    hints = []
    if not isinstance(search, FixedStep) and (lr := max(float(group["lr"]) for group in groups)) <= HABIT:
        hints += [_LR.format(lr=lr)] if lr > 0 else []
    if len(groups) == 1 and groups[0]["name"] == "block0" and len(groups[0]["params"]) > 2:
        hints.append(_ONE_BLOCK.format(number=len(groups[0]["params"])))
    enough = next((n for n in (2**k for k in range(20)) if search.num_held_out(n, n)), None)
    number = sum(plan.gradient.sizes)
    is_sample = number > 1 and population != number
    if enough is not None and is_sample and number < enough and plan.held_out is None:
        hints.append(_SMALL_BATCH.format(number=number, enough=enough))
    return hints
