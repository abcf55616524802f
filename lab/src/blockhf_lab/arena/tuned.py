"""Targets and chosen settings, fixed once by ``blockhf arena derive`` and kept in ``tuned.json``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from blockhf_lab import files

FILE = Path(__file__).with_name("tuned.json")


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
