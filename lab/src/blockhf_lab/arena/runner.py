"""Many runs, each in a process of its own with one thread; what is on record is not made again."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from blockhf_lab import runs
from blockhf_lab.arena import families, records, tasks, tuned
from blockhf_lab.arena.base import Data, Task
from blockhf_lab.arena.tasks import get
from blockhf_lab.arena.training import GROWTH, train
from blockhf_lab.optimizers import OPTIONAL, Spec

SEARCH = ((8, 0.05), (2, 0.2))
"""Rounds of the search: how many settings, the best of the round before, and their share of the budget."""
_SEARCH_GROWTH = (
    1.4  # runs of a search are evaluated seldom, as that would else take longer than their updates
)


@dataclass(frozen=True)
class Job:
    """A run to make."""

    task: str
    optimizer: str
    seed: int
    stage: str
    budget: float
    stop_at: float | None = None


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        tasks: Their names.
        families: Those of the optimizers.
        seeds: Of the final runs; the search has seed 0.
        out: The folder of the records.
        searches: Whether settings are searched for; otherwise those in ``tuned.json`` are taken.
        share: Of each task's budget.
        processes: Runs at a time.
        again: Whether runs on record, but for those of the search, are made anew.
        find: From a name to the task.
    """

    tasks: Sequence[str]
    families: Sequence[str]
    seeds: Sequence[int]
    out: Path
    searches: bool = False
    share: float = 1.0
    processes: int = 1
    again: bool = False
    find: Callable[[str], Task] = get


def run(
    plan: Plan,
    tell: Callable[[str], None] = print,
    make_one: Callable[[Job, Data, Path], None] | None = None,
) -> None:
    """Make the runs of a plan that are not on record; a killed plan goes on where it was."""
    torch.set_num_threads(1)
    for name in plan.tasks:
        plan.find(name)
    for family in plan.families:
        families.settings(plan.find(plan.tasks[0]), family)
    for place in range(len(SEARCH) if plan.searches else 0):
        found = records.read(plan.out)
        make([job for name in plan.tasks for job in _search(plan, name, place, found)], plan, tell, make_one)
    chosen = tuned.choose(records.read(plan.out), stage(-1)) if plan.searches else {}
    finals = []
    for name in plan.tasks:
        for family in plan.families:
            optimizer = chosen.get(name, {}).get(family) or tuned.setting(name, family)
            optimizer = optimizer or families.UNTUNED.get(family)
            if optimizer is None:
                if families.settings(plan.find(name), family):
                    tell(f"{name}: {family} is left out; no setting of it was searched for.")
                continue
            finals += list(_finals(plan, name, optimizer))
    make(finals, plan, tell, make_one)


def _search(plan: Plan, name: str, place: int, found: Sequence[records.Record]) -> Iterator[Job]:
    """A round of the search: at first all settings, then those whose losses came lowest before."""
    task, (number, share) = plan.find(name), SEARCH[place]
    for family in plan.families:
        if family == families.DEFAULT or families.SHARED.get(family) in plan.families:
            continue
        optimizers = families.settings(task, family)
        if place:
            before = tuned.ranked(found, name, family, stage(place - 1))
            optimizers = [record.optimizer for record in before[:number]]
        for optimizer in optimizers:
            yield Job(name, optimizer, 0, stage(place), round(plan.share * task.seconds * share, 3))


def stage(place: int) -> str:
    """What records of a round of the search have as their stage."""
    return f"search {SEARCH[place][1]:g}"


def _finals(plan: Plan, name: str, optimizer: str) -> Iterator[Job]:
    targets = tuned.targets(name)
    for seed in plan.seeds:
        budget = round(plan.share * plan.find(name).seconds, 3)
        yield Job(name, optimizer, seed, "final", budget, targets[-1] if targets else None)


def make(
    jobs: Sequence[Job],
    plan: Plan,
    tell: Callable[[str], None],
    make_one: Callable[[Job, Data, Path], None] | None = None,
) -> None:
    """Make those of the jobs that are not on record, each by ``make_one``."""
    known = {
        (record.task, record.optimizer, record.seed, record.stage, record.budget)
        for record in records.read(plan.out)
        if not plan.again or record.stage.startswith("search")
    }
    waiting = [job for job in jobs if (job.task, job.optimizer, job.seed, job.stage, job.budget) not in known]
    if waiting:
        _prepare(waiting)
    loaded: dict[str, Data] = {}
    running: list[tuple[Job, BaseProcess]] = []
    try:
        for number, job in enumerate(waiting, 1):
            if not Spec.parse(job.optimizer).is_available:
                tell(f"{job.task}: {job.optimizer} is left out. pip install 'blockhf-lab[peers]' brings it.")
                continue
            if job.task not in loaded:  # jobs come task by task, and data may be large
                loaded = {job.task: plan.find(job.task).load()}
            process = _process(job, loaded[job.task], plan.out, make_one or _make_one)
            process.start()
            running.append((job, process))
            tell(f"{number}/{len(waiting)} {job.task} {job.stage} seed {job.seed}: {job.optimizer}")
            running = _wait(running, plan.processes, tell)
        _wait(running, 1, tell)
    except KeyboardInterrupt:
        for _, process in running:
            process.terminate()
        raise


def _prepare(jobs: Sequence[Job]) -> None:
    """Import once for all forks what optimizers import at their first step, or are made of."""
    if any(Spec.parse(job.optimizer).name in OPTIONAL for job in jobs) and find_spec("pytorch_optimizer"):
        importlib.import_module("pytorch_optimizer")
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    torch.optim.SGD([param], lr=0.0).step()


def _wait(
    running: list[tuple[Job, BaseProcess]], most: int, tell: Callable[[str], None]
) -> list[tuple[Job, BaseProcess]]:
    """Wait until fewer than so many run; say which failed."""
    while len(running) >= most:
        multiprocessing.connection.wait([process.sentinel for _, process in running])
        for job, process in running:
            if not process.is_alive() and process.exitcode:
                tell(
                    f"{job.task}: {job.optimizer} ended with exit code {process.exitcode} and has no record."
                )
        running = [(job, process) for job, process in running if process.is_alive()]
    return running


def _make_one(job: Job, data: Data, out: Path) -> None:
    torch.set_num_threads(1)
    task: Task = tasks.get(job.task)
    growth = _SEARCH_GROWTH if job.stage.startswith("search") else GROWTH
    spec = Spec.parse(job.optimizer)
    record = train(task, data, spec, job.seed, job.budget, growth=growth, stop_at=job.stop_at)
    put_down(job, record, out)


def put_down(job: Job, record: Mapping[str, Any], out: Path) -> None:
    """Add a run to the records."""
    environment = {key: value for key, value in runs.environment().items() if value is not None}
    records.append(out, {**record, "stage": job.stage, "environment": environment})


def _process(job: Job, data: Data, out: Path, make_one: Callable[[Job, Data, Path], None]) -> BaseProcess:
    """Forked where that is possible, so that a run need not import and load everything again."""
    arguments = {"target": make_one, "args": (job, data, out)}
    if "fork" in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("fork").Process(**arguments)  # type: ignore[arg-type]
    return multiprocessing.get_context("spawn").Process(**arguments)  # type: ignore[arg-type]
