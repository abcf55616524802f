"""How much ``damping * I`` is added to a block's matrix, and how that follows what steps achieve.

A rule is arithmetic on numbers. The value itself lives in the block's parameter group, under
``"damping"``, where it is saved with the optimizer and can be read and edited by hand.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

from blockhf.policy import Policy, State


@dataclass(frozen=True)
class Outcome:
    """What a step achieved, as a damping rule sees it.

    Attributes:
        accepted: Whether the parameters moved.
        ratio: Actual over predicted reduction of the loss; ``None`` where the loss was not evaluated.
        coefficient: The share of the block's direction that curvature alone would leave, where the search
            chooses a length for each block.
        length: The share of the direction that was taken, where the search shrinks all blocks alike.
        rounding: The relative precision of the block's numbers.
        growth: How many times the damping grew within the step, where the search damps itself.
    """

    accepted: bool
    ratio: float | None = None
    coefficient: float | None = None
    length: float | None = None
    rounding: float = 0.0
    growth: float | None = None


class DampingRule(Policy):
    """Where a block's damping starts and how it goes on."""

    initial: float
    """The damping of the first step."""

    @property
    def needs_ratio(self) -> bool:
        """Whether the rule makes sense only with a search that evaluates the loss after the step."""
        return True

    @property
    def is_relative(self) -> bool:
        """Whether the value counts in means of the diagonal of the block's matrix, and not as it is."""
        return False

    @abc.abstractmethod
    def update(self, damping: float, outcome: Outcome, state: State) -> float:
        """The damping of the next step; ``state`` is what the rule keeps of the block."""


@dataclass(frozen=True)
class Constant(DampingRule):
    """The same damping all along; the paper's choice."""

    initial: float = 0.0

    def __post_init__(self) -> None:
        _check(self.initial >= 0, f"damping is {self.initial}, but must not be negative.")

    @property
    def needs_ratio(self) -> bool:
        return False

    def update(self, damping: float, outcome: Outcome, state: State) -> float:
        return damping


@dataclass(frozen=True)
class LevenbergMarquardt(DampingRule):
    """Less damping where the quadratic model foretold the loss well, more where it did not.

    Above a reduction ratio of ``good`` the damping is multiplied by ``factor``, below ``bad``, or where
    a step was rejected, divided by it (Martens, 2010, section 4.1, with his constants).

    >>> rule = LevenbergMarquardt(factor=0.5)
    >>> [rule.update(1.0, outcome, {}) for outcome in (Outcome(True, ratio=0.9), Outcome(False))]
    [0.5, 2.0]
    """

    initial: float = 0.1
    factor: float = 2 / 3
    good: float = 0.75
    bad: float = 0.25
    floor: float = 1e-8
    ceiling: float = 1e8

    def __post_init__(self) -> None:
        _check_adaptive(self)

    def update(self, damping: float, outcome: Outcome, state: State) -> float:
        if not outcome.accepted or (outcome.ratio is not None and outcome.ratio < self.bad):
            damping /= self.factor
        elif outcome.ratio is not None and outcome.ratio > self.good:
            damping *= self.factor
        return min(max(damping, self.floor), self.ceiling)


