"""The default in other circumstances, and with its parts left out, on the tasks of the arena.

Its loss is scaled, its batches are sorted, and each of its parts is removed in turn. All runs of a task
follow one another, evaluated after each step, so that updates to a target are exact; each may take
``TIMES`` the task's budget, so that what is slower gets there too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from blockhf_lab.arena import runner, tasks, tuned
from blockhf_lab.arena.base import Batch, Data, Task, take
from blockhf_lab.arena.runner import Job, Plan
from blockhf_lab.arena.training import Method, Point, train
from blockhf_lab.optimizers import Spec

TIMES = 2.0
"""Budgets of the arena that a run may take."""

GROUPS = ("scale", "sorted", "ablation")
"""Kinds of variants."""

PLAIN = "plain"
"""The default as it is, with which the others are compared."""

STEPS = "steps-alone"
"""Gauss-Newton steps from the first and no exact solutions, with which parts of such steps are compared."""

SAME = "x1024"
"""The default with another loss, and yet the same run: costs that differ do so by chance."""

_STEPS = "blockhf:sampling=NoiseScale,walk=NoWalk"
_KEPT = 1.2  # growth of the updates from one point on record to the next


@dataclass(frozen=True)
class Variant:
    """A way to run the default.

    Attributes:
        name: As on the command line, and as the stage of its records.
        group: Its kind; the default itself has none.
        title: For tables.
        optimizer: The spec.
        base: The variant that it is compared with.
        scale: What the loss is multiplied by.
        order: The order of the samples in a batch.
    """

    name: str
    group: str
    title: str
    optimizer: str = "blockhf"
    base: str = PLAIN
    scale: float = 1.0
    order: Callable[[Batch], Batch] | None = None

    def task(self, task: Task) -> Task:
        """The task as the optimizer meets it."""
        return replace(task, scale=self.scale, order=self.order)


def by_target(batch: Batch) -> Batch:
    """The samples in the order of their labels, of their targets' means, or of their first characters.

    Where there are no targets, inputs stand in. Flags, which tell kinds of samples apart, do not count.

    >>> by_target((torch.tensor([5.0, 6.0, 7.0]), torch.tensor([2, 0, 1])))
    (tensor([6., 7., 5.]), tensor([0, 1, 2]))
    """
    values = [tensor for tensor in batch if tensor.dtype != torch.bool][-1]
    values = values.reshape(len(values), -1)
    keys = values.mean(dim=1) if values.is_floating_point() else values[:, 0]
    return take(batch, keys.argsort(stable=True))


def in_another_order(batch: Batch) -> Batch:
    """The samples in an order that nothing but their number decides."""
    generator = torch.Generator().manual_seed(1)
    return take(batch, torch.randperm(len(batch[0]), generator=generator))


def _scaled(name: str, scale: float, title: str) -> Variant:
    return Variant(name, "scale", title, scale=scale)


def _without(part: str, title: str) -> Variant:
    return Variant(part, "ablation", title, str(Spec.parse(f"blockhf:without={part}")))


def _steps_without(part: str, title: str) -> Variant:
    title = f"in Gauss-Newton steps alone: {title}"
    return Variant(part, "ablation", title, str(Spec.parse(f"{_STEPS},without={part}")), STEPS)


_LIST = (
    Variant(PLAIN, "", "default"),
    _scaled("x1000", 1000.0, "loss × 1,000"),
    _scaled("x0.001", 0.001, "loss × 0.001"),
    _scaled("x1.001", 1.001, "loss × 1.001 (rounding alone)"),
    _scaled(SAME, 1024.0, "loss × 1,024"),
    _scaled("x1/1024", 1 / 1024, "loss / 1,024"),
    Variant("sorted", "sorted", "sorted batches", order=by_target),
    Variant("reordered", "sorted", "batches in another order (chance alone)", order=in_another_order),
    _without("rotations", "rotations"),
    _without("averages", "averages"),
    _without("growth", "growth of samples with noise"),
    _without("rate", "adaptation of the rate"),
    _without("undoing", "undoing of uphill stretches"),
    _without("trials", "trials of Gauss-Newton steps"),
    _without("exact", "exact solutions where a batch comes again"),
    _without("second-order", "trials and exact solutions: the walk alone"),
    _without("walk", "the walk"),
    Variant(
        STEPS, "ablation", "the walk, exact solutions: Gauss-Newton steps alone", str(Spec.parse(_STEPS))
    ),
    _steps_without("cg", "CG (K-FAC alone)"),
    _steps_without("preconditioner", "preconditioner"),
    _steps_without("held-out", "lengths by held-out samples"),
    _steps_without("adaptation", "adaptive damping"),
)
VARIANTS: Mapping[str, Variant] = {variant.name: variant for variant in _LIST}
"""The variants by name."""


def select(names: Sequence[str]) -> list[Variant]:
    """Those of these kinds or names, or all, with those that they are compared with, in their order.

    >>> [variant.name for variant in select(["sorted", "cg"])]
    ['plain', 'sorted', 'reordered', 'steps-alone', 'cg']

    Raises:
        ValueError: There is no such kind or variant.
    """
    for name in names:
        if name not in (*GROUPS, *VARIANTS):
            raise ValueError(
                f"There is no variant {name!r} in the arena. There are the kinds {', '.join(GROUPS)} "
                f"and the variants {', '.join(VARIANTS)}."
            )
    found = [own for own in _LIST if not names or own.name in names or own.group in names]
    needed = {PLAIN, *(own.name for own in found), *(own.base for own in found)}
    return [own for own in _LIST if own.name in needed]


def run(plan: Plan, only: Sequence[str] = (), tell: Callable[[str], None] = print) -> None:
    """Make the runs that are not on record, task by task."""
    torch.set_num_threads(1)
    chosen = select(only)
    for name in plan.tasks:
        tasks.get(name)
    runner.make(list(_jobs(plan, chosen)), plan, tell, make_one)


def _jobs(plan: Plan, chosen: Sequence[Variant]) -> Iterator[Job]:
    for name in plan.tasks:
        budget = round(TIMES * plan.share * tasks.get(name).seconds, 3)
        stop_at = min(tuned.targets(name), default=None)
        for variant in chosen:
            for seed in plan.seeds:
                yield Job(name, variant.optimizer, seed, variant.name, budget, stop_at)


def make_one(job: Job, data: Data, out: Path) -> None:
    """Make a run, and put down those of its points that tables need."""
    torch.set_num_threads(1)
    task = VARIANTS[job.stage].task(tasks.get(job.task))
    digests = [""]

    def note(_: Point, method: Method) -> None:
        digests.append(digest(method))

    spec = Spec.parse(job.optimizer)
    stop_at = job.stop_at
    record = train(task, data, spec, job.seed, job.budget, growth=1.0, stop_at=stop_at, on_point=note)
    places = places_to_keep(record["points"], tuned.targets(job.task))
    points = [record["points"][place] for place in places]
    runner.put_down(job, {**record, "points": points, "digests": [digests[place] for place in places]}, out)


def digest(method: Method) -> str:
    """A sum of the parameters' bits: the same as long as two runs are one."""
    found = 0
    for group in method.optimizer.param_groups:
        for param in group["params"]:
            found = zlib.crc32(param.detach().contiguous().numpy().tobytes(), found)
    return f"{found:08x}"


def places_to_keep(points: Sequence[Sequence[float]], targets: Sequence[float]) -> list[int]:
    """Which points to put down: the first at or below each target, the last, and more as updates grow.

    >>> points = [(0, 0, 0, 9.0), (10, 0, 0, 8.0), (11, 0, 0, 7.0), (12, 0, 0, 6.0), (13, 0, 0, 6.0)]
    >>> places_to_keep(points, [7.5]), places_to_keep(points, [8.5])
    ([0, 1, 2, 4], [0, 1, 3, 4])
    """
    losses = [loss for *_, loss in points]
    firsts = {next((place for place, loss in enumerate(losses) if loss <= target), 0) for target in targets}
    kept: list[int] = []
    for place, (update, *_) in enumerate(points):
        is_far = not kept or update >= max(_KEPT * points[kept[-1]][0], 1)
        if is_far or place in firsts or place == len(points) - 1:
            kept.append(place)
    return kept
