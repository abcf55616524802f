"""The second half of ``blockhf demo``: Poisson's equation by a small network, a loss without noise.

All points are in each update, numbers are float64, and what counts is the relative error of the solution. As
in the first half, clocks run during updates alone, and the next update is made by whoever has used the least
time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import box
from rich.table import Table

from blockhf_lab import costs, tasks
from blockhf_lab.optimizers import Method, Spec
from blockhf_lab.tasks import Task

TASK = "poisson2d"
CONTESTANTS: tuple[tuple[str, str, str], ...] = (
    ("BlockHF", "blockhf", "one block; no option set"),
    ("self-scaled BFGS", "ssbfgs", "a dense inverse Hessian, Wolfe conditions"),
    ("L-BFGS", "full-lbfgs", "history 100, strong Wolfe conditions"),
    ("Adam", "adam:lr=0.003", "lr 0.003"),
)
"""Name, spec and words of each."""

TARGETS = (1e-2, 1e-3, 1e-4)


@dataclass
class Track:
    """A contestant's way: updates, seconds and relative errors where they were measured; the last loss."""

    name: str
    what: str
    updates: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    loss: float = math.nan

    def first(self, target: float) -> float | None:
        """Seconds until the error first was that low."""
        found = (own for own, error in zip(self.seconds, self.errors, strict=True) if error <= target)
        return next(found, None)


def run(
    seconds: float, seed: int, tracks: list[Track], watch: Callable[[Track], None] = lambda track: None
) -> None:
    """Hold the contest; ``tracks`` fill on the way, so that they are there after Ctrl-C too."""
    task = tasks.get(TASK)
    racing = []
    for name, spec, what in CONTESTANTS:
        tracks.append(Track(name, what))
        racing.append((tracks[-1], _train(task, Spec.parse(spec), tracks[-1], seconds, seed)))
    spent = dict.fromkeys((track.name for track in tracks), 0.0)
    while racing:
        turn = min(racing, key=lambda own: spent[own[0].name])
        now = next(turn[1], None)
        if now is None:
            racing.remove(turn)
        else:
            spent[turn[0].name] = now
            watch(turn[0])


def _train(task: Task, spec: Spec, track: Track, seconds: float, seed: int) -> Iterator[float]:
    """Train until the time is up; yields the time spent after each update."""
    train, test = task.load(None)
    torch.manual_seed(seed)
    model = task.make_model()
    batch = train.take(slice(None))
    method: Method = spec.start(task, model, costs.unit(task, model, train), population=len(train))
    spent, update, measured = 0.0, 0, 0

    def measure() -> None:
        track.updates.append(update)
        track.seconds.append(spent)
        track.errors.append(task.test_metrics(model, test)["error"])

    measure()
    yield spent
    while spent < seconds:
        start = time.perf_counter()
        track.loss = method.update(batch, spent / seconds).loss
        spent += time.perf_counter() - start
        update += 1
        if update <= 50 or update >= 1.03 * measured or spent >= seconds:
            measured = update
            measure()
        yield spent


def introduction(seconds: float) -> str:
    """What is compared, in words."""
    width = max(len(name) for name, _, _ in CONTESTANTS)
    lines = [f"{tasks.get(TASK).title}, float64, no noise, {seconds:g} s for each optimizer:"]
    return "\n".join([*lines, *(f"  {name:<{width}}  {what}" for name, _, what in CONTESTANTS)])


def status(track: Track) -> str:
    """For the line of progress."""
    return f"update {track.updates[-1]}, relative error {track.errors[-1]:.1e}"


def table(tracks: Sequence[Track]) -> Table:
    """The errors at the end, and when each target was reached."""
    shown = Table(
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        caption_justify="left",
        caption=(
            "Relative L2 errors against the exact solution, and seconds until they first were that low. Here "
            "all points are in each update and systems are solved exactly; on the autoencoder above, batches "
            "are noisy, and differences between optimizers are factors and no orders of magnitude."
        ),
    )
    shown.add_column("optimizer", no_wrap=True)
    for head in ("updates", "loss", "error", *(f"error\n≤ {target:g}" for target in TARGETS)):
        shown.add_column(head, justify="right", no_wrap=True)
    for track in tracks:
        times = [track.first(target) for target in TARGETS]
        shown.add_row(
            track.name,
            f"{track.updates[-1]}",
            f"{track.loss:.1e}",
            f"{track.errors[-1]:.1e}",
            *("–" if own is None else f"{own:.1f} s" for own in times),
        )
    return shown


def record(tracks: Sequence[Track]) -> dict[str, Any]:
    """For ``results.json``."""
    return {"task": TASK, "runs": [vars(track) for track in tracks]}
