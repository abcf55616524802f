"""Records of runs: lines of JSON in one file for each task."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockhf_lab import files
from blockhf_lab.arena.families import family_of
from blockhf_lab.arena.training import Point

_SHAPE: files.Shape = {
    **dict.fromkeys(("task", "optimizer", "status", "stage"), str),
    "seed": int,
    "budget": float,
    "points": [list],
    "digests?": [str],
    ...: (str, float, None, dict),
}


@dataclass(frozen=True)
class Record:
    """A run.

    Attributes:
        task: Its task.
        optimizer: Its spec.
        family: The spec's family.
        stage: ``final``, or ``search`` and the share of the budget.
        seed: Its seed.
        budget: The CPU seconds it had.
        status: ``finished``, ``reached``, ``diverged``, or why it failed.
        points: Its evaluations; the first is before any update.
        test: The loss on samples that were not trained on, at the end.
        digests: Of the parameters at each evaluation, where they were taken.
    """

    task: str
    optimizer: str
    family: str
    stage: str
    seed: int
    budget: float
    status: str
    points: Sequence[Point]
    test: float | None = None
    digests: Sequence[str] = ()

    def first(self, target: float) -> Point | None:
        """The first evaluation at or below a target."""
        return next((point for point in self.points if point.loss <= target), None)

    def best(self, seconds: float = float("inf")) -> float:
        """The lowest loss within CPU seconds."""
        return min(point.loss for point in self.points if point.seconds <= seconds)


def append(folder: Path, record: Mapping[str, Any]) -> None:
    """Add a line with one write, so that several processes may."""
    folder.mkdir(parents=True, exist_ok=True)
    line = files.to_json(dict(record))
    handle = os.open(folder / f"{record['task']}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, line)
    finally:
        os.close(handle)


def read(folders: Path | Iterable[Path]) -> list[Record]:
    """All records in folders; of runs that were made twice the last."""
    found: dict[tuple[Any, ...], Record] = {}
    for folder in [folders] if isinstance(folders, Path) else folders:
        for path in sorted(folder.glob("*.jsonl")):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                record = _parsed(line, f"{path}, line {number}")
                found[record.task, record.optimizer, record.stage, record.seed] = record
    return list(found.values())


def _parsed(line: str, place: str) -> Record:
    try:
        own = json.loads(line)
        files.expect(own, _SHAPE)
        points = [
            Point(int(update), ge, seconds, float("inf") if loss is None else loss)
            for update, ge, seconds, loss in own["points"]
        ]
        family = family_of(own["optimizer"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}, is no record of the arena: {error}. Remove that line.") from error
    return Record(
        *(own["task"], own["optimizer"], family, own["stage"], own["seed"], own["budget"], own["status"]),
        points,
        own.get("test"),
        own.get("digests", ()),
    )
