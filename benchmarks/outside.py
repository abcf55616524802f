"""The default on tasks that were not in view when its rules were made, beside Adam and SOAP.

    OMP_NUM_THREADS=1 python benchmarks/outside.py --page docs/arena.md
    OMP_NUM_THREADS=1 python benchmarks/outside.py --task gru --task vae --seconds 1 --out runs/outside

By the arena's rules (docs/arena.md): one thread, CPU seconds of updates, an equal search of eight settings
for each peer, and targets by what the better peer reached. The default may take half as many seconds again,
so that it is known how much slower it is. Runs on record are not made again; runs with other ``--seconds``
need a folder of their own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockhf import blocks
from blockhf_lab import files
from blockhf_lab.arena import families, models, records, runner, scores, tasks, tuned
from blockhf_lab.arena.base import Batch, Data, Task, take
from blockhf_lab.arena.records import Record
from blockhf_lab.arena.runner import Job, Plan
from blockhf_lab.arena.scores import Pair
from blockhf_lab.arena.training import GROWTH, train
from blockhf_lab.arena.variants import by_target
from blockhf_lab.claims_page import fill
from blockhf_lab.optimizers import Spec
from blockhf_lab.page import number
from blockhf_lab.tables import markdown
from blockhf_lab.transformer import Layer

PEERS = ("Adam", "SOAP")
TIMES = 1.5
"""Budgets of a peer that the default may take."""

BAR = 1.5
"""Times Adam's CPU seconds that the default may need to Adam's own loss, on small batches."""

_SEARCH_GROWTH = 1.4  # of the CPU seconds between evaluations of a search, of which the lowest loss counts


# Models


class RowReader(nn.Module):
    """A GRU over the rows of a picture, and a linear layer on its last state."""

    def __init__(self, size: int, num_cells: int, num_classes: int) -> None:
        super().__init__()
        self.size = size
        self.gru = nn.GRU(size, num_cells, batch_first=True)
        self.head = nn.Linear(num_cells, num_classes)

    def forward(self, pictures: Tensor) -> Tensor:
        states, _ = self.gru(pictures.view(-1, self.size, self.size))
        logits: Tensor = self.head(states[:, -1])
        return logits


def convolutions() -> nn.Module:
    """Two convolutions with BatchNorm, each of which halves the picture, and a linear layer."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * 7 * 7, 10)),
    )


