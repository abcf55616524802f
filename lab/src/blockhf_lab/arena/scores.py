"""What records say: the cost to each target, who was best, and performance profiles."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from blockhf_lab.arena import families, tasks
from blockhf_lab.arena.records import Record
from blockhf_lab.arena.training import Point

Axis = Literal["seconds", "ge", "update"]
AXES: Mapping[Axis, str] = {"seconds": "CPU seconds", "ge": "gradient-equivalents", "update": "updates"}
"""What costs are counted in."""


@dataclass(frozen=True)
class Pair:
    """A task and one of its targets, with what each family needed: infinite where it did not get there.

    A family that did not run has no cost; one that does not apply to the task is counted as not there.
    """

    task: str
    target: float
    costs: Mapping[str, float]

    @property
    def best(self) -> float:
        return min(self.costs.values(), default=math.inf)

    def ratio(self, family: str) -> float:
        """The cost of a family over that of the best; infinite where it did not get there."""
        own = self.costs.get(family, math.inf)
        return own / self.best if math.isfinite(own) else math.inf

    def ratio_to_peers(self, family: str) -> float:
        """The cost over that of the best other family; zero where no other one got there."""
        others = min((cost for name, cost in self.costs.items() if name != family), default=math.inf)
        own = self.costs.get(family, math.inf)
        return own / others if math.isfinite(own) else math.inf


def finals(
    found: Sequence[Record],
    settings: Mapping[str, Mapping[str, str]],
    names: Collection[str] = tasks.TASKS,
) -> list[Record]:
    """The final runs, of the tuned families those of the chosen setting."""
    return [
        record
        for record in found
        if record.stage == "final"
        and record.task in names
        and settings.get(record.task, {}).get(record.family, record.optimizer) == record.optimizer
    ]


def cost(runs: Sequence[Record], target: float, axis: Axis) -> float:
    """The median over the seeds of what was spent until the first evaluation at or below the target."""
    return statistics.median_high([_spent(run.first(target), axis) for run in runs])


def _spent(point: Point | None, axis: Axis) -> float:
    if point is None:
        return math.inf
    value = {"seconds": point.seconds, "ge": point.ge, "update": point.update}[axis]
    return math.inf if value is None else float(value)


def pairs(
    runs: Sequence[Record],
    targets: Mapping[str, Sequence[float]],
    axis: Axis,
    names: Collection[str] = tasks.TASKS,
) -> list[Pair]:
    """All pairs of tasks and targets. Where nothing is counted for a task (GE), it has no pairs."""
    found = []
    for name in names:
        own = [record for record in runs if record.task == name]
        by_family = {
            family: members
            for family in families.NAMES
            if (members := [record for record in own if record.family == family])
        }
        for target in targets.get(name, ()):
            costs = {family: cost(members, target, axis) for family, members in by_family.items()}
            if costs:
                found.append(Pair(name, target, costs))
    return found


def profile(found: Sequence[Pair], family: str, ratios: Sequence[float]) -> list[float]:
    """The share of pairs solved within each of these multiples of the best (Dolan & Moré, 2002).

    >>> pair = Pair("friedman", 0.1, {"Adam": 2.0, "Muon": 1.0})
    >>> profile([pair], "Adam", [1, 2]), profile([pair], "SOAP", [1, 2])
    ([0.0, 1.0], [0.0, 0.0])
    """
    own = [pair.ratio(family) for pair in found]
    return [sum(ratio <= most for ratio in own) / max(len(own), 1) for most in ratios]


def score(found: Sequence[Pair], family: str, most: float = 4.0) -> float:
    """The mean of the profile from 1 to ``most``, by the logarithm of the ratio: 1 is best on all pairs."""
    own = [1 - math.log(min(max(pair.ratio(family), 1.0), most)) / math.log(most) for pair in found]
    return sum(own) / max(len(own), 1)


@dataclass(frozen=True)
class Bars:
    """How the default stands to what it was set: shares of all pairs, by CPU seconds.

    Attributes:
        num_pairs: How many there are.
        within_two: Those on which it needs at most twice what the best peer does.
        best: Those on which it is the best.
        behind_kfac: Those on which K-FAC alone is more than 10 % better.
    """

    num_pairs: int
    within_two: int
    best: int
    behind_kfac: int


def bars(found: Sequence[Pair]) -> Bars:
    own = families.DEFAULT
    ratios = [pair.ratio_to_peers(own) for pair in found]
    behind = [
        pair.costs.get("K-FAC", math.inf) < pair.costs.get(own, math.inf) / 1.1
        for pair in found
        if own in pair.costs
    ]
    return Bars(
        len(found),
        sum(ratio <= 2 for ratio in ratios),
        sum(ratio <= 1 for ratio in ratios),
        sum(behind),
    )
