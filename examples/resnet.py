"""A residual network with BatchNorm, on images like those of CIFAR: colored shapes on noise.

Samples see each other through BatchNorm in training. That is exact here, and running statistics move once a
step. ``python examples/resnet.py``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockhf import BlockHF, blocks


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.first(inputs)))
        return F.relu(self.norms[1](self.second(hidden)) + self.shortcut(inputs))


def resnet(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        Residual(width, width, 2),
        Residual(width, 2 * width, 2),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)),
    )


def images(num_samples: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Five shapes in two colors, anywhere, on noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (num_samples,), generator=generator)
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centers = torch.randint(size // 4, 3 * size // 4, (num_samples, 2, 1, 1), generator=generator)
    dy, dx = (y - centers[:, 0]).float(), (x - centers[:, 1]).float()
    r, ring = dx.hypot(dy), size / 5
    shapes = torch.stack([
        r < ring,
        (r < ring) & (r > ring / 2),
        (dx.abs() < ring) & (dy.abs() < ring / 3),
        (dx.abs() < ring / 3) & (dy.abs() < ring),
        ((dx - dy).abs() < ring / 3) & (r < ring),
    ])  # fmt: skip
    own = shapes[labels % 5, torch.arange(num_samples)].float()
    pictures = 0.5 * torch.randn(num_samples, 3, size, size, generator=generator)
    pictures[torch.arange(num_samples), labels // 5] += own
    return pictures, labels


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--width", type=int, default=6)
    arguments = parser.parse_args(argv)

    unseen = images(500, arguments.size, seed=0)
    torch.manual_seed(0)
    model = resnet(arguments.width)

    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return logits, F.cross_entropy(logits, batch[1])

    optimizer = BlockHF(blocks.by_module(model))
    losses = []
    for step in range(arguments.steps):
        batch = images(arguments.samples, arguments.size, seed=step + 1)
        losses.append(float(optimizer.step(objective, batch)))
        print(optimizer.report)
    model.eval()
    with torch.no_grad():
        accuracy = float((model(unseen[0]).argmax(1) == unseen[1]).float().mean())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy on new images {accuracy:.3f}")
    return {"losses": losses, "accuracy": accuracy, "model": model}


if __name__ == "__main__":
    main()