class Encoder(nn.Module):
    """A transformer encoder over a sequence of numbers; its mean over the positions is classified."""

    def __init__(self, length: int, width: int, num_layers: int, num_heads: int, num_classes: int) -> None:
        super().__init__()
        self.enter = nn.Linear(1, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.Sequential(*(Layer(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        states = self.norm(self.layers(self.enter(inputs) + self.positions))
        logits: Tensor = self.head(states.mean(dim=1))
        return logits


class VariationalAutoencoder(nn.Module):
    """Pixels' logits of a random code, with the code's mean and the logarithm of its deviation."""

    def __init__(self, num_pixels: int, width: int, num_latents: int) -> None:
        super().__init__()
        self.encoder = models.mlp((num_pixels, width, 2 * num_latents))
        self.decoder = models.mlp((num_latents, width, num_pixels))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_deviation = self.encoder(pictures).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * log_deviation.exp()
        return self.decoder(code), mean.clone(), log_deviation.clone()


def evidence_bound(model: nn.Module, batch: Batch) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The negative bound on the evidence, in nats a picture (Kingma & Welling, 2014)."""
    pictures = batch[0]
    logits, mean, log_deviation = outputs = model(pictures)
    surprise = F.binary_cross_entropy_with_logits(logits, pictures, reduction="none").sum(1)
    divergence = (mean.square() + (2 * log_deviation).exp() - 1 - 2 * log_deviation).sum(1) / 2
    return outputs, (surprise + divergence).mean()


# Samples


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _split(samples: Batch, num_train: int, source: str) -> Data:
    """The first samples are trained on, up to 2,000 of which are evaluated; the others are to test."""
    train = take(samples, slice(num_train))
    return Data(train, take(train, slice(2000)), take(samples, slice(num_train, None)), source)


def randomly_labeled() -> Data:
    """MNIST with a third of the labels drawn anew; the test's are right."""
    found = tasks.get("classifier").load()
    inputs, labels = found.train
    generator = _generator(31)
    is_random = torch.rand(len(labels), generator=generator) < 1 / 3
    labels = torch.where(is_random, torch.randint(10, labels.shape, generator=generator), labels)
    train = inputs, labels
    evaluated = take(train, slice(len(found.evaluated[0])))
    return Data(train, evaluated, found.test, f"{found.source}, a third of the labels from seed 31")


def smooth_function() -> Data:
    """A function of three numbers, without noise."""
    x = 2 * torch.rand(22_000, 3, generator=_generator(32)) - 1
    y = torch.sin(3 * x[:, 0] * x[:, 1]) + torch.cos(4 * x[:, 2]) * x[:, 0] + torch.exp(-4 * x[:, 1] ** 2)
    return _split((x, y[:, None]), 20_000, "made from seed 32")


def with_outliers() -> Data:
    """Ten numbers, and a function of them with noise of deviation 0.1, and of 5 for each fiftieth sample."""
    generator = _generator(33)
    x = torch.randn(22_000, 10, generator=generator)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + x[:, 3].abs() + 0.5 * x[:, 4:].sum(dim=1).tanh()
    deviation = torch.where(torch.rand(len(x), generator=generator) < 0.02, 5.0, 0.1)
    y = y + deviation * torch.randn(len(x), generator=generator)
    return _split((x, y[:, None]), 20_000, "made from seed 33")


def few_samples() -> Data:
    """A function of eight numbers with noise of deviation 0.1; only 300 samples are trained on."""
    generator = _generator(34)
    x = torch.randn(1300, 8, generator=generator)
    y = torch.sin(x[:, 0] + x[:, 1]) + 0.5 * x[:, 2] * x[:, 3] + 0.3 * x[:, 4]
    y = y + 0.1 * torch.randn(len(x), generator=generator)
    return _split((x, y[:, None]), 300, "made from seed 34")


# The list

_entropy, _squares = tasks.supervised(F.cross_entropy), tasks.supervised(F.mse_loss)
_huber = tasks.supervised(F.huber_loss)
_MNIST = tasks.get("classifier").load
_WIDE_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
_EIGHT_RATES = (1e-4, 3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 3e-2)


def _task(
    name: str,
    title: str,
    load: Callable[[], Data],
    make_model: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Batch], tuple[Any, Tensor]],
    own_batch: int | None,
    **options: Any,
) -> Task:
    settings = {"groups": blocks.by_module, "batches": (64, 512), "seconds": 4.0, **options}
    return Task(name, title, load, make_model, loss, own_batch=own_batch, **settings)


_PERCEPTRON = _task(
    "perceptron",
    "Classifier 784-128-128-10 on MNIST",
    _MNIST,
    partial(models.mlp, (784, 128, 128, 10)),
    _entropy,
    4096,
    groups=blocks.by_layer,
)


def _small(size: int) -> Task:
    """The classifier with the same small batch for all optimizers."""
    title = f"{_PERCEPTRON.title}, batches of {size} for all"
    return replace(
        _PERCEPTRON,
        name=f"perceptron-{size}",
        title=title,
        own_batch=size,
        batches=(size, size),
        rates=_EIGHT_RATES,
    )


SMALL = {f"perceptron-{size}": size for size in (64, 128)}
"""Tasks with a small batch, and its size."""

_LIST = (
    _PERCEPTRON,
    *map(_small, SMALL.values()),
    _task("gru", "GRU of 32 cells on rows of digits", _MNIST, partial(RowReader, 28, 32, 10), _entropy, 4096),
    _task("convolutions", "Convolutions with BatchNorm on MNIST", _MNIST, convolutions, _entropy, 4096),
    _task(
        "function",
        "Perceptron of five layers with tanh on a function of three numbers",
        smooth_function,
        partial(models.mlp, (3, 50, 50, 50, 50, 1), nn.Tanh),
        _squares,
        None,
        groups=blocks.by_layer,
        rates=_WIDE_RATES,
    ),
    replace(
        _PERCEPTRON,
        name="random-labels",
        title="Classifier 784-128-128-10 on MNIST, a third of the labels random",
        load=randomly_labeled,
        own_batch=None,
    ),
    _task(
        "huber",
        "Perceptron 10-64-64-1 with Huber's loss, noise with outliers",
        with_outliers,
        partial(models.mlp, (10, 64, 64, 1)),
        _huber,
        4096,
        groups=blocks.by_layer,
        rates=_WIDE_RATES,
    ),
    _task(
        "encoder",
        "Transformer encoder of two layers of width 16 on sequences of 49 pixels",
        tasks.get("lstm").load,
        partial(Encoder, 49, 16, 2, 2, 10),
        _entropy,
        1024,
        groups=partial(blocks.by_module, depth=2),
        batches=(32, 256),
    ),
    _task(
        "few-samples",
        "Perceptron 8-32-32-1 with tanh on 300 samples",
        few_samples,
        partial(models.mlp, (8, 32, 32, 1), nn.Tanh),
        _squares,
        None,
        groups=blocks.by_layer,
        batches=(32, 300),
        rates=_WIDE_RATES,
    ),
    _task(
        "vae",
        "Variational autoencoder 784-200-20 on MNIST",
        tasks.get("autoencoder").load,
        partial(VariationalAutoencoder, 784, 200, 20),
        evidence_bound,
        None,
    ),
    replace(
        _PERCEPTRON, name="sorted", title=f"{_PERCEPTRON.title}, each batch sorted by label", order=by_target
    ),
)
TASKS: Mapping[str, Task] = {task.name: task for task in _LIST}
"""The tasks by name; the arena has no tasks of these names."""


# Runs


def get(name: str, seconds: float = 4.0) -> Task:
    """A task, with the CPU seconds of updates that a peer may take."""
    if name not in TASKS:
        raise ValueError(f"There is no task {name!r} outside of the arena. There are {', '.join(TASKS)}.")
    return replace(TASKS[name], seconds=seconds)


def run(
    names: Sequence[str], seed: int, seconds: float, out: Path, tell: Callable[[str], None] = print
) -> None:
    """Make the runs that are not on record, task by task, so that runs that are compared follow one another.

    Targets are by seed 0, whose runs are made with those of other seeds.
    """
    for name in names:
        find = partial(get, seconds=seconds)
        plan = Plan([name], PEERS, sorted({0, seed}), out, searches=True, find=find)
        runner.run(plan, tell, make_one)
        runner.run(replace(plan, families=(families.DEFAULT,), searches=False, share=TIMES), tell, make_one)


def make_one(job: Job, data: Data, out: Path) -> None:
    """Make a run, and put down those of its points that tables need."""
    torch.set_num_threads(1)
    is_search = job.stage.startswith("search")
    growth = _SEARCH_GROWTH if is_search else GROWTH
    record = train(get(job.task), data, Spec.parse(job.optimizer), job.seed, job.budget, growth=growth)
    runner.put_down(job, {**record, "points": kept(record["points"], only_best=is_search)}, out)


def kept(points: Sequence[Sequence[float]], *, only_best: bool) -> list[Sequence[float]]:
    """The first and the last point, and between them each with a new lowest loss, or the lowest alone.

    >>> points = [(0, 0, 0, 9.0), (1, 0, 0, 5.0), (2, 0, 0, 6.0), (3, 0, 0, 4.0), (4, 0, 0, 7.0)]
    >>> [update for update, *_ in kept(points, only_best=False)]
    [0, 1, 3, 4]
    >>> [update for update, *_ in kept(points, only_best=True)]
    [0, 3, 4]
    """
    lows = [0]
    for place, (*_, loss) in enumerate(points):
        if loss < points[lows[-1]][-1]:
            lows.append(place)
    return [points[place] for place in sorted({0, *(lows[-1:] if only_best else lows), len(points) - 1})]


# The page


@dataclass(frozen=True)
class Outside:
    """The final runs, with the targets that judge them, by task."""

    runs: Sequence[Record]
    targets: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, found: Sequence[Record]) -> Outside:
        """The runs with the settings that the search chose; targets are those that no run starts below."""
        stage = runner.stage(-1)
        runs = scores.finals(found, tuned.choose(found, stage), TASKS)
        searches = [record for record in found if record.stage == stage]
        fixed = tuned.derive([*searches, *runs], stage, TASKS)
        targets = {}
        for name, own in fixed.items():
            start = min((record.points[0].loss for record in runs if record.task == name), default=math.inf)
            targets[name] = [target for target in own.get("targets", ()) if target < start]
        return cls(runs, targets)

    @property
    def pairs(self) -> list[Pair]:
        return scores.pairs(self.runs, self.targets, "seconds", TASKS)

    def of_family(self, task: str, family: str) -> list[Record]:
        return [record for record in self.runs if (record.task, record.family) == (task, family)]


def table(found: Outside) -> tuple[list[str], list[list[str]]]:
    """For each task the CPU seconds to its three targets, and the default's over the better peer's."""
    columns = (families.DEFAULT, *PEERS)
    heads = ["task", "what", "batches of the default", "loss ≤", *columns, "default over better peer"]
    rows = []
    for name in TASKS:
        own = [pair for pair in found.pairs if pair.task == name]
        if not own:
            continue
        task = TASKS[name]
        batch = "all" if task.own_batch is None else f"{task.own_batch:,}"
        cells = [[_seconds(pair.costs.get(family, math.inf)) for pair in own] for family in columns]
        ratios = [_ratio(pair.ratio_to_peers(families.DEFAULT)) for pair in own]
        losses = [f"{pair.target:.4g}" for pair in own]
        rows.append([name, task.title, batch, *map(" / ".join, (losses, *cells, ratios))])
    return heads, rows


def _seconds(value: float) -> str:
    return "–" if math.isinf(value) else number(value)


def _ratio(value: float) -> str:
    return "–" if math.isinf(value) else "alone" if value == 0 else f"{value:.2f}"


def verdict(found: Outside) -> str:
    """How the default stands to the better peer, in words."""
    own = [record for record in found.runs if record.family == families.DEFAULT]
    ratios = [pair.ratio_to_peers(families.DEFAULT) for pair in found.pairs]
    broken = [record.task for record in own if record.status not in ("finished", "reached")]
    told = (
        f" Its runs on {', '.join(broken)} diverged or failed." if broken else " None of its runs diverged."
    )
    seeds = sorted({record.seed for record in own})
    return (
        f"Over {len(ratios)} pairs of task and target, the default needs at most twice the CPU seconds of "
        f"the better peer on {sum(ratio <= 2 for ratio in ratios)}, is the best on "
        f"{sum(ratio <= 1 for ratio in ratios)}, and does not get there on {sum(map(math.isinf, ratios))}."
        f"{told} Seed{'s' * (len(seeds) > 1)}: {', '.join(map(str, seeds))}."
    )


def small_batches(found: Outside) -> str:
    """The default's CPU seconds to Adam's own loss, in words; nothing where there are no such runs."""
    sizes, told = [], []
    for name, size in SMALL.items():
        own, adam = (found.of_family(name, family) for family in (families.DEFAULT, "Adam"))
        first = [record for record in adam if record.seed == 0]
        if own and first:
            target = tuned.targets_of(first[0])[-1]
            seconds, peer = (scores.cost(runs, target, "seconds") for runs in (own, adam))
            least = min(record.budget for record in own)
            sizes.append(str(size))
            told.append(f"more than {least / peer:.2f}" if math.isinf(seconds) else f"{seconds / peer:.2f}")
    if not told:
        return ""
    return (
        f"On batches of {' and '.join(sizes)} the default takes {' and '.join(told)} times Adam's CPU "
        f"seconds to Adam's own loss plus 1 %; the bar is {BAR:g} times."
    )


def part(found: Outside) -> str:
    """What ``docs/arena.md`` holds between its markers."""
    return "\n\n".join(filter(None, (markdown(*table(found)), verdict(found), small_batches(found))))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--task", action="append", choices=TASKS, help="one of them; repeat it for each")
    parser.add_argument("--seed", type=int, default=0, help="of the final runs; those of seed 0 come first")
    parser.add_argument("--seconds", type=float, default=4.0, help="CPU seconds of updates of a peer")
    parser.add_argument("--out", type=Path, default=Path("results/outside"), help="folder of the records")
    parser.add_argument("--page", type=Path, help="page whose table is made anew: docs/arena.md")
    chosen = parser.parse_args(arguments)
    run(chosen.task or list(TASKS), chosen.seed, chosen.seconds, chosen.out)
    text = part(Outside.of(records.read(chosen.out)))
    print(text)
    if chosen.page is not None:
        page = chosen.page.read_text(encoding="utf-8")
        files.write(chosen.page, fill(page, {"outside": text}).encode())


if __name__ == "__main__":
    main()