@dataclass(frozen=True)
class ByCoefficient(DampingRule):
    """Less damping where the search takes much of a block's direction, more where it takes little.

    It counts in means of the diagonal of the block's matrix, so that the scales of loss, inputs and outputs
    do not matter. For searches that choose a length for each block, like ``Subspace``. With others it goes by
    the reduction ratio, as ``LevenbergMarquardt`` does. The bounds are far below 1, because more damping
    mends little lengths at a price: the directions of little curvature, in which most is left to gain late
    in a run, are the first to go. Where less than ``bad`` was taken, the damping grows by as much as the
    length falls short, at most by ``fastest``; above three times ``good`` it falls twice as fast. A reduction
    ratio that is bad lets it grow, one below a half keeps it from falling.

    >>> rule = ByCoefficient()
    >>> rule.update(1.0, Outcome(accepted=True, ratio=0.9, coefficient=0.4), {})
    0.5
    >>> rule.update(1.0, Outcome(accepted=True, ratio=0.9, coefficient=0.02), {})
    2.5
    >>> rule.update(1.0, Outcome(accepted=True, ratio=0.1, coefficient=0.8), {})
    2.0
    """

    initial: float = 1.0
    factor: float = 0.5
    good: float = 0.2
    bad: float = 0.05
    fastest: float = 8.0
    floor: float = 1e-7
    ceiling: float = 1e8

    def __post_init__(self) -> None:
        _check_adaptive(self)
        _check(self.fastest > 1, f"fastest is {self.fastest}, but must be above 1.")

    @property
    def is_relative(self) -> bool:
        return True

    def update(self, damping: float, outcome: Outcome, state: State) -> float:
        share, ratio, change = outcome.coefficient, outcome.ratio, 1.0
        if not outcome.accepted:
            change = self.fastest
        elif share is None:
            change = self.factor if ratio is not None and ratio > LevenbergMarquardt.good else 1.0
        elif share < self.bad:
            change = self.bad / max(share, self.bad / self.fastest)
        elif share > self.good:
            change = self.factor**2 if share > 3 * self.good else self.factor
        if outcome.accepted and ratio is not None and ratio < 0.5:
            change = max(change, 1 / self.factor if ratio < LevenbergMarquardt.bad else 1.0)
        return min(max(damping * change, self.floor), self.ceiling)


@dataclass(frozen=True)
class RelativeDamping(DampingRule):
    """Levenberg-Marquardt damping for losses without noise, over as many orders of magnitude as there are.

    It counts in means of the diagonal of the block's matrix, so that the scales of loss and outputs do not
    matter. As with ``LevenbergMarquardt`` the reduction ratio decides, of the step at the length
    that was taken. A step of which less than ``shortest`` was left counts as a bad one, whatever its ratio:
    every model is good enough for short steps. Rejected ones in a row count more each time (Nielsen, 1999).
    Where the search damps itself, as ``Geodesic`` does, its damping is kept, and lowered if it did not grow.
    The floor is at the rounding of the block's numbers, below which damping does nothing.

    >>> rule = RelativeDamping()
    >>> outcomes = [Outcome(True, ratio=0.9, length=length) for length in (0.5, 0.005)]
    >>> [round(rule.update(1e-3, outcome, {}), 6) for outcome in [*outcomes, Outcome(False)]]
    [0.000333, 0.003, 0.003]
    """

    initial: float = 1e-3
    factor: float = 1 / 3
    good: float = 0.75
    bad: float = 0.25
    shortest: float = 0.03
    floor: float = 1e-16
    ceiling: float = 1e16

    def __post_init__(self) -> None:
        _check_adaptive(self)
        _check(0 <= self.shortest < 1, f"shortest is {self.shortest}, but must be at least 0 and below 1.")

    @property
    def is_relative(self) -> bool:
        return True

    def update(self, damping: float, outcome: Outcome, state: State) -> float:
        length = 1.0 if outcome.length is None else outcome.length
        rejected = state.get("rejected", 0)
        if not outcome.accepted:
            damping *= outcome.growth or self.factor ** -(1 + rejected)
        elif outcome.growth is not None:
            damping *= outcome.growth if outcome.growth > 1 else self.factor
        elif length < self.shortest or (outcome.ratio is not None and outcome.ratio < self.bad):
            damping /= self.factor
        elif outcome.ratio is not None and outcome.ratio > self.good:
            damping *= self.factor
        state["rejected"] = 0 if outcome.accepted else rejected + 1
        return min(max(damping, self.floor, 4 * outcome.rounding), self.ceiling)


def _check_adaptive(rule: LevenbergMarquardt | ByCoefficient | RelativeDamping) -> None:
    _check(0 < rule.factor < 1, f"factor is {rule.factor}, but must be between 0 and 1.")
    _check(rule.bad <= rule.good, f"bad is {rule.bad}, but must not be above good, {rule.good}.")
    _check(
        0 < rule.floor <= rule.initial <= rule.ceiling,
        f"initial is {rule.initial}, but must be between the floor, {rule.floor}, which must be "
        f"positive, and the ceiling, {rule.ceiling}.",
    )


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
