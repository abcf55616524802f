"""Whether a run opens with a walk, in many small steps by the gradient alone: arithmetic on numbers.

Far from a minimum the gradient of a few samples is as good as that of many, and curvature is not worth its
price. So ``AdamWalk`` has small steps at first, until noise is all that they feel. ``NoWalk`` has none.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blockhf.ledger import GRADIENT
from blockhf.policy import Policy, State


@dataclass(frozen=True)
class Stretch:
    """A part of the walk, which is one step of the optimizer.

    Attributes:
        num_steps: Small steps.
        num_samples: Samples of each.
        num_checked: Other samples, on which the loss before and after is compared.
    """

    num_steps: int
    num_samples: int
    num_checked: int


class Walk(Policy):
    """How a run opens."""

    @abc.abstractmethod
    def stretch(
        self, num_available: int, forward: float, num_params: int, positions: int, state: State
    ) -> Stretch | None:
        """The next part of the walk; none where it is over, or where there are too few samples.

        Args:
            num_available: Samples of the batch.
            forward: Counted operations of a forward pass over a sample.
            num_params: Parameters.
            positions: Predictions of a sample.
            state: What the policy keeps.
        """


@dataclass(frozen=True)
class NoWalk(Walk):
    """With Gauss-Newton steps from the first; the paper's choice."""

    def stretch(
        self, num_available: int, forward: float, num_params: int, positions: int, state: State
    ) -> Stretch | None:
        return None


@dataclass(frozen=True)
class AdamWalk(Walk):
    r"""With steps of Adam (Kingma and Ba, 2015), at a rate that adapts, until noise stops them.

    Samples of no small step tell the loss at the start of a stretch, halfway and at its end. A parabola
    through the three has its lowest point at ``t`` times the stretch. Above 1.2 the rate grows by ``t``, at
    most twofold, below 0.6 it falls by ``change``, and below -0.5 the stretch is undone and the rate halved.
    Where both ends have the same loss and the middle is lower, ``t`` is 1/2: then the steps go to and fro by
    noise. Once the rate has fallen by ``fall`` from its highest, the walk is over for good.

    Args:
        length: Of the first small steps, over all parameters: it is the rate times the root of their number,
            which counts as 1,000 at the least.
        betas: Weights of the past in the averages of gradients and of their squares.
        max_steps: The most small steps in a stretch.
        min_steps: The fewest.
        change: By what the rate falls.
        fall: Of the rate at the end.
        damping: What damping is multiplied by at the end: near a minimum less of it will do.

    >>> walk = AdamWalk()
    >>> walk.judge(4.0, 2.0, 1.0)  # the parabola is lowest at 1.25: on, and faster
    (True, 1.25)
    >>> walk.judge(4.0, 2.0, 4.0)[0], walk.judge(4.0, 5.0, 6.0)
    (True, (False, 0.5))
    """

    length: float = 0.5
    betas: tuple[float, float] = (0.9, 0.99)
    max_steps: int = 50
    min_steps: int = 10
    change: float = 1.5
    fall: float = 2.0
    damping: float = 0.03

    def __post_init__(self) -> None:
        if not 0 < self.length < math.inf:
            raise ValueError(f"length is {self.length}, but must be above 0.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas is {self.betas}, but must be two numbers of at least 0 and below 1.")
        if not 1 <= self.min_steps <= self.max_steps:
            raise ValueError(
                f"min_steps is {self.min_steps} and max_steps is {self.max_steps}, but must be at least 1, "
                "and the second at least the first."
            )
        for name, value in (("change", self.change), ("fall", self.fall)):
            if not 1 < value < math.inf:
                raise ValueError(f"{name} is {value}, but must be above 1.")
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping is {self.damping}, but must be above 0 and at most 1.")

    def stretch(
        self, num_available: int, forward: float, num_params: int, positions: int, state: State
    ) -> Stretch | None:
        if state.get("is_over", False):
            return None
        # A small step has as many samples as make its gradient cost no less than all else in it.
        besides = SMALL_STEP + PER_PARAM * num_params
        number = _power_of_two(besides / max(GRADIENT * forward, 1.0), *FEWEST_AND_MOST)
        num_checked = min(math.ceil(max(CHECKED / math.sqrt(positions), CHECKED / 4)), num_available // 4)
        num_steps = min(self.max_steps, PASSES * ((num_available - num_checked) // number))
        return None if num_steps < self.min_steps else Stretch(num_steps, number, num_checked)

    def rate_of(self, num_params: int, state: State) -> float:
        """The rate of the next stretch."""
        return float(state.get("rate", self.length / math.sqrt(max(num_params, FEW_PARAMS))))

    def judge(self, before: float, half: float, after: float) -> tuple[bool, float]:
        """Whether to take a stretch, and by what to multiply the rate, from the losses along it."""
        if not math.isfinite(half + after):
            return False, 0.25
        bend = 2 * (before + after - 2 * half)
        if bend <= 0:
            return (True, 2.0) if after < before else (False, 0.5)
        lowest = 0.5 * (1 + (before - after) / bend)
        if lowest < -0.5:
            return False, 0.5
        return True, min(lowest, 2.0) if lowest > 1.2 else 1 / self.change if lowest < 0.6 else 1.0

    def update(self, rate: float, factor: float, state: State) -> None:
        """Change the rate, and see whether the walk is over."""
        highest = max(float(state.get("highest", rate)), rate)
        state.update(rate=rate * factor, highest=highest, is_over=rate * factor * self.fall <= highest)

    def move(
        self, value: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, rate: float, count: int
    ) -> None:
        """One small step of a block, in place; ``count`` is its number from 1."""
        first, second = self.betas
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = square.div(1 - second**count).sqrt_().add_(torch.finfo(square.dtype).tiny ** 0.5)
        value.addcdiv_(mean, root, value=-rate / (1 - first**count))


SMALL_STEP, PER_PARAM = 3e7, 50.0
"""What a small step takes beside its gradient, in counted operations: by itself, and for each parameter."""

FEWEST_AND_MOST = (32, 512)
"""Samples of a small step."""

FEW_PARAMS = 1000
"""The first rate is that of a model with as many parameters where there are fewer."""

CHECKED = 256
"""Samples that a stretch is checked with; a quarter of them where each has many predictions."""

PASSES = 4
"""How often a stretch may go through a batch."""


def _power_of_two(number: float, least: int, most: int) -> int:
    return min(max(1 << round(math.log2(max(number, 1.0))), least), most)
