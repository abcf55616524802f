"""How many samples of a batch the gradient is taken from: arithmetic on numbers.

A sampling has a number in each step and is told afterwards what came of it. ``AllSamples`` takes what there
is. ``NoiseScale`` starts with a part and takes more as the gradient drowns in noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Spent:
    """What a step used and what it saw of the noise.

    Attributes:
        num_samples: Samples of the gradient.
        signal: The slope along the directions on samples that the gradient has not seen, over that on its
            own: 1 without noise, 1/2 where there is as much noise as signal. ``None`` where it is unknown.
        rest: The cost of all else in the step, in gradients of one sample.
        population: How many samples there are in all; infinity where they are new at each step.
    """

    num_samples: int
    signal: float | None
    rest: float
    population: float = math.inf


class Sampling(Protocol):
    """Chooses the size of the gradient's sample.

    One with a true ``needs_signal`` is asked only where samples are held out, on which the noise can be seen;
    elsewhere the whole batch is taken.
    """

    def size(self, num_available: int) -> int: ...

    def update(self, spent: Spent) -> None: ...


@dataclass(frozen=True)
class AllSamples:
    """The whole batch; the paper's choice."""

    def size(self, num_available: int) -> int:
        return num_available

    def update(self, spent: Spent) -> None:
        pass


class NoiseScale:
    r"""As many samples as buy the most progress for their price.

    With ``n`` samples the share :math:`n / (n + n_0)` of a step is signal, where :math:`n_0` is the noise
    scale: with so many samples there is as much noise as signal. If all else in a step costs as much as the
    gradients of ``m`` samples, then progress over price, :math:`n / ((n + n_0)(n + m))`, is largest at
    :math:`n = \sqrt{n_0 m}`. The noise scale is small at first and grows as the loss nears its minimum.

    Of a finite set of ``N`` samples, ``n`` have the noise :math:`n_0 (1/n - 1/N)`, and those left out lean
    the other way: the signal on them is :math:`(1 - n_0/N) / (1 + n_0 (1/n - 1/N))`. Progress over price is
    then largest at :math:`n = \sqrt{n_0 m / (1 - n_0/N)}`, or for :math:`n_0 \ge N` with all samples.

    Args:
        start: The share of the batch in the first step.
        least: The least share.
        change: The size changes at most by this factor from step to step.
        memory: The weight of the past in the average of :math:`\log n_0`.

    >>> sampling = NoiseScale(start=0.25)
    >>> sampling.size(4096)
    1024
    >>> sampling.update(Spent(num_samples=1024, signal=0.5, rest=4096))
    >>> sampling.size(4096)  # the square root of 1024 times 4096 is 2048, but not all at once
    1536
    """

    needs_signal = True

    def __init__(
        self, *, start: float = 0.1, least: float = 0.05, change: float = 1.5, memory: float = 0.8
    ) -> None:
        if not 0 < least <= start <= 1:
            raise ValueError(f"start is {start}, but must be at least {least}, the least, and at most 1.")
        if change <= 1:
            raise ValueError(f"change is {change}, but must be above 1.")
        if not 0 <= memory < 1:
            raise ValueError(f"memory is {memory}, but must be at least 0 and below 1.")
        self.start, self.least, self.change, self.memory = start, least, change, memory
        self._size: float | None = None
        self._log_scale: float | None = None

    def size(self, num_available: int) -> int:
        wanted = self.start * num_available if self._size is None else self._size
        return min(max(_coarse(wanted), math.ceil(self.least * num_available)), num_available)

    def update(self, spent: Spent) -> None:
        if spent.signal is None or not math.isfinite(spent.signal):
            return
        signal = min(max(spent.signal, 0.02), 0.98)
        taken = spent.num_samples / spent.population
        scale = math.log(spent.num_samples * (1 - signal) / (signal * (1 - taken) + taken))
        known = self._log_scale
        self._log_scale = scale if known is None else self.memory * known + (1 - self.memory) * scale
        noise = math.exp(self._log_scale)
        excess = max(1 - noise / spent.population, 1e-9)
        wanted = math.sqrt(noise * max(spent.rest, 1.0) / excess)
        slowest, fastest = spent.num_samples / self.change, spent.num_samples * self.change
        self._size = min(max(wanted, slowest), fastest)

    def state_dict(self) -> dict[str, Any]:
        return {"size": self._size, "log_scale": self._log_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._size, self._log_scale = state["size"], state["log_scale"]


def _coarse(number: float) -> int:
    """A whole number of at most five binary digits before its zeros, and at least 1.

    Sizes that come again spare what is done anew for each: counting operations, compiling the user's model.

    >>> [_coarse(number) for number in (0.2, 30.6, 33.4, 1000, 5949)]
    [1, 31, 34, 992, 5888]
    """
    step = 1 << max(math.floor(math.log2(max(number, 1))) - 4, 0)
    return max(round(number / step) * step, 1)
