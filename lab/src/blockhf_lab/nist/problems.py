"""Read the problems, and count the digits of a solution."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from blockhf_lab.nist.models import MODELS

NAMES = tuple(MODELS)
"""The problems."""

MOST_DIGITS = 11.0
"""As many as the certified values have."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A problem.

    Attributes:
        name: As NIST has it.
        level: Of difficulty: lower, average or higher.
        starts: Two, the second nearer to the solution.
        certified: The parameters.
        squares: The certified sum of squared residuals.
        x: Places.
        y: Observations; of Nelson, their logarithms.
    """

    name: str
    level: str
    starts: Sequence[Sequence[float]]
    certified: Sequence[float]
    squares: float
    x: Tensor
    y: Tensor

    def residuals(self, params: Tensor) -> Tensor:
        """What the model is off."""
        return MODELS[self.name](params, self.x) - self.y


def load(name: str) -> Problem:
    """A problem by its name.

    >>> problem = load("Misra1a")
    >>> len(problem.y), problem.starts[0]
    (14, [500.0, 0.0001])
    """
    if name not in NAMES:
        raise ValueError(f"There is no problem {name!r}. There are {', '.join(NAMES)}.")
    found = _all()[name]
    x, y = (torch.tensor(found[key], dtype=torch.float64) for key in "xy")
    return Problem(
        name,
        found["level"],
        found["starts"],
        found["certified"],
        found["squares"],
        x,
        y.log() if name == "Nelson" else y,
    )


def digits(found: Sequence[float], certified: Sequence[float]) -> float:
    """How many digits all parameters have right: the least of -log₁₀ of their relative errors.

    >>> round(digits([1.0001, 2.0], [1.0, 2.0]), 6), digits([1.0, 2.0], [1.0, 2.0])
    (4.0, 11.0)
    """
    least = MOST_DIGITS
    for own, exact in zip(found, certified, strict=True):
        off = abs(own - exact) / abs(exact)
        if not math.isfinite(off):
            return 0.0
        if off > 0:
            least = min(least, -math.log10(off))
    return max(least, 0.0)


@functools.cache
def _all() -> dict[str, Any]:
    text = resources.files("blockhf_lab.nist").joinpath("problems.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found
