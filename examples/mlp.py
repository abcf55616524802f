"""One's own network: a module, an objective, a loop. It learns to tell the arms of three spirals apart.

``python examples/mlp.py``
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockhf import BlockHF, blocks


class MLP(nn.Module):
    """Nothing here knows of the optimizer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


def spirals(num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    arm = torch.randint(3, (num_samples,), generator=generator)
    radius = torch.rand(num_samples, generator=generator)
    angle = 2 * math.pi * (1.5 * radius + arm / 3) + 0.1 * torch.randn(num_samples, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--width", type=int, default=32)
    arguments = parser.parse_args(argv)

    generator = torch.Generator().manual_seed(0)
    unseen = spirals(1000, generator)
    torch.manual_seed(0)
    model = MLP(arguments.width)

    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        logits = model(inputs)
        return logits, F.cross_entropy(logits, targets)

    optimizer = BlockHF(blocks.by_layer(model))
    losses = []
    for step in range(arguments.steps):
        losses.append(float(optimizer.step(objective, spirals(arguments.samples, generator))))
        if step % 10 == 0:
            print(optimizer.report)
    with torch.no_grad():
        accuracy = float((model(unseen[0]).argmax(1) == unseen[1]).float().mean())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy on new points {accuracy:.3f}")
    return {"losses": losses, "accuracy": accuracy, "model": model}


if __name__ == "__main__":
    main()
