"""Records of the default's variants as the tables of ``docs/arena.md``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockhf_lab import files
from blockhf_lab.arena import records, scores, tasks, tuned
from blockhf_lab.arena.records import Record
from blockhf_lab.arena.scores import Axis
from blockhf_lab.arena.variants import PLAIN, SAME, VARIANTS, Variant
from blockhf_lab.claims_page import fill
from blockhf_lab.tables import markdown

Table = tuple[list[str], list[list[str]]]


@dataclass(frozen=True)
class Variants:
    """Runs of variants, by task, variant and seed, with the targets that judge them."""

    runs: Mapping[tuple[str, str, int], Record]
    targets: Mapping[str, Sequence[float]]

    @classmethod
    def read(cls, folder: Path) -> Variants:
        """The records of a folder.

        Raises:
            ValueError: There are none.
        """
        found = {
            (record.task, record.stage, record.seed): record
            for record in records.read(folder)
            if record.task in tasks.TASKS and VARIANTS.get(record.stage, _NONE).optimizer == record.optimizer
        }
        if not found:
            raise ValueError(
                f"{folder} has no runs of variants. Make some with blockhf arena variants --out."
            )
        return cls(found, {name: tuned.targets(name) for name in tasks.TASKS})

    @property
    def places(self) -> list[tuple[str, int]]:
        """Tasks and seeds of which there are runs, in the order of the tasks."""
        names = list(tasks.TASKS)
        return sorted(
            {(task, seed) for task, _, seed in self.runs}, key=lambda own: (names.index(own[0]), own[1])
        )

    def known(self, *groups: str) -> list[Variant]:
        """The variants of these kinds of which there are runs."""
        present = {stage for _, stage, _ in self.runs}
        return [own for own in VARIANTS.values() if own.group in groups and own.name in present]

    def of(self, task: str, variant: str) -> list[Record]:
        """The runs of a variant on a task, seed by seed."""
        return [self.runs[own] for own in sorted(self.runs) if own[:2] == (task, variant)]


_NONE = Variant("", "", "", optimizer="")


def write(folder: Path, docs: Path) -> list[Path]:
    """Make the tables of a page anew."""
    files.write(docs, fill(docs.read_text(encoding="utf-8"), parts(Variants.read(folder))).encode())
    return [docs]


def parts(found: Variants) -> dict[str, str]:
    """What ``docs/arena.md`` holds between its markers."""
    return {
        "robustness": f"{markdown(*robustness(found))}\n\n{markdown(*updates(found))}",
        "ablation": markdown(*ablation(found)),
    }


# The loss scaled, and batches sorted


def robustness(found: Variants) -> Table:
    """For each change to how the default is given a task, how often updates stay what they were.

    A run is compared with the plain one of its seed, at each target that this one reached.
    """
    heads = [
        "change",
        "pairs",
        "same bits",
        "within 1 update",
        "within 20 %",
        "updates over plain",
        "not reached",
    ]
    rows = []
    for variant in found.known("scale", "sorted"):
        pairs = _pairs_with_plain(found, variant)
        ratios = [own / plain for plain, own, _ in pairs if own is not None]
        cells = [
            len(pairs),
            sum(is_same for *_, is_same in pairs),
            sum(own is not None and abs(own - plain) <= 1 for plain, own, _ in pairs),
            sum(1 / 1.2 <= ratio <= 1.2 for ratio in ratios),
            f"{min(ratios):.2f} to {max(ratios):.2f}, mean {mean(ratios):.2f}" if ratios else "–",
            len(pairs) - len(ratios),
        ]
        rows.append([variant.title, *map(str, cells)])
    return heads, rows


def _pairs_with_plain(found: Variants, variant: Variant) -> list[tuple[int, int | None, bool]]:
    """Updates of the plain run to a target, those of the variant, and whether the parameters are the same."""
    pairs = []
    for task, seed in found.places:
        plain, own = (found.runs.get((task, name, seed)) for name in (PLAIN, variant.name))
        if plain is None or own is None:
            continue
        for target in found.targets[task]:
            if (before := _reached(plain, target)) is not None:
                after = _reached(own, target)
                pairs.append((before[0], None if after is None else after[0], before == after))
    return pairs


def _reached(run: Record, target: float) -> tuple[int, str] | None:
    """Updates and digest at the first evaluation at or below a target; a start is no update."""
    point = run.first(target)
    if point is None:
        return None
    place = list(run.points).index(point)
    return max(point.update, 1), run.digests[place] if run.digests else ""


def updates(found: Variants) -> Table:
    """Updates to each target, run by run."""
    variants = [VARIANTS[PLAIN], *found.known("scale", "sorted")]
    rows = []
    for task, seed in found.places:
        runs = [found.runs.get((task, variant.name, seed)) for variant in variants]
        if any(run is not None for run in runs[1:]):
            rows.append([task, str(seed), *(_updates(run, found.targets[task]) for run in runs)])
    return ["task", "seed", *(variant.name for variant in variants)], rows


def _updates(run: Record | None, targets: Sequence[float]) -> str:
    if run is None:
        return ""
    points = [run.first(target) for target in targets]
    return " / ".join("–" if point is None else str(point.update) for point in points)


# Parts left out


def ablation(found: Variants) -> Table:
    """For each part of the default its cost without it, over that with it: the geometric mean over pairs.

    The first row leaves out nothing: with the loss times a power of two the run is the same, so that what its
    cost differs by is chance.
    """
    heads = [
        "without",
        "solved by both",
        "lost",
        "gained",
        "CPU seconds",
        "to each target",
        "GE",
        "most on",
        "least on",
    ]
    rows = []
    for variant in [*(own for own in found.known("scale") if own.name == SAME), *found.known("ablation")]:
        seconds, ge = (_costs(found, variant, axis) for axis in ("seconds", "ge"))
        both = _ratios(seconds)
        by_level = [mean([own for (_, place), own in both.items() if place == level]) for level in range(3)]
        names = {task for task, _ in both}
        by_task = sorted(
            (mean([own for (name, _), own in both.items() if name == task]), task) for task in names
        )
        rows.append(
            [
                "nothing" if variant.name == SAME else variant.title,
                str(len(both)),
                str(sum(_is_cost(base) and not _is_cost(own) for base, own in seconds.values())),
                str(sum(_is_cost(own) and not _is_cost(base) for base, own in seconds.values())),
                _shown(mean(list(both.values()))),
                " / ".join(map(_shown, by_level)),
                _shown(mean(list(_ratios(ge).values()))),
                *(
                    f"{task} {_shown(ratio)}".strip()
                    for ratio, task in (by_task[-1:] + by_task[:1] or [(math.nan, "")] * 2)
                ),
            ]
        )
    return heads, rows


def _ratios(costs: Mapping[tuple[str, int], tuple[float, float]]) -> dict[tuple[str, int], float]:
    """The cost without over that with it, where both got there."""
    return {key: own / base for key, (base, own) in costs.items() if _is_cost(base) and _is_cost(own)}


def _costs(found: Variants, variant: Variant, axis: Axis) -> dict[tuple[str, int], tuple[float, float]]:
    """For each task and number of a target the cost of what it is compared with, and its own."""
    costs = {}
    for task in tasks.TASKS:
        base, own = found.of(task, variant.base), found.of(task, variant.name)
        for level, target in enumerate(found.targets[task] if base and own else ()):
            costs[task, level] = (scores.cost(base, target, axis), scores.cost(own, target, axis))
    return costs


def _is_cost(value: float) -> bool:
    return 0 < value < math.inf


def _shown(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def mean(ratios: Sequence[float]) -> float:
    """Their geometric mean; not a number where there are none.

    >>> mean([2.0, 0.5]), mean([])
    (1.0, nan)
    """
    return statistics.geometric_mean(ratios) if ratios else math.nan
