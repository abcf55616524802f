"""The paper's three tasks: network, data, blocks, settings, and what is measured.

The tasks without noise are in ``physics``. Each of the paper's comes in four sizes. ``paper`` is the paper's
own. ``long`` has the paper's networks and data for runs of hours: fewer samples are evaluated, and the CNN is
laid out and compiled for speed. ``cpu`` has the full data and about ten minutes a run on two cores. ``quick``
takes the digits that the lab carries and a small network, shows that all works in a few minutes, and says
nothing about optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockhf import blocks
from blockhf.blocks import Group
from blockhf_lab import autoencoder, data, lstm, residual

Batch = tuple[Tensor, Tensor]
Preset = Literal["quick", "cpu", "long", "paper"]
PRESETS: tuple[Preset, ...] = ("quick", "cpu", "long", "paper")


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs and what to make of them, sample by sample."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, index: Any) -> Batch:
        """The samples of an index or a slice."""
        inputs = self.inputs[index]
        return inputs, inputs if self.targets is self.inputs else self.targets[index]


@dataclass(frozen=True, eq=False)
class Task:
    """All that a run needs to know, but for the optimizer.

    Attributes:
        name: As on the command line.
        preset: Its size.
        title: For people.
        make_model: Draws the model from torch's global generator.
        make_blocks: The paper's blocks of the model.
        loss: Of outputs and targets, a mean over the samples.
        load: Reads training and test samples; takes the folder that the user named, or none.
        metric: What the test is judged by.
        large_batch: The batch of HF. One gradient on it is one GE.
        race_batch: What the library's default method is given, to take from it what it needs.
        curvature_batches: Those of HF and block HF in the paper's figure.
        adam_batches: Those of Adam there.
        recipe: Options of ``BlockHF.paper``.
        targets: Values of the test metric; comparisons tell when each was reached.
        budget: Of a run, unless another is named.
        num_evaluated: How many training samples, from the front, the train metric is taken from.
        growth: The next evaluation is when updates have grown by this factor.
        averaging: Decay of the averaged parameters (Polyak) that are tested, if there are any.
        averaging_warm_up: Whether the decay is (1 + n) / (10 + n) in update n while that is less, as short
            runs would else be tested near their start. The paper has none.
        stop: When a run ends before its budget: see ``runs.Config``.
        compile: Whether HF compiles its products, which changes their speed alone.
        race_search: Budget of each setting in the search of a race, unless another is named.
        race_budget: Budget of the final runs of a race, unless another is named.
        threads: Of torch, unless others are named; zero for torch's own.
        is_complete: Whether all samples, in their order, are in each update; there is no noise then.
        draw: Draws about so many new samples by torch's generator, where the loss is an integral over them.
    """

    name: str
    preset: Preset
    title: str
    make_model: Callable[[], nn.Module]
    make_blocks: Callable[[nn.Module], list[Group]]
    loss: Callable[[Tensor, Tensor], Tensor]
    load: Callable[[Path | None], tuple[Samples, Samples]]
    metric: Literal["loss", "accuracy", "error"]
    large_batch: int
    race_batch: int
    curvature_batches: tuple[int, ...]
    adam_batches: tuple[int, ...]
    recipe: Mapping[str, Any]
    targets: tuple[float, ...]
    budget: str
    num_evaluated: int
    growth: float = 1.1
    averaging: float | None = None
    averaging_warm_up: bool = False
    stop: str = "budget"
    compile: bool = False
    race_search: str = "40ge"
    race_budget: str = "200ge"
    threads: int = 0
    is_complete: bool = False
    draw: Callable[[int], Batch] | None = None

    @property
    def test_key(self) -> str:
        """The name under which records hold the test metric."""
        return f"test_{self.metric}"

    def reached(self, value: float | None, target: float) -> bool:
        """Whether a value of the test metric is as good as a target."""
        if value is None:
            return False
        return value >= target if self.metric == "accuracy" else value <= target

    def objective(self, model: nn.Module) -> Callable[[Batch], tuple[Tensor, Tensor]]:
        """What the optimizer minimizes."""

        def evaluate(batch: Batch) -> tuple[Tensor, Tensor]:
            outputs = model(batch[0])
            return outputs, self.loss(outputs, batch[1])

        return evaluate

    def train_metrics(self, model: nn.Module, samples: Samples) -> dict[str, float]:
        """What training samples are judged by."""
        return evaluate(self, model, samples)

    def test_metrics(self, model: nn.Module, samples: Samples) -> dict[str, float]:
        """What test samples are judged by."""
        return evaluate(self, model, samples)

    def figure(self) -> list[str]:
        """The library's default and the optimizers of the paper's figure; without noise others."""
        if self.is_complete:
            return ["blockhf", "least-squares", "adam:lr=0.003", "full-lbfgs", "ssbfgs", "kernel-gn"]
        return [
            f"blockhf:batch={self.race_batch}",
            *(f"paper:curvature={size}" for size in self.curvature_batches),
            *(f"hf:curvature={size}" for size in self.curvature_batches),
            *(f"adam:lr=0.001,batch={size}" for size in self.adam_batches),
        ]

    def settings(self) -> dict[str, Any]:
        """What is written into a run's ``config.json``, and must be the same when it is resumed."""
        return {
            "title": self.title,
            "large_batch": self.large_batch,
            "recipe": {
                key: list(value) if isinstance(value, tuple) else value for key, value in self.recipe.items()
            },
            "metric": self.metric,
            "targets": list(self.targets),
            "num_evaluated": self.num_evaluated,
            "growth": self.growth,
            "averaging": self.averaging,
            "averaging_warm_up": self.averaging_warm_up,
        }


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, samples: Samples, chunk: int = 2000) -> dict[str, float]:
    """Mean loss, and accuracy where there are classes, over all of the samples."""
    was_training = model.training
    model.eval()
    loss = right = 0.0
    for start in range(0, len(samples), chunk):
        inputs, targets = samples.take(slice(start, start + chunk))
        outputs = model(inputs)
        loss += float(task.loss(outputs, targets)) * len(inputs)
        if task.metric == "accuracy":
            right += int((outputs.argmax(dim=1) == targets).sum())
    model.train(was_training)
    found = {"loss": loss / len(samples)}
    if task.metric == "accuracy":
        found["accuracy"] = right / len(samples)
    return found


