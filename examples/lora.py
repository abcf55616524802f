"""LoRA: low-rank adapters on a frozen network, for a task that is a little other than the first.

The optimizer gets the adapters alone: ``blocks`` leaves out what is frozen. ``python examples/lora.py``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockhf import BlockHF, blocks


class LowRank(nn.Module):
    """A frozen layer plus ``B A``, which is zero at first."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + inputs @ self.A.T @ self.B.T


def labels(inputs: Tensor, teacher: Tensor) -> Tensor:
    return (inputs @ teacher + inputs[:, :5] ** 2).argmax(1)


def train(model: nn.Module, teacher: Tensor, arguments: argparse.Namespace) -> list[float]:
    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return logits, F.cross_entropy(logits, batch[1])

    optimizer = BlockHF(blocks.by_layer(model))
    losses = []
    for _ in range(arguments.steps):
        inputs = torch.randn(arguments.samples, 20)
        losses.append(float(optimizer.step(objective, (inputs, labels(inputs, teacher)))))
    return losses


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rank", type=int, default=4)
    arguments = parser.parse_args(argv)

    torch.manual_seed(0)
    teacher = torch.randn(20, 5)
    other = teacher + 0.5 * torch.randn(20, 2) @ torch.randn(2, 5)
    width = arguments.width
    model = nn.Sequential(
        nn.Linear(20, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5)
    )
    before = train(model, teacher, arguments)
    for index in (0, 2, 4):
        model[index] = LowRank(model[index], arguments.rank)
    sizes = [sum(p.numel() for p in model.parameters() if p.requires_grad is kind) for kind in (True, False)]
    frozen = [layer.layer.weight.clone() for layer in model if isinstance(layer, LowRank)]
    losses = train(model, other, arguments)
    kept = all(
        torch.equal(own, layer.layer.weight)
        for own, layer in zip(frozen, (model[0], model[2], model[4]), strict=True)
    )
    print(f"first task: loss {before[0]:.3f} -> {before[-1]:.3f}")
    print(f"second task: {sizes[0]} adapter parameters, {sizes[1]} frozen")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return {"losses": losses, "kept": kept, "sizes": sizes}


if __name__ == "__main__":
    main()
