"""``blockhf demo``: BlockHF, the paper's block HF and HF, and Adam train the paper's autoencoder.

Each has the same time. Each starts from the same weights, and those with the same batch size see the same
batches. The clock of a contestant runs during its updates alone, so evaluation and drawing cost nobody
anything. They take turns: the next update is made by whoever has used the least time so far.
``demo_physics`` is the second half: a loss without noise.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor, nn

import blockhf
from blockhf import BlockHF, blocks
from blockhf_lab import demo_physics, figures, files
from blockhf_lab.autoencoder import SIZES, Autoencoder, objective
from blockhf_lab.data import Pictures
from blockhf_lab.demo_physics import Track

Update = Callable[[Tensor], tuple[float, int | None]]
"""Makes one update on a batch; returns the error there before it, and the number of CG iterations."""


@dataclass(frozen=True)
class Settings:
    """What is compared. The ratios of the batches are the paper's: 6000 and 1200, and for Adam 6000 and 600.

    Attributes:
        seconds: How long each contestant may compute.
        seed: Of the weights and of the order of the pictures.
        sizes: Units of the layers, from the picture to the code.
        num_train: How many of the training pictures are used.
        batch_size: The gradient batch, for all contestants but the last.
        curvature_batch_size: How many samples of it the products take.
        max_cg_steps: CG iterations per block and update.
        small_batch_size: The batch of Adam's second run.
        targets: Test errors; the table says when each was reached.
    """

    seconds: float = 20.0
    seed: int = 0
    sizes: tuple[int, ...] = SIZES
    num_train: int = 6000
    batch_size: int = 1500
    curvature_batch_size: int = 300
    max_cg_steps: int = 30
    small_batch_size: int = 150
    targets: tuple[float, ...] = (25.0, 16.0)

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds is {self.seconds}, but must be a positive finite number.")

    @classmethod
    def quick(cls, seconds: float = 0.5, seed: int = 0) -> Settings:
        """A small network on few pictures: shows that everything works, and nothing about optimizers."""
        return cls(
            seconds=seconds,
            seed=seed,
            sizes=(784, 32, 8),
            num_train=600,
            batch_size=300,
            curvature_batch_size=100,
            max_cg_steps=5,
            small_batch_size=60,
            targets=(60.0, 50.0),
        )


@dataclass(frozen=True)
class Contestant:
    """An optimizer with its settings.

    Attributes:
        name: As in the table and the figure.
        what: The settings in words.
        batch_size: Pictures per update.
        start: Sets it up for a model.
    """

    name: str
    what: str
    batch_size: int
    start: Callable[[nn.Module], Update]


@dataclass(frozen=True)
class Point:
    """Where a contestant was after so many updates.

    Attributes:
        update: Updates so far.
        seconds: Time in updates so far.
        loss: Error on the last update's batch, before that update.
        num_cg_steps: CG iterations of that update, all blocks together.
        test_error: Error on the test pictures, at those updates where it was measured.
    """

    update: int
    seconds: float
    loss: float | None
    num_cg_steps: int | None
    test_error: float | None


@dataclass
class Run:
    """A contestant's points so far, and its error on all training pictures at the end."""

    contestant: Contestant
    points: list[Point] = field(default_factory=list)
    train_error: float | None = None

    @property
    def seconds(self) -> float:
        """Time in updates so far."""
        return self.points[-1].seconds if self.points else 0.0

    @property
    def measured(self) -> list[Point]:
        """The points with a test error."""
        return [point for point in self.points if point.test_error is not None]

    def first(self, target: float) -> Point | None:
        """The first measured point with a test error no higher than ``target``."""
        for point in self.measured:
            if point.test_error is not None and point.test_error <= target:
                return point
        return None


def contestants(settings: Settings) -> list[Contestant]:
    """BlockHF as it comes, the paper's Algorithm 1 with two blocks and with one, and Adam twice."""
    large, small = settings.batch_size, settings.small_batch_size
    recipe = (
        f"lr 0.1, no damping, {settings.max_cg_steps} CG iterations, warm start 0.95, "
        f"batch {large}, curvature batch {settings.curvature_batch_size}"
    )
    adam = "lr 0.001, betas 0.9 and 0.999"
    return [
        Contestant("BlockHF", f"two blocks; as it comes, on batches of {2 * large}", 2 * large, _default),
        Contestant(
            "paper's block HF", f"two blocks; {recipe}", large, _hessian_free(blocks.by_module, settings)
        ),
        Contestant("paper's HF", f"one block; {recipe}", large, _hessian_free(blocks.single, settings)),
        Contestant(f"Adam, batch {large}", adam, large, _adam),
        Contestant(f"Adam, batch {small}", adam, small, _adam),
    ]


