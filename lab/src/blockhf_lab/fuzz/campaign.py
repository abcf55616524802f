"""A campaign: numbered trials, one after the other, whose record says where to go on and what was found."""

from __future__ import annotations

import gc
import platform
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

import blockhf
from blockhf_lab import files
from blockhf_lab.fuzz.cases import Verdict, run_case
from blockhf_lab.fuzz.interrupts import run_interrupt

EVERY = 50
"""Trials after which the record is written."""

PASSES = "passes"
"""What a finding's trial does once library or check is mended."""

TRIALS: dict[str, Callable[[Random], Verdict]] = {"cases": run_case, "interrupts": run_interrupt}


@dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        what: ``cases`` or ``interrupts``.
        number: How many in all, those of the record included.
        seed: Of the campaign; a trial is drawn from it and from the trial's number.
        seconds: After so many the campaign stops; the same command goes on.
    """

    what: str
    number: int
    seed: int = 0
    seconds: float = float("inf")

    @property
    def command(self) -> str:
        return f"blockhf fuzz {self.what} --number {self.number} --seed {self.seed}"


def generator(seed: int, trial: int) -> Random:
    """What a trial is drawn from."""
    return Random(f"{seed}-{trial}")


def versions() -> dict[str, str]:
    """What it was run with."""
    return {
        "blockhf": blockhf.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def empty(settings: Settings) -> dict[str, Any]:
    """A record of nothing."""
    return {
        "what": settings.what,
        "command": settings.command,
        "seed": settings.seed,
        "number": settings.number,
        "done": 0,
        "cpu_seconds": 0.0,
        "checks": {},
        "refused": 0,
        "refusals": {},
        "kinds": {},
        "findings": [],
        "versions": versions(),
    }


def read(path: Path, settings: Settings) -> dict[str, Any]:
    """The record so far.

    Raises:
        ValueError: It is one of another campaign.
    """
    if not path.exists():
        return empty(settings)
    record: dict[str, Any] = files.read_json(path)
    if record["what"] != settings.what or record["seed"] != settings.seed:
        raise ValueError(
            f"{path} is the record of {record['command']!r}. Give another folder with --out, or that seed."
        )
    return {**record, "command": settings.command, "number": settings.number}


def run(settings: Settings, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run what is left of a campaign; the record is in the folder, also of a campaign that was stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{settings.what}.json"
    record = read(path, settings)
    _recheck(record, settings, tell)
    trial_of, start = TRIALS[settings.what], time.monotonic()
    gc.freeze()  # what is there now need not be looked through after each step
    try:
        while record["done"] < settings.number and time.monotonic() - start < settings.seconds:
            before = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                verdict = trial_of(generator(settings.seed, record["done"]))
            _add(record, verdict, time.process_time() - before)
            for finding in verdict.findings:
                tell(f"{settings.what} {record['done'] - 1}: {finding}")
            if record["done"] % EVERY == 0:
                files.write(path, files.to_json(record, indent=1))
    finally:
        gc.unfreeze()
        files.write(path, files.to_json(record, indent=1))
    tell(f"{record['done']} {settings.what}: {len(failing(record))} findings, {record['refused']} refused.")
    return record


def again(settings: Settings, trial: int, tell: Callable[[str], None]) -> bool:
    """Run one trial once more and tell what came of it; whether nothing is wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = TRIALS[settings.what](generator(settings.seed, trial))
    for name, value in vars(verdict).items():
        tell(f"{name}: {value}")
    return not verdict.findings


def _recheck(record: dict[str, Any], settings: Settings, tell: Callable[[str], None]) -> None:
    """Run trials with findings once more: they stay in the record, with what they give now."""
    for finding in record["findings"]:
        fine = again(settings, finding["trial"], lambda _: None)
        finding["now"] = PASSES if fine else "fails"
        tell(f"{settings.what} {finding['trial']}: {finding['what']}; now it {finding['now']}")


def failing(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The findings whose trials do not pass now."""
    return [finding for finding in record["findings"] if finding.get("now") != PASSES]


def _add(record: dict[str, Any], verdict: Verdict, seconds: float) -> None:
    trial = record["done"]
    for check in verdict.checks:
        record["checks"][check] = record["checks"].get(check, 0) + 1
    for what, kind in verdict.words.items():
        kinds = Counter(record["kinds"].get(what, {}))
        kinds[kind] += 1
        record["kinds"][what] = dict(sorted(kinds.items()))
    for refusal in verdict.refusals:
        record["refused"] += 1
        kind = _kind(refusal)
        record["refusals"][kind] = record["refusals"].get(kind, 0) + 1
    record["findings"] += [{"trial": trial, "what": finding} for finding in verdict.findings]
    record["done"] = trial + 1
    record["cpu_seconds"] = round(record["cpu_seconds"] + seconds, 3)


def _kind(refusal: str) -> str:
    """An error's class and its first words, without the numbers of the case."""
    name, text = refusal.split(": ", 2)[1:]
    words = [word for word in text.split()[:8] if not any(letter.isdigit() for letter in word)]
    return f"{name}: {' '.join(words)}"