# The tasks


def get(name: str, preset: str = "cpu") -> Task:
    """A task by its name.

    >>> get("autoencoder", "paper").figure()[:2]
    ['blockhf:batch=60000', 'paper:curvature=3000']
    """
    from blockhf_lab import physics  # which builds on this module

    known: Mapping[str, Callable[[Any], Task]] = {**TASKS, **physics.TASKS}
    if name not in known:
        raise ValueError(f"There is no task {name!r}. There are {', '.join(known)}.")
    if preset not in PRESETS:
        raise ValueError(f"There is no preset {preset!r}. There are {', '.join(PRESETS)}.")
    return known[name](preset)


def _autoencoder(preset: Preset) -> Task:
    def load(folder: Path | None) -> tuple[Samples, Samples]:
        pictures = data.digits() if preset == "quick" else data.mnist(folder)
        train, test = pictures.train_images, pictures.test_images
        return Samples(train, train), Samples(test, test)

    task = Task(
        name="autoencoder",
        preset=preset,
        title="Autoencoder 784-1000-500-250-30 of MNIST",
        make_model=autoencoder.Autoencoder,
        make_blocks=blocks.by_module,
        loss=autoencoder.reconstruction_error,
        load=load,
        metric="loss",
        large_batch=6000,
        race_batch=60_000,
        curvature_batches=(3000, 1200, 600),
        adam_batches=(600, 6000),
        recipe={"lr": 0.1, "damping": 0.0, "max_cg_steps": 30, "warm_start": 0.95},
        targets=(20.0, 15.0, 10.0, 7.0),
        budget="1000epochs",
        num_evaluated=60_000,
        stop="worse",
    )
    if preset == "paper":
        return task
    if preset == "long":
        return replace(task, budget="300updates", num_evaluated=10_000, stop="budget")
    if preset == "cpu":
        return replace(task, budget="600s", num_evaluated=10_000, growth=1.05, stop="budget")
    return replace(
        task,
        title="Autoencoder 784-200-60-20 of 6,000 MNIST digits",
        make_model=partial(autoencoder.Autoencoder, (784, 200, 60, 20)),
        large_batch=1500,
        race_batch=3000,
        curvature_batches=(750, 300, 150),
        adam_batches=(150, 1500),
        targets=(40.0, 25.0, 18.0),
        budget="300ge",
        num_evaluated=1000,
        stop="budget",
    )


