"""Ignite: an engine with handlers and checkpoints, saved half-way and resumed to the same parameters.

``python examples/trainers/ignite_engine.py``
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch import Tensor, nn

from blockhf import BlockHF, blocks
from blockhf.integrations.ignite import update_function


def train(
    arguments: argparse.Namespace, folder: Path, epochs: int, resume: Path | None = None
) -> tuple[Tensor, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, arguments.width), nn.Tanh(), nn.Linear(arguments.width, 5))
    inputs = torch.randn(arguments.samples, 20)
    targets = (inputs @ torch.randn(20, 5) + inputs[:, :5] ** 2).argmax(1)
    size = arguments.samples // 4
    loader = [
        (inputs[start : start + size], targets[start : start + size]) for start in range(0, 4 * size, size)
    ]

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return logits, F.cross_entropy(logits, batch[1])

    optimizer = BlockHF(blocks.by_layer(model))
    trainer = Engine(update_function(optimizer, objective))
    losses: list[float] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: losses.append(float(engine.state.output))
    )
    kept = {"model": model, "optimizer": optimizer, "trainer": trainer}
    saver = Checkpoint(kept, DiskSaver(str(folder), require_empty=False), n_saved=None)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    if resume is not None:
        Checkpoint.load_objects(kept, torch.load(resume, weights_only=True))
    trainer.run(loader, max_epochs=epochs)
    return nn.utils.parameters_to_vector(model.parameters()).detach(), losses


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args(argv)
    folder = arguments.folder or Path(tempfile.mkdtemp())

    whole, losses = train(arguments, folder, arguments.epochs)
    saved = folder / f"checkpoint_{4 * (arguments.epochs // 2)}.pt"
    resumed, _ = train(arguments, folder, arguments.epochs, saved)
    found = {"losses": losses, "equal": torch.equal(whole, resumed)}
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps; resumed equal: {found['equal']}")
    return found


if __name__ == "__main__":
    main()