def _default(model: nn.Module) -> Update:
    return _updates(model, BlockHF(blocks.by_module(model), measure_memory=False))


def _hessian_free(partition: Callable[[nn.Module], Any], settings: Settings) -> Callable[[nn.Module], Update]:
    def start(model: nn.Module) -> Update:
        optimizer = BlockHF.paper(
            partition(model),
            max_cg_steps=settings.max_cg_steps,
            curvature_batch_size=settings.curvature_batch_size,
            measure_memory=False,
        )
        return _updates(model, optimizer)

    return start


def _updates(model: nn.Module, optimizer: BlockHF) -> Update:
    evaluate = objective(model)

    def update(batch: Tensor) -> tuple[float, int | None]:
        loss = optimizer.step(evaluate, batch)
        assert optimizer.report is not None
        return float(loss), sum(block.num_steps for block in optimizer.report.blocks)

    return update


def _adam(model: nn.Module) -> Update:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    evaluate = objective(model)

    def update(batch: Tensor) -> tuple[float, int | None]:
        optimizer.zero_grad()
        _, loss = evaluate(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach()), None

    return update


def train(contestant: Contestant, model: nn.Module, data: Pictures, settings: Settings) -> Iterator[Point]:
    """Train until the time is up, and yield a point before the first and after each update.

    The test error is measured after each of the first 50 updates, and later each time that the number
    of updates has grown by 3 %.
    """
    update = contestant.start(model)
    point = Point(0, 0.0, None, None, error(model, data.test_images))
    last_measured = 0
    yield point
    for batch in batches(data.train_images, contestant.batch_size, settings.seed):
        start = time.perf_counter()
        loss, num_cg_steps = update(batch)
        seconds = point.seconds + time.perf_counter() - start
        num_updates, done = point.update + 1, seconds >= settings.seconds
        test_error = None
        if done or num_updates <= 50 or num_updates >= 1.03 * last_measured:
            last_measured, test_error = num_updates, error(model, data.test_images)
        point = Point(num_updates, seconds, loss, num_cg_steps, test_error)
        yield point
        if done:
            return


