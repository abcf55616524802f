"""A damping rule of one's own: follow an average of the reduction ratios instead of the last one.

    optimizer = BlockHF.martens(blocks.by_module(model), damping=AverageRatio())

A rule derives from ``DampingRule``. It has an ``initial`` damping and says in ``update`` how a block's
damping goes on after a step. The damping itself lives in the block's parameter group; what else the rule has
to remember goes into ``state``, a mapping of the block's own that is empty at first.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockhf import DampingRule, Outcome, State


@dataclass(frozen=True)
class AverageRatio(DampingRule):
    """Levenberg-Marquardt damping by an exponential average of the ratios, for noisy ones.

    A rejected step counts as a ratio of zero.

    >>> rule, state = AverageRatio(initial=1.0, factor=0.5, weight=0.5), {}
    >>> rule.update(1.0, Outcome(accepted=True, ratio=0.9), state)
    0.5
    >>> rule.update(0.5, Outcome(accepted=True, ratio=0.2), state)  # one bad step is not enough
    0.5
    >>> state
    {'average': 0.55}

    Args:
        initial: The damping of the first step.
        factor: What the damping is multiplied with where the average is good, or divided by where it is bad.
        good: From which average on there is less damping.
        bad: Below which average there is more.
        weight: That of the last ratio in the average.
    """

    initial: float = 0.1
    factor: float = 2 / 3
    good: float = 0.75
    bad: float = 0.25
    weight: float = 0.3

    def __post_init__(self) -> None:
        for name, value in (("factor", self.factor), ("weight", self.weight)):
            if not 0 < value < 1:
                raise ValueError(f"{name} is {value}, but must be between 0 and 1.")

    def update(self, damping: float, outcome: Outcome, state: State) -> float:
        ratio = outcome.ratio if outcome.accepted else 0.0
        if ratio is None:
            return damping
        average = state.get("average", ratio)
        average = state["average"] = average + self.weight * (ratio - average)
        if average > self.good:
            return damping * self.factor
        return damping / self.factor if average < self.bad else damping
