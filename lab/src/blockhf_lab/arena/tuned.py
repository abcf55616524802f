"""Targets and chosen settings, fixed once from the peers' records and kept in ``tuned.json``.

``python -m blockhf_lab.arena.tuned FOLDER`` derives both: of each family the setting whose loss came lowest
in the search, and as targets what the best tuned peer reached after a tenth, a third and all of its budget
with seed 0, plus 1 %; each at most 95 % of the loss at the start and 5 % from the next.
``blockhf`` and K-FAC have no part in the targets.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockhf_lab import files
from blockhf_lab.arena import families, tasks
from blockhf_lab.arena.records import Record
from blockhf_lab.arena.records import read as read_records

FILE = Path(__file__).with_name("tuned.json")
SHARES = (0.1, 1 / 3, 1.0)
"""Of a peer's budget, after which its losses are the targets."""


@functools.cache
def read() -> dict[str, Any]:
    """For each task its targets, where they are from, and the setting of each family."""
    found: dict[str, Any] = files.read_json(FILE) if FILE.exists() else {}
    return found


def targets(task: str) -> list[float]:
    """The losses to reach, from the easiest on; none where they are not fixed yet."""
    found: list[float] = read().get(task, {}).get("targets", [])
    return found


def setting(task: str, family: str) -> str | None:
    """What the search chose; none where there was none."""
    found: str | None = read().get(task, {}).get("settings", {}).get(family)
    return found


def ranked(found: Sequence[Record], task: str, family: str, stage: str) -> list[Record]:
    """The runs of a family in a round of the search, the lowest loss first."""
    own = (task, family, stage)
    return sorted(
        (record for record in found if (record.task, record.family, record.stage) == own), key=_final
    )


def choose(found: Sequence[Record], stage: str) -> dict[str, dict[str, str]]:
    """For each task and family the setting whose loss came lowest in a round of the search."""
    chosen: dict[str, dict[str, str]] = {}
    for task, family in sorted({(record.task, record.family) for record in found}):
        if best := ranked(found, task, family, stage)[:1]:
            own = chosen.setdefault(task, {})
            own[family] = best[0].optimizer
            for other, same in families.SHARED.items():
                if same == family:
                    own[other] = best[0].optimizer.replace(same.lower(), other.lower())
    return chosen


def derive(found: Sequence[Record], stage: str, names: Iterable[str] = tasks.TASKS) -> dict[str, Any]:
    """Settings and targets of those of the tasks whose peers are on record."""
    result: dict[str, Any] = {}
    for task, settings in choose(found, stage).items():
        peers = [
            record
            for record in found
            if record.task == task
            and (record.stage, record.seed) == ("final", 0)
            and record.family not in (families.DEFAULT, "K-FAC")
            and record.status == "finished"
        ]
        result[task] = {"settings": {name: settings[name] for name in families.NAMES if name in settings}}
        if peers:
            best = min(peers, key=lambda record: record.best())
            result[task] |= {
                "targets": targets_of(best),
                "from": best.optimizer,
                "seconds": best.budget,
            }
    return {name: result[name] for name in names if name in result}


def targets_of(run: Record) -> list[float]:
    """The losses of a run after shares of its budget, plus 1 %; below the start, and 5 % apart."""
    found: list[float] = []
    for share in reversed(SHARES):
        loss = min(1.01 * run.best(share * run.budget), 0.95 * run.points[0].loss)
        found.insert(0, max(loss, 1.05 * found[0]) if found else loss)
    return [float(f"{loss:.4g}") for loss in found]


def _final(record: Record) -> float:
    """The lowest loss of a run; that of one that diverged or failed is nothing to go by."""
    return record.best() if record.status in ("finished", "reached") else math.inf


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Targets that are fixed stay; settings follow the records."""
    kept = ("targets", "from", "seconds")
    return {
        name: {
            **new.get(name, {}),
            **{key: old.get(name, {})[key] for key in kept if key in old.get(name, {})},
        }
        for name in tasks.TASKS
        if name in old or name in new
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the records")
    parser.add_argument("--stage", default="search 0.2", help="the round of the search that decides")
    parser.add_argument("--anew", action="store_true", help="fix the targets anew, too")
    arguments = parser.parse_args()
    new = derive(read_records(arguments.folder), arguments.stage)
    files.write(FILE, files.to_json(new if arguments.anew else merge(read(), new), indent=2))


if __name__ == "__main__":
    main()
