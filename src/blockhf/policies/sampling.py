"""How many samples of a batch the gradient is taken from: arithmetic on numbers.

A sampling has a number in each step and is told afterwards what came of it. ``AllSamples`` takes what there
is. ``NoiseScale`` starts with a part and takes more as the gradient drowns in noise.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

from blockhf.policy import Policy, State


@dataclass(frozen=True)
class StepCost:
    """What a step used and what it saw of the noise.

    Attributes:
        num_samples: Samples of the gradient.
        signal: The slope along the directions on samples that the gradient has not seen, over that on its
            own: 1 without noise, 1/2 where there is as much noise as signal. ``None`` where it is unknown.
        rest: The cost of all else in the step, in gradients of one sample.
        population: How many samples there are in all; infinity where they are new at each step.
        growing: How much of the rest is curvature, which is taken from as many samples as the gradient, but
            at most from ``full``.
        full: The most samples of the curvature.
    """

    num_samples: int
    signal: float | None
    rest: float
    population: float = math.inf
    growing: float = 0.0
    full: float = 0.0

    def price(self, number: float) -> float:
        """Of a step whose gradient takes so many samples."""
        share = min(number, self.full) / min(self.num_samples, self.full) if self.growing else 0.0
        return number + self.rest - self.growing + self.growing * share


class Sampling(Policy):
    """Chooses the size of the gradient's sample."""

    @property
    def needs_signal(self) -> bool:
        """Whether it asks for the noise that held-out samples show.

        Where nothing is held out, such a sampling takes the whole batch.
        """
        return False

    @abc.abstractmethod
    def size(self, num_available: int, state: State) -> int:
        """How many samples of so many to take."""

    def update(self, cost: StepCost, state: State) -> None:
        """Learn from what a step used and saw; ``state`` is what the sampling keeps."""
        return


@dataclass(frozen=True)
class AllSamples(Sampling):
    """The whole batch; the paper's choice."""

    def size(self, num_available: int, state: State) -> int:
        return num_available


@dataclass(frozen=True)
class NoiseScale(Sampling):
    r"""As many samples as buy the most progress for their price.

    With ``n`` samples the share :math:`n / (n + n_0)` of a step is signal, where :math:`n_0` is the noise
    scale: with so many samples there is as much noise as signal. If all else in a step costs as much as the
    gradients of ``m`` samples, then progress over price, :math:`n / ((n + n_0)(n + m))`, is largest at
    :math:`n = \sqrt{n_0 m}`. The noise scale is small at first and grows as the loss nears its minimum.
    While curvature is taken from all of the gradient's samples, its cost grows with them, and ``m`` is the
    rest over what one more sample costs; of the two optima the better one is taken.

    Of a finite set of ``N`` samples, ``n`` have the noise :math:`n_0 (1/n - 1/N)`, and those left out lean
    the other way: the signal on them is :math:`(1 - n_0/N) / (1 + n_0 (1/n - 1/N))`. Progress over price is
    then largest at :math:`n = \sqrt{n_0 m / (1 - n_0/N)}`, or for :math:`n_0 \ge N` with all samples.

    Args:
        start: How many samples the first step takes: a number, or below 1 a share of the batch.
        least: The fewest, likewise.
        change: The size changes at most by this factor from step to step.
        memory: The weight of the past in the average of :math:`\log n_0`.

    >>> sampling, state = NoiseScale(), {}
    >>> sampling.size(4096, state)
    256
    >>> sampling.update(StepCost(num_samples=256, signal=0.5, rest=4096), state)
    >>> sampling.size(4096, state)  # the square root of 256 times 4096
    1024
    """

    start: float = 256
    least: float = 256
    change: float = 4.0
    memory: float = 0.5

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("least", self.least)):
            if not 0 < value < math.inf:
                raise ValueError(
                    f"{name} is {value}, but must be a positive number, or below 1 a share of the batch."
                )
        if self.change <= 1:
            raise ValueError(f"change is {self.change}, but must be above 1.")
        if not 0 <= self.memory < 1:
            raise ValueError(f"memory is {self.memory}, but must be at least 0 and below 1.")

    @property
    def needs_signal(self) -> bool:
        return True

    def size(self, num_available: int, state: State) -> int:
        start, least = (
            number * num_available if number < 1 else number for number in (self.start, self.least)
        )
        return min(max(_coarse(state.get("size", start)), math.ceil(least)), num_available)

    def update(self, cost: StepCost, state: State) -> None:
        if cost.signal is None or not math.isfinite(cost.signal):
            return
        signal = min(max(cost.signal, 0.02), 0.98)
        taken = cost.num_samples / cost.population
        scale = math.log(cost.num_samples * (1 - signal) / (signal * (1 - taken) + taken))
        known = state.get("log_scale")
        state["log_scale"] = scale if known is None else self.memory * known + (1 - self.memory) * scale
        noise = math.exp(state["log_scale"])
        excess = max(1 - noise / cost.population, 1e-9)

        def rate(number: float) -> float:
            """Progress over price."""
            return number / ((number * excess + noise) * cost.price(number))

        slowest, fastest = cost.num_samples / self.change, cost.num_samples * self.change
        found = [
            _between(
                slowest, math.sqrt(noise * max(cost.price(cost.full) - cost.full, 1.0) / excess), fastest
            )
        ]
        if cost.growing > 0:
            each = 1 + cost.growing / min(cost.num_samples, cost.full)
            few = math.sqrt(noise * max(cost.rest - cost.growing, 1.0) / (each * excess))
            found = [_between(cost.full, found[0], fastest), _between(slowest, few, cost.full)]
        state["size"] = _between(slowest, max(found, key=rate), fastest)


def _between(least: float, number: float, most: float) -> float:
    return min(max(number, least), most)


def _coarse(number: float) -> int:
    """A whole number of at most five binary digits before its zeros, and at least 1.

    Sizes that come again spare what is done anew for each: counting operations, compiling the user's model.

    >>> [_coarse(number) for number in (0.2, 30.6, 33.4, 1000, 5949)]
    [1, 31, 34, 992, 5888]
    """
    step = 1 << max(math.floor(math.log2(max(number, 1))) - 4, 0)
    return max(round(number / step) * step, 1)
