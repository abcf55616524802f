"""Parts of the default method, each of which ``without=`` leaves out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from blockhf import (
    AdamWalk,
    AllSamples,
    ByCoefficient,
    Identity,
    NoiseScale,
    NoWalk,
    Precondition,
    Subspace,
)
from blockhf.policies import Stretch
from blockhf.policy import State


@dataclass(frozen=True)
class FixedRate(AdamWalk):
    """A walk whose rate stays what it was at first; samples and lengths of stretches adapt as ever."""

    def update(self, stretch: Stretch, rate: float, judged: Any, state: State, **rest: bool) -> None:
        super().update(stretch, rate, judged, state, **rest)
        state["rate"] = rate


@dataclass(frozen=True)
class NeverBack(AdamWalk):
    """A walk that goes on where a stretch led uphill, as after one that was just too far.

    A stretch to a loss that is not finite is undone nevertheless.
    """

    def judge(self, before: float, half: float, after: float) -> tuple[bool, float]:
        taken, factor = super().judge(before, half, after)
        return (taken, factor) if taken or not math.isfinite(half + after) else (True, 0.2)


WITHOUT: Mapping[str, Callable[[], dict[str, Any]]] = {
    "rotations": lambda: {"walk": AdamWalk(rotation=0.0)},
    "averages": lambda: {"walk": AdamWalk(averages=False)},
    "growth": lambda: {"walk": AdamWalk(max_samples=1)},
    "rate": lambda: {"walk": FixedRate()},
    "undoing": lambda: {"walk": NeverBack()},
    "trials": lambda: {"walk": AdamWalk(slow=0.0)},
    "exact": lambda: {"sampling": NoiseScale()},
    "second-order": lambda: {"walk": AdamWalk(slow=0.0), "sampling": NoiseScale()},
    "walk": lambda: {"walk": NoWalk()},
    "held-out": lambda: {"search": Subspace(held_out=0.0)},
    "momentum": lambda: {"search": Subspace(momentum=False)},
    "preconditioner": lambda: {"preconditioner": Identity()},
    "cg": lambda: {"solver": Precondition()},
    "sampling": lambda: {"sampling": AllSamples()},
    "adaptation": lambda: {"damping": ByCoefficient().initial},
    "population": lambda: {"population": None},
}
"""Parts of the default method, and what it has in their place without them.

Small steps keep their first number of samples where ``max_samples`` is below it. Exact solutions, for a batch
that comes again, end where any of sampling, search, solver and damping is chosen by hand, so also without
``held-out``, ``momentum``, ``cg`` and ``adaptation``.
"""