def _lstm(preset: Preset) -> Task:
    def load(folder: Path | None) -> tuple[Samples, Samples]:
        pictures = data.digits() if preset == "quick" else data.mnist(folder)
        return (
            Samples(sequences(pictures.train_images), pictures.train_labels),
            Samples(sequences(pictures.test_images), pictures.test_labels),
        )

    task = Task(
        name="lstm",
        preset=preset,
        title="Three peephole LSTM layers of 10 cells on MNIST as sequences of 49 pixels",
        make_model=partial(lstm.SequenceClassifier, 1, 10),
        make_blocks=lambda model: blocks.by_pattern(model, lstm.PATTERNS),
        loss=F.cross_entropy,
        load=load,
        metric="accuracy",
        large_batch=6000,
        race_batch=6000,
        curvature_batches=(3000, 1200, 600),
        adam_batches=(100, 2000, 6000),
        recipe={"lr": 0.1, "damping": 0.01, "max_cg_steps": 100, "cg_rtol": 1e-3, "warm_start": 0.95},
        targets=(0.5, 0.8, 0.9, 0.95),
        budget="1000epochs",
        num_evaluated=60_000,
        stop="worse",
    )
    if preset == "paper":
        return task
    if preset == "long":
        return replace(task, budget="300updates", num_evaluated=10_000, stop="budget")
    if preset == "cpu":
        return replace(task, budget="600s", num_evaluated=10_000, growth=1.05, stop="budget")
    return replace(
        task,
        title="Three peephole LSTM layers of 10 cells on 6,000 MNIST digits as sequences",
        large_batch=1500,
        race_batch=3000,
        curvature_batches=(300, 150),
        adam_batches=(100, 1500),
        targets=(0.3, 0.4, 0.5),
        budget="60ge",
        num_evaluated=1000,
        growth=1.25,
        stop="budget",
    )


def _residual(preset: Preset) -> Task:
    def load(folder: Path | None) -> tuple[Samples, Samples]:
        if preset == "quick":
            # CIFAR-10 is not ours to carry, so the small size reads the carried digits.
            pictures = data.digits()
            return (
                Samples(pictures.train_images.view(-1, 1, 28, 28), pictures.train_labels),
                Samples(pictures.test_images.view(-1, 1, 28, 28), pictures.test_labels),
            )
        colored = data.cifar10(folder)
        return (
            Samples(standardized(colored.train_images), colored.train_labels),
            Samples(standardized(colored.test_images), colored.test_labels),
        )

    task = Task(
        name="cnn",
        preset=preset,
        title="Residual network of 16, 32 and 64 channels on CIFAR-10",
        make_model=residual.ResidualNetwork,
        make_blocks=lambda model: blocks.by_pattern(model, residual.PATTERNS),
        loss=F.cross_entropy,
        load=load,
        metric="accuracy",
        large_batch=2048,
        race_batch=2048,
        curvature_batches=(512, 256, 128),
        adam_batches=(256, 2048),
        recipe={
            "lr": 0.1,
            "damping": 0.1,
            "max_cg_steps": 30,
            "warm_start": 0.95,
            "slow_start": (10, 2),
        },
        targets=(0.4, 0.5, 0.6, 0.7),
        budget="1000epochs",
        num_evaluated=50_000,
        averaging=0.99,
        stop="worse",
    )
    if preset == "paper":
        return task
    if preset == "long":
        return replace(
            task,
            make_model=_channels_last,
            budget="150updates",
            num_evaluated=5000,
            growth=1.15,
            averaging_warm_up=True,
            stop="budget",
            compile=True,
        )
    if preset == "cpu":
        return replace(
            task,
            title="Residual network of 8, 16 and 32 channels on CIFAR-10",
            make_model=partial(residual.ResidualNetwork, 10, (8, 16, 32)),
            budget="600s",
            num_evaluated=2000,
            growth=1.15,
            averaging_warm_up=True,
            stop="budget",
        )
    return replace(
        task,
        title="Residual network of 4, 8 and 16 channels on 6,000 MNIST digits",
        make_model=partial(residual.ResidualNetwork, 10, (4, 8, 16), 1),
        large_batch=500,
        race_batch=500,
        curvature_batches=(125, 60),
        adam_batches=(60, 500),
        targets=(0.3, 0.5, 0.7),
        budget="100ge",
        num_evaluated=1000,
        growth=1.25,
        averaging_warm_up=True,
        stop="budget",
    )


TASKS: Mapping[str, Callable[[Any], Task]] = {
    "autoencoder": _autoencoder,
    "lstm": _lstm,
    "cnn": _residual,
}
"""The paper's tasks by name; each is made for a preset."""


def sequences(pictures: Tensor) -> Tensor:
    """Pictures of 28 × 28 pixels, pooled to 7 × 7 by averages and read row by row."""
    return F.avg_pool2d(pictures.view(-1, 1, 28, 28), 4).view(-1, 49, 1)


def _channels_last() -> nn.Module:
    """The paper's residual network, laid out as convolutions are fastest."""
    model: nn.Module = residual.ResidualNetwork()
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


# Mean and deviation of the training pictures, by channel.
_MEAN, _DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def standardized(pictures: Tensor) -> Tensor:
    """Pictures with mean 0 and deviation 1 in each channel, in place."""
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _DEVIATION))
    return pictures.sub_(mean).div_(deviation)
