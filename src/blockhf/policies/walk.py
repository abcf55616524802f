"""Whether a run opens with a walk, in many small steps by the gradient alone: arithmetic on numbers.

Far from a minimum the gradient of a few samples is as good as that of many, and curvature is not worth its
price. So ``AdamWalk`` has small steps for as long as they pay. ``NoWalk`` has none.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
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
        num_checked: Samples on which the loss before and after is compared, perhaps of several batches.
        most_samples: The most that a small step may have.
        rotation: What the rotations of a small step may cost, in counted operations.
        is_set: Whether all samples come again, so that their own loss counts: those that it is compared on
            may then be walked on too.
        is_part: Whether it goes over several batches: these small steps are a part of it.
        ends: Whether the last one is to be checked, before any small step.
    """

    num_steps: int
    num_samples: int
    num_checked: int
    most_samples: int = 0
    rotation: float = 0.0
    is_set: bool = False
    is_part: bool = False
    ends: bool = False


class Walk(Policy):
    """How a run opens."""

    @abc.abstractmethod
    def stretch(
        self,
        num_available: int,
        forward: float,
        num_params: int,
        positions: int,
        state: State,
        *,
        again: bool = False,
        joins: bool = False,
    ) -> Stretch | None:
        """The next part of the walk; none where it is over, or where there are too few samples.

        Args:
            num_available: Samples of the batch.
            forward: Counted operations of a forward pass over a sample.
            num_params: Parameters.
            positions: Predictions of a sample.
            state: What the policy keeps.
            again: Whether these samples were there before, as those of a set that is trained on.
            joins: Whether batches are new ones, so that a stretch may go over several.
        """


@dataclass(frozen=True)
class NoWalk(Walk):
    """With Gauss-Newton steps from the first; the paper's choice."""

    def stretch(
        self,
        num_available: int,
        forward: float,
        num_params: int,
        positions: int,
        state: State,
        *,
        again: bool = False,
        joins: bool = False,
    ) -> Stretch | None:
        return None


