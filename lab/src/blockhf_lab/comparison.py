"""Several runs of a task side by side: their curves, and when each reached the targets.

A comparison is a small JSON file with the evaluated points of each run, enough to draw all figures again.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blockhf_lab import files, runs
from blockhf_lab.optimizers import Spec

AXES: Mapping[str, str] = {"update": "updates", "ge": "gradient-equivalents", "seconds": "seconds in updates"}
"""What curves are drawn against: key of a point to the words for it."""

_FORMAT = 1
_MEMORY = ("peak_bytes", "state_bytes")
Point = dict[str, float | None]
_SHAPE: files.Shape = {
    "format": int,
    **dict.fromkeys(("task", "preset"), str),
    "settings": {"title": str, "large_batch": int, "metric": str, "targets": [float]},
    "budgets": [str],
    "environments": [dict],
    "entries": [
        {
            **dict.fromkeys(("optimizer", "status"), str),
            "seed": int,
            "points": [{**dict.fromkeys(AXES, float), "train_loss": (float, None), ...: (float, None)}],
            "num_cg?": (float, None),
        }
    ],
}


@dataclass(frozen=True)
class Entry:
    """A run in a comparison.

    Attributes:
        optimizer: Its spec.
        seed: Its seed.
        status: How it ended; ``"unfinished"`` if it has not.
        points: Where it was evaluated: ``update``, ``epoch``, ``ge``, ``seconds`` and the metrics, and
            ``peak_bytes`` and ``state_bytes`` where they were measured. The last is where it ended.
        num_cg: CG iterations of an update, the median, if there are any.
    """

    optimizer: str
    seed: int
    status: str
    points: Sequence[Point]
    num_cg: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Runs of one task at one preset.

    Attributes:
        task: The task.
        preset: Its size.
        settings: Of the task, as in the runs' configs.
        budgets: Of the runs.
        environments: Where they ran, without repetitions.
        entries: The runs.
    """

    task: str
    preset: str
    settings: Mapping[str, Any]
    budgets: Sequence[str]
    environments: Sequence[Mapping[str, Any]]
    entries: Sequence[Entry]

    @property
    def test_key(self) -> str:
        return f"test_{self.settings['metric']}"

    def methods(self) -> list[tuple[Spec, list[Entry]]]:
        """The runs of each optimizer, over the seeds: BlockHF, the paper's recipe, then the others."""
        by_text: dict[str, list[Entry]] = {}
        for entry in self.entries:
            by_text.setdefault(str(Spec.parse(entry.optimizer)), []).append(entry)
        specs = sorted(map(Spec.parse, by_text), key=_rank)
        return [(spec, sorted(by_text[str(spec)], key=lambda entry: entry.seed)) for spec in specs]

    def to_json(self) -> bytes:
        return files.to_json({"format": _FORMAT, **asdict(self)})

    @classmethod
    def read(cls, path: Path) -> Comparison:
        """A comparison out of its file.

        Raises:
            ValueError: It is something else.
        """
        found = files.read_json(path)
        try:
            files.expect(found, _SHAPE)
            if found.pop("format") != _FORMAT:
                raise ValueError("its format is another")
            entries = [Entry(**entry) for entry in found.pop("entries")]
            compared = cls(**found, entries=entries)
            compared.check()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is no comparison ({error}). Make it with blockhf compare.") from error
        return compared

    def check(self) -> None:
        """Raise where something is in it that cannot be shown."""
        if self.settings["metric"] not in ("loss", "accuracy", "error"):
            raise ValueError(
                f"its metric is {self.settings['metric']!r}, but must be loss, accuracy or error"
            )
        for entry in self.entries:
            Spec.parse(entry.optimizer)
            if not entry.points:
                raise ValueError(f"{entry.optimizer}, seed {entry.seed}, has no evaluation")
            if missing := [point["update"] for point in entry.points if self.test_key not in point]:
                raise ValueError(
                    f"{entry.optimizer}, seed {entry.seed}, has no {self.test_key} at update {missing[0]}"
                )


def collect(folders: Sequence[Path]) -> list[Comparison]:
    """The runs in and below some folders, one comparison for each task and preset."""
    found: dict[tuple[str, str], list[Path]] = {}
    configs = {}
    for folder in runs.find(list(folders)):
        config = configs[folder] = runs.read_config(folder)
        found.setdefault((config["task"], config["preset"]), []).append(folder)
    comparisons = []
    for (task, preset), members in found.items():
        settings = configs[members[0]]["settings"]
        for folder in members:
            if configs[folder]["settings"] != settings:
                raise ValueError(
                    f"{folder} and {members[0]} have different settings of {task} and cannot be compared."
                )
        compared = Comparison(
            task,
            preset,
            settings,
            sorted({configs[folder]["budget"] for folder in members}),
            _environments(members),
            [entry for folder in members if (entry := _entry(folder, configs[folder])) is not None],
        )
        try:
            compared.check()
        except ValueError as error:
            raise ValueError(
                f"The runs of {task} in {members[0].parent} cannot be shown: {error}."
            ) from error
        comparisons.append(compared)
    return comparisons


