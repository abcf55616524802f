"""What a step knows before it decides anything: the samples of all processes, and the way to points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blockhf.isolation import Restored
from blockhf.point import Point
from blockhf.report import Stopwatch
from blockhf.samples import Structure


@dataclass(frozen=True)
class Meeting:
    """What is known before a step: the samples of all ranks, and the way to points on them.

    Attributes:
        batch: The samples of this process.
        curvature_batch: Its samples of the curvature, where they are given.
        sizes: How many samples each process has.
        given: How many of the curvature, where they are given.
        complete: Why the samples are all there is; empty where they are not.
        searches: Whether the search is asked.
        structure: What is known of the objective.
        make_point: Makes the point on some samples, at the parameters or at others; with other blocks too,
            then without penalties.
        groups: The parameter groups, one for each block.
        before: All as it was before.
        watch: Measures the phases.
    """

    batch: Any
    curvature_batch: Any
    sizes: Sequence[int]
    given: Sequence[int] | None
    complete: str
    searches: bool
    structure: Structure
    make_point: Callable[..., Point]
    groups: Sequence[dict[str, Any]]
    before: Restored
    watch: Stopwatch