@dataclass(frozen=True)
class AdamWalk(Walk):
    r"""With steps of Adam (Kingma and Ba, 2015), at a rate and of sizes that adapt, for as long as they pay.

    Each matrix is turned into the eigenvectors of its gradients' second moments (SOAP, Vyas et al., 2024)
    where that is cheap beside the gradient (``blockhf.rotation``).

    Samples of no small step tell the loss at the start of a stretch, halfway and at its end. A parabola
    through the three has its lowest point at ``t`` times the stretch. Above 1.2 the rate grows by ``t``, at
    most by ``rise``. Where both ends have the same loss and the middle is lower, ``t`` is 1/2: then the steps
    go to and fro by noise. So below 0.6 small steps take twice the samples. Below 0.4, which is too far, the
    rate falls by ``change``. Where they have the most samples already and their mean gains little, it falls
    too, and stretches grow as much. Below 0, or where the loss only rises, the stretch is undone, and the
    rate halved.

    Where batches are too small for a stretch, it goes over several of them, and the next ones tell the loss.

    What the walk shows are averages: of the small steps at the end, those of the stretch's second half, and
    halfway between these and what it showed before, the parameters with the lowest loss on those samples.

    Once a walk has lowered the loss by less than the share ``slow`` of it while its cost doubled, or by two
    thirds of that in four full stretches, some Gauss-Newton steps are tried. Where they gain more for their
    cost than the share ``enough`` of what the last four stretches did, the walk is over for good. Else it
    goes on from where it was, for several times their cost. The share is below 1 as what a long walk leaves
    over is hard for Gauss-Newton steps too.

    Args:
        length: Of the first small steps, over all parameters: it is the rate times the root of their number,
            which counts as 1,000 at the least.
        betas: Weights of the past in the averages of gradients and of their squares.
        first_steps: Small steps of the first stretch; each has two fifths more than the one before.
        max_steps: The most small steps in a stretch.
        rise: By what the rate grows at the most.
        change: By what the rate falls.
        max_samples: The most samples of a small step.
        rotation: What the rotations may cost, in gradients; 0 for none.
        averages: Whether it shows averages where their loss is lower.
        slow: The share of the loss that must be gained while the cost doubles, or Gauss-Newton steps are
            tried.
        trials: How many of them; the first, which damping has not yet adapted to, does not count.
        enough: What they have to gain for their cost, in what the walk gains for its own.
        damping: What damping is multiplied by for these: near a minimum less of it will do.

    >>> walk = AdamWalk()
    >>> walk.judge(4.0, 2.0, 1.0)  # the parabola is lowest at 1.25: on, and faster
    (True, 1.25)
    >>> walk.judge(4.0, 2.0, 4.0)[0], walk.judge(4.0, 5.0, 6.0)
    (True, (False, 0.5))
    """

    length: float = 1.0
    betas: tuple[float, float] = (0.9, 0.99)
    first_steps: int = 5
    max_steps: int = 50
    rise: float = 2.5
    change: float = 1.5
    max_samples: int = 4096
    rotation: float = 1.0
    averages: bool = True
    slow: float = 0.15
    trials: int = 4
    enough: float = 2 / 3
    damping: float = 0.03

    def __post_init__(self) -> None:
        if not 0 < self.length < math.inf:
            raise ValueError(f"length is {self.length}, but must be above 0.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas is {self.betas}, but must be two numbers of at least 0 and below 1.")
        if not 2 <= self.first_steps <= self.max_steps:
            raise ValueError(
                f"first_steps is {self.first_steps} and max_steps is {self.max_steps}, but must be at least "
                "2, and the second at least the first."
            )
        for name, value in (("change", self.change), ("rise", self.rise)):
            if not 1 < value < math.inf:
                raise ValueError(f"{name} is {value}, but must be above 1.")
        for name, value in (("max_samples", self.max_samples), ("trials", self.trials - 1)):
            if value < 1:
                raise ValueError(
                    f"{name} is {vars(self)[name]}, but must be above {vars(self)[name] - value}."
                )
        for name, value in (("rotation", self.rotation), ("slow", self.slow)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}, but must be at least 0.")
        if not 0 < self.enough < math.inf:
            raise ValueError(f"enough is {self.enough}, but must be above 0.")
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping is {self.damping}, but must be above 0 and at most 1.")

    def stretch(
        self,
        num_available: int,
        forward: float,
        num_params: int,
        positions: int,
        state: State,
        *,
        again: bool = False,
        joins: bool = False,
    ) -> Stretch | None:
        if state.get("is_over", False) or self.is_trying(state):
            return None
        # A small step has as many samples as make its gradient cost no less than all else in it.
        least = _power_of_two(besides(num_params) / max(GRADIENT * forward, 1.0), *FEWEST_AND_MOST)
        wanted, taken = int(state.get("num_steps", self.first_steps)), int(state.get("num_taken", 0))
        number = min(int(state.get("num_samples", least)), num_available)
        passes = PASSES_OF_A_SET if again else PASSES
        # Few samples tell the loss of a stretch that has few; each new number of them has to be counted once.
        is_short = wanted * min(number, passes * num_available // FEWEST_STEPS) < 4 * CHECKED
        full = max(CHECKED, wanted * number // CHECKED_SHARE)
        most_checked, fewest = (CHECKED / 8, CHECKED / 16) if is_short else (full, CHECKED / 4)
        num_checked = min(math.ceil(max(most_checked / math.sqrt(positions), fewest)), num_available // 4)
        left = num_available if again else num_available - num_checked
        rotation = self.rotation * GRADIENT * forward * least
        if joins and (taken > 0 or wanted * number > passes * left):
            most, wide = min(self.max_samples, num_available), min(4 * num_checked, full, num_available)
            num_checked = max(wide, math.ceil(min(4 * most_checked, full) / math.sqrt(positions)))
            num_steps = min(wanted - taken, num_available // number)
            return Stretch(num_steps, number, num_checked, most, rotation, is_part=True, ends=taken >= wanted)
        if PASSES * left < FEWEST_STEPS * FEWEST_AND_MOST[0]:
            return None
        least = min(least, 1 << min(passes * left // FEWEST_STEPS, left).bit_length() - 1)
        most = max(min(self.max_samples, left * passes // FEWEST_STEPS, left // 4), least)
        number = min(int(state.get("num_samples", least)), most)
        num_steps = min(wanted, passes * (left // number))
        return Stretch(num_steps, number, num_checked, most, rotation, again)

    def rate_of(self, num_params: int, state: State) -> float:
        """The rate of the next stretch."""
        return float(state.get("rate", self.length / math.sqrt(max(num_params, FEW_PARAMS))))

    def judge(self, before: float, half: float, after: float) -> tuple[bool, float]:
        """Whether to take a stretch, and by what to multiply the rate, from the losses along it."""
        if not math.isfinite(half + after):
            return False, 0.25
        if before == half == after:  # at a rate of zero, as schedulers have at first
            return True, 1.0
        if half >= before and after > before:  # noise has its middle below its ends
            return False, 0.5
        bend = 2 * (before + after - 2 * half)
        if bend <= 0:
            return (True, self.rise) if after < before else (False, 0.5)
        lowest = 0.5 * (1 + (before - after) / bend)
        if lowest < 0:
            return False, 0.5
        return True, min(lowest, self.rise) if lowest > 1.2 else 1.0 if lowest > 0.6 else max(lowest, 0.2)

    def gains(self, before: float, mean: float, after: float) -> bool:
        """Whether the mean of late small steps gains more than half of what noise has put onto the last."""
        return before - mean > (after - mean) / 2

    def update(
        self,
        stretch: Stretch,
        rate: float,
        judged: tuple[bool, float],
        state: State,
        *,
        gains: bool = False,
    ) -> None:
        """Change rate, samples and length of the next stretch, where this one ``gains`` in spite of noise."""
        taken, factor = judged
        number = stretch.num_samples
        most = max(int(state.get("num_steps", self.first_steps)), stretch.num_steps)
        num_steps = max(min(math.ceil(GROWTH * most), self.max_steps), most) if taken else most
        if taken and factor < 1:
            is_met = 2 * number <= stretch.most_samples  # by more samples
            number = 2 * number if is_met else number
            factor = 1.0 if factor > 0.4 and (is_met or gains) else 1 / self.change
            if factor < 1 and not is_met and most >= self.max_steps:
                num_steps = min(math.ceil(self.change * num_steps), LONGEST * self.max_steps)
        state.update(rate=rate * factor, num_samples=number, num_steps=num_steps, num_taken=0)

    def note_stretch(
        self,
        loss: float,
        gain: float,
        cost: float,
        num_steps: int,
        state: State,
        *,
        is_enough: bool = True,
    ) -> None:
        """Take down what a stretch has gained, and see whether to try Gauss-Newton steps.

        Args:
            loss: At its end.
            gain: By how much it has lowered that.
            cost: In counted operations.
            num_steps: Its small steps.
            state: What the policy keeps.
            is_enough: Whether the batch has samples enough for them.
        """
        gains = [*state.get("gains", ()), [gain, cost, num_steps]]
        num_stretches = int(state.get("num_stretches", 0)) + 1
        walked, total = (float(state.get(name, 0.0)) + cost for name in ("walked", "total"))
        while len(gains) > WINDOW and sum(own for _, own, _ in gains[1:]) >= total / 2:
            gains = gains[1:]
        if len(gains) > MOST_KEPT:
            gains = [*_in_pairs(gains[:-WINDOW]), *gains[-WINDOW:]]
        state.update(gains=gains, walked=walked, total=total, num_stretches=num_stretches)
        is_slow = sum(own for own, *_ in gains) < self.slow * abs(loss)
        recent, steps = (sum(own) for own in list(zip(*gains[-WINDOW:], strict=True))[::2])
        is_slow |= recent < SLOW_NOW * self.slow * abs(loss) * steps / (WINDOW * self.max_steps)
        _, last = state.get("trial", (0.0, 0.0))
        if is_enough and is_slow and num_stretches >= 2 * WINDOW and walked >= PATIENCE * last:
            state.update(tried=[], walked=0.0)

    def is_trying(self, state: State) -> bool:
        """Whether Gauss-Newton steps are tried just now."""
        return "tried" in state

    def note_step(self, gain: float, cost: float, state: State) -> None:
        """Take down what a Gauss-Newton step has gained; the last of a trial decides."""
        if not self.is_trying(state):
            return
        tried = [*state["tried"], [gain, cost]]
        state["tried"] = tried
        if len(tried) >= self.trials:
            del state["tried"]
            pays, cost = _pays(tried[1:]), sum(own for _, own in tried)
            is_over = pays > self.enough * _pays(state["gains"][-WINDOW:])
            state.update(is_over=is_over, trial=[pays, cost])

    def direction(self, gradient: Tensor, mean: Tensor, square: Tensor, count: int) -> Tensor:
        """Of a small step; the averages move in place, and ``count`` is the number of the step from 1.

        It may be written into the gradient, which is not needed any more.
        """
        first, second = self.betas
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = math.sqrt(1 - second**count)
        root = torch.sqrt(square, out=gradient).add_(scale * torch.finfo(square.dtype).tiny ** 0.5)
        direction = torch.div(mean, root, out=root).mul_(-scale / (1 - first**count))
        # No gradients in a row can make it longer, but rotations that change between them can.
        longest = (1 - first) / math.sqrt((1 - second) * max(1 - first**2 / second, 1e-3)) if second else 1.0
        return direction.clamp_(-longest, longest)


SMALL_STEP, PER_PARAM = 4e7, 200.0
"""What a small step takes beside its gradient, in counted operations: by itself, and for each parameter."""

FEWEST_AND_MOST = (32, 512)
"""Samples of the first small steps."""

FEW_PARAMS = 1000
"""The first rate is that of a model with as many parameters where there are fewer."""

FEWEST_STEPS = 10
"""A batch with samples for fewer small steps is not walked on."""

CHECKED = 256
"""Samples that a long stretch is checked with; a quarter of them where each has many predictions."""

CHECKED_SHARE = 32
"""With one for so many of its small steps' samples, where these are more."""

PASSES, PASSES_OF_A_SET = 2, 16
"""How often a stretch may go through a batch, and through one that comes again."""

GROWTH = 1.4
"""By what stretches grow."""

LONGEST = 4
"""Stretches grow on as rates fall, up to so many times the usual length."""

ENOUGH = 1024
"""Gauss-Newton steps are tried on new batches of so many samples, each of which counts as the root of its
predictions: with fewer none tell how far they lead."""

WINDOW = 4
"""The fewest stretches over which gain and cost are added up."""

MOST_KEPT = 16
"""Stretches whose gain and cost are kept one by one; older ones are added up in pairs."""

SLOW_NOW = 2 / 3
"""Four full stretches that gain less than this part of ``slow`` are slow, whatever the walk has cost."""

PATIENCE = 5.0
"""A walk goes on for at least so many times the cost of the last trial of Gauss-Newton steps."""


def besides(num_params: int) -> float:
    """What a small step takes beside its gradient, in counted operations."""
    return SMALL_STEP + PER_PARAM * num_params


def _pays(gains: Sequence[Sequence[float]]) -> float:
    """What was gained for its cost."""
    return sum(gain for gain, *_ in gains) / max(sum(cost for _, cost, *_ in gains), 1.0)


def _in_pairs(gains: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[sum(own) for own in zip(*gains[at : at + 2], strict=True)] for at in range(0, len(gains), 2)]


def _power_of_two(number: float, least: int, most: int) -> int:
    return min(max(1 << round(math.log2(max(number, 1.0))), least), most)
