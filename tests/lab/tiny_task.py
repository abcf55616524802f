"""A task that trains in milliseconds, and a program that makes one run of it, to be killed."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blockhf import blocks
from blockhf_lab import autoencoder, cli, runs, tasks
from blockhf_lab.data import digits


def task(preset: Any = "quick", **changes: Any) -> tasks.Task:
    """A small autoencoder on a part of the carried digits, tested with averaged parameters."""
    options: dict[str, Any] = {
        "name": "tiny",
        "preset": preset,
        "title": "A tiny autoencoder",
        "make_model": partial(autoencoder.Autoencoder, (784, 12, 4)),
        "make_blocks": blocks.by_module,
        "loss": autoencoder.reconstruction_error,
        "load": load,
        "metric": "loss",
        "large_batch": 60,
        "race_batch": 100,
        "curvature_batches": (30, 20),
        "adam_batches": (20, 60),
        "recipe": {"lr": 0.1, "damping": 0.1, "max_cg_steps": 3, "slow_start": (2, 1)},
        "targets": (90.0, 50.0, 1.0),
        "budget": "20updates",
        "num_evaluated": 50,
        "growth": 1.3,
        "averaging": 0.9,
        "averaging_warm_up": True,
    }
    return tasks.Task(**{**options, **changes})


def load(folder: Path | None) -> tuple[tasks.Samples, tasks.Samples]:
    """200 digits to train on and 40 to test with."""
    pictures = digits()
    train, test = pictures.train_images[:200], pictures.test_images[:40]
    return tasks.Samples(train, train), tasks.Samples(test, test)


def random_task(preset: Any = "quick") -> tasks.Task:
    """The tiny task with dropout, so that a run depends on the generator's state."""

    def make_model() -> torch.nn.Module:
        model = autoencoder.Autoencoder((784, 12, 4))
        return torch.nn.Sequential(torch.nn.Dropout(0.2), model)

    return task(preset, name="random", make_model=make_model, make_blocks=blocks.single)


def register() -> None:
    """Make the tasks known by their names."""
    tasks.TASKS = {**tasks.TASKS, "tiny": task, "random": random_task}


def command_line(*arguments: str) -> None:
    """``blockhf`` with the tasks made known."""
    register()
    sys.argv = ["blockhf", *arguments]
    cli.main()


def main(folder: str, task: str, optimizer: str, budget: str, checkpoint_seconds: str) -> None:
    register()
    torch.set_num_threads(1)
    config = runs.Config(task, "quick", optimizer, seed=3, budget=budget)
    with runs.Run(config, Path(folder), load(None), resume=True) as run:
        runs.train(run, checkpoint_seconds=float(checkpoint_seconds))


if __name__ == "__main__":
    command_line(*sys.argv[2:]) if sys.argv[1] == "blockhf" else main(*sys.argv[1:])
