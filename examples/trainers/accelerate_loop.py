"""Accelerate: a prepared optimizer on one process or several, saved half-way and resumed.

``accelerate launch --cpu --num_processes 2 examples/trainers/accelerate_loop.py``
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from blockhf import BlockHF, Closure, blocks
from blockhf.integrations.accelerate import mesh_of


def loader_of(num_samples: int, batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, 20, generator=generator)
    targets = (inputs @ torch.randn(20, 5, generator=generator) + inputs[:, :5] ** 2).argmax(1)
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch_size)


def train(
    arguments: argparse.Namespace, accelerator: Accelerator, epochs: range, folder: Path, *, resume: bool
) -> tuple[Tensor, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, arguments.width), nn.Tanh(), nn.Linear(arguments.width, 5))
    optimizer = BlockHF(blocks.by_layer(model), mesh=mesh_of(accelerator))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = loader_of(arguments.samples, arguments.samples // 4 // accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume:
        accelerator.load_state(str(folder))
    network = accelerator.unwrap_model(model)  # not the DistributedDataParallel around it

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        logits = network(inputs)
        return logits, F.cross_entropy(logits, targets)

    for _ in epochs:
        for batch in loader:
            optimizer.step(Closure(objective, batch))
            scheduler.step()
    if not resume:
        accelerator.save_state(str(folder))
    report = optimizer.optimizer.report
    end = nn.utils.parameters_to_vector(network.parameters()).detach().clone()
    accelerator.free_memory()
    return end, report


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--precision", default="no")
    # The same on all processes.
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "blockhf-accelerate")
    arguments = parser.parse_args(argv)
    accelerator = Accelerator(cpu=True, mixed_precision=arguments.precision)

    half = arguments.epochs // 2
    whole, report = train(
        arguments, accelerator, range(arguments.epochs), arguments.folder / "whole", resume=False
    )
    train(arguments, accelerator, range(half), arguments.folder / "half", resume=False)
    resumed, _ = train(
        arguments, accelerator, range(half, arguments.epochs), arguments.folder / "half", resume=True
    )
    equal = torch.equal(whole, resumed)
    accelerator.print(f"{accelerator.num_processes} processes; {report}")
    accelerator.print(f"resumed equal: {equal}")
    return {"equal": equal, "parameters": whole, "loss": report.loss, "processes": accelerator.num_processes}


if __name__ == "__main__":
    main()