def batches(pictures: Tensor, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Batches without end: all pictures in a new order each time; what does not fill a batch is left out."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(pictures), generator=generator)
        for start in range(0, len(pictures) - batch_size + 1, batch_size):
            yield pictures[order[start : start + batch_size]]


@torch.no_grad()
def error(model: nn.Module, pictures: Tensor) -> float:
    """The reconstruction error on all of these pictures."""
    _, loss = objective(model)(pictures)
    return float(loss)


def run(data: Pictures, settings: Settings, out: Path, console: Console) -> bool:
    """Hold the contest, show it, and write ``results.json`` and ``demo.png`` into ``out``.

    Ctrl-C ends it early; what was recorded until then is shown and written all the same.

    Returns:
        Whether it came to its end.
    """
    out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made shall not cost two minutes
    data = dataclasses.replace(data, train_images=data.train_images[: settings.num_train])
    entrants = contestants(settings)
    console.print(_introduction(settings, entrants), soft_wrap=True)
    runs: list[Run] = []
    tracks: list[Track] = []
    finished = True
    try:
        with _progress(console) as progress:
            tasks = [progress.add_task(each.name, total=settings.seconds, status="") for each in entrants]
            _warm_up(data, settings)
            racing = []
            for contestant, task in zip(entrants, tasks, strict=True):
                torch.manual_seed(settings.seed)
                model = Autoencoder(settings.sizes)
                runs.append(Run(contestant))
                racing.append((runs[-1], train(contestant, model, data, settings), model, task))
            while racing:
                # They take turns, so that a change of the machine's load meets them all alike.
                turn = min(racing, key=lambda each: each[0].seconds)
                each, points, model, task = turn
                if (point := next(points, None)) is None:
                    each.train_error = error(model, data.train_images)
                    racing.remove(turn)
                else:
                    each.points.append(point)
                    progress.update(
                        task, completed=min(each.seconds, settings.seconds), status=_status(point)
                    )
        _physics(settings, tracks, console)
    except KeyboardInterrupt:
        finished = False
        console.print("Interrupted; this is what was recorded until then.")

    runs = [each for each in runs if each.points]
    if not runs:
        console.print("Nothing was recorded.")
        return finished
    console.print(_table(runs, settings))
    if tracks := [track for track in tracks if track.errors]:
        console.print(demo_physics.table(tracks))
    files.write(out / "results.json", _json(runs, settings, finished, tracks))
    files.write(
        out / "demo.png",
        figures.race(
            [
                figures.Curve(
                    each.contestant.name,
                    [point.update for point in each.measured],
                    [point.seconds for point in each.measured],
                    [point.test_error or math.nan for point in each.measured],
                )
                for each in runs
            ],
            title=_title(settings),
            physics=[
                figures.Curve(track.name, track.updates, track.seconds, track.errors) for track in tracks
            ],
        ),
    )
    console.print(f"Written: {out / 'results.json'} and {out / 'demo.png'}", soft_wrap=True)
    return finished


def _physics(settings: Settings, tracks: list[Track], console: Console) -> None:
    """The second contest, on a loss without noise."""
    console.print(demo_physics.introduction(settings.seconds), soft_wrap=True)
    with _progress(console) as progress:
        own = {
            name: progress.add_task(name, total=settings.seconds, status="")
            for name, _, _ in demo_physics.CONTESTANTS
        }

        def watch(track: Track) -> None:
            completed = min(track.seconds[-1], settings.seconds)
            progress.update(own[track.name], completed=completed, status=demo_physics.status(track))

        demo_physics.run(settings.seconds, settings.seed, tracks, watch)


def _warm_up(data: Pictures, settings: Settings) -> None:
    """Let torch set up its threads and memory before the first clock runs."""
    model = Autoencoder(settings.sizes)
    update = _adam(model)
    for _ in range(2):
        update(data.train_images[: settings.batch_size])


def _introduction(settings: Settings, entrants: Sequence[Contestant]) -> str:
    lines = [
        f"Autoencoder {'-'.join(map(str, settings.sizes))} and its mirror image on {settings.num_train:,} "
        f"MNIST digits, {settings.seconds:g} s for each optimizer; torch uses {_threads()}:"
    ]
    width = max(len(each.name) for each in entrants)
    return "\n".join([*lines, *(f"  {each.name:<{width}}  {each.what}" for each in entrants)])


def _threads() -> str:
    number = torch.get_num_threads()
    return f"{number} thread{'' if number == 1 else 's'}"


def _title(settings: Settings) -> str:
    return (
        f"Autoencoder {'-'.join(map(str, settings.sizes))} on {settings.num_train:,} MNIST digits, "
        f"{settings.seconds:g} s for each optimizer; HF on batches of {settings.batch_size}"
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.remaining:3.0f} s left"),
        TextColumn("{task.fields[status]}"),
        console=console,
    )


def _status(point: Point) -> str:
    if point.loss is None:
        return ""
    cg = "" if point.num_cg_steps is None else f", {point.num_cg_steps} CG iterations"
    return f"update {point.update}, train error {point.loss:.2f}{cg}"


def _table(runs: Sequence[Run], settings: Settings) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        caption_justify="left",
        caption=(
            "Errors: squared, summed over pixels, averaged over all training and all test pictures, at the "
            "end. The last columns tell at which update, and after how many seconds, the test error first "
            "was that low. Seconds are those of the updates alone. An update of HF makes tens of products "
            "with the curvature matrix, so equal updates are not equal work. Nobody is tuned, and all but "
            "the first are the paper's; the machine, its other load and the seed change the numbers."
        ),
    )
    table.add_column("optimizer", no_wrap=True)
    for head in ("updates", "seconds", "train\nerror", "test\nerror"):
        table.add_column(head, justify="right")
    for target in settings.targets:
        table.add_column(f"test error\n≤ {target:g} at", justify="right", no_wrap=True)
    for each in runs:
        last, measured = each.points[-1], each.measured[-1]
        table.add_row(
            each.contestant.name,
            f"{last.update}",
            f"{last.seconds:.1f}",
            _number(each.train_error),
            _number(measured.test_error),
            *(_when(each.first(target)) for target in settings.targets),
        )
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _when(point: Point | None) -> str:
    return "–" if point is None else f"{point.update} ({point.seconds:.1f} s)"


def _json(runs: Sequence[Run], settings: Settings, finished: bool, tracks: Sequence[Track] = ()) -> bytes:
    content = {
        "blockhf": blockhf.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "finished": finished,
        "settings": dataclasses.asdict(settings),
        "runs": [
            {
                "name": each.contestant.name,
                "what": each.contestant.what,
                "train_error": each.train_error,
                "points": [dataclasses.asdict(point) for point in each.points],
            }
            for each in runs
        ],
        "physics": demo_physics.record(tracks),
    }
    return files.to_json(content)