def _entry(folder: Path, config: Mapping[str, Any]) -> Entry | None:
    records = runs.read_records(folder)
    if not records:
        return None
    status = runs.read_status(folder)
    iterations = [sum(record["report"]["cg"]) for record in records if "report" in record]
    points: list[Point] = [
        {
            **{key: record[key] for key in ("update", "epoch", "ge", "seconds")},
            **{key: record[key] for key in _MEMORY if key in record},
            **record["evaluation"],
        }
        for record in records
        if "evaluation" in record
    ]
    return Entry(
        config["optimizer"],
        config["seed"],
        status,
        points,
        statistics.median(iterations) if iterations else None,
    )


def _environments(folders: Sequence[Path]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for folder in folders:
        for environment in runs.read_environments(folder):
            own = ("started", "from_update", "notice")
            bare = {key: value for key, value in environment.items() if key not in own}
            if bare not in found:
                found.append(bare)
    return found


def _rank(spec: Spec) -> tuple[Any, ...]:
    kinds = ("blockhf", "paper", "hf")
    numbers = [
        (key, -value if isinstance(value, (int, float)) else 0.0) for key, value in spec.options.items()
    ]
    return kinds.index(spec.name) if spec.name in kinds else len(kinds), spec.name, numbers, str(spec)


# Targets


def first(entry: Entry, key: str, reached: Callable[[float], bool]) -> Point | None:
    """The first point of a run whose metric is good enough."""
    for point in entry.points:
        value = point[key]
        if value is not None and reached(value):
            return point
    return None


@dataclass(frozen=True)
class Cost:
    """What an optimizer spent, the median over its seeds; none where most did not get there.

    Attributes:
        update: Updates.
        ge: Gradient-equivalents.
        seconds: Seconds in updates.
        peak_bytes: The most memory that an update had until then, beyond what was there before the run; none
            also where it was not measured.
        state_bytes: What the optimizer keeps from one update to the next, likewise.
    """

    update: float | None
    ge: float | None
    seconds: float | None
    peak_bytes: float | None = None
    state_bytes: float | None = None


def reached(comparison: Comparison, entries: Sequence[Entry], target: float) -> Cost:
    """When runs of one optimizer reached a target."""
    is_good: Callable[[float], bool] = (
        (lambda value: value >= target)
        if comparison.settings["metric"] == "accuracy"
        else (lambda value: value <= target)
    )
    return cost(entries, comparison.test_key, is_good)


def cost(entries: Sequence[Entry], key: str, is_good: Callable[[float], bool]) -> Cost:
    """What runs spent until a metric was good enough."""
    points = [first(entry, key, is_good) for entry in entries]
    return _cost(points)


def _cost(points: Sequence[Point | None]) -> Cost:
    return Cost(
        *(
            _median([None if point is None else point.get(key) for point in points])
            for key in (*AXES, *_MEMORY)
        )
    )


def _median(values: Sequence[float | None]) -> float | None:
    """The median, where ``None`` is more than any number."""
    found = statistics.median_high([math.inf if value is None else value for value in values])
    return found if math.isfinite(found) else None


@dataclass(frozen=True)
class Summary:
    """An optimizer's line in the table; numbers are medians over the seeds.

    Attributes:
        spec: The optimizer.
        seeds: How many runs there are.
        statuses: How they ended.
        total: Cost until the end.
        train: The train loss at the end.
        best: The best value of the test metric.
        targets: Cost until each target was reached.
    """

    spec: Spec
    seeds: int
    statuses: Sequence[str]
    total: Cost
    train: float | None
    best: float | None
    targets: Sequence[Cost]


def summaries(comparison: Comparison) -> list[Summary]:
    """The lines of the table."""
    best = max if comparison.settings["metric"] == "accuracy" else min
    lines = []
    for spec, entries in comparison.methods():
        ends = [entry.points[-1] for entry in entries]
        tests = [
            [value for point in entry.points if (value := point[comparison.test_key]) is not None]
            for entry in entries
        ]
        lines.append(
            Summary(
                spec,
                len(entries),
                sorted({entry.status for entry in entries}),
                _cost(ends),
                train=_median([end["train_loss"] for end in ends]),
                best=_median([best(values) if values else None for values in tests]),
                targets=[reached(comparison, entries, target) for target in comparison.settings["targets"]],
            )
        )
    return lines


# Curves


@dataclass(frozen=True)
class Curve:
    """A metric of an optimizer along an axis: median and range over the seeds."""

    label: str
    along: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def by_update(
    entries: Sequence[Entry], key: str, axis: str = "update"
) -> dict[float, list[tuple[float, float]]]:
    """For each evaluated update, in order, the runs' places along the axis and their values."""
    found: dict[float, list[tuple[float, float]]] = {}
    for entry in entries:
        for point in entry.points:
            update, along, value = point["update"], point[axis], point[key]
            if update is not None and along is not None and value is not None:
                found.setdefault(update, []).append((along, value))
    return dict(sorted(found.items()))


def curve(spec: Spec, entries: Sequence[Entry], key: str, axis: str) -> Curve:
    """The curve over the seeds, at those updates that at least half of them have in common."""
    places = [own for own in by_update(entries, key, axis).values() if 2 * len(own) >= len(entries)]
    values = [[value for _, value in place] for place in places]
    places_along = [statistics.median(where for where, _ in place) for place in places]
    return Curve(
        spec.label,
        # Seeds end at different places; a median over fewer of them must not lead back.
        list(itertools.accumulate(places_along, max)),
        [statistics.median(value) for value in values],
        [min(value) for value in values],
        [max(value) for value in values],
    )
