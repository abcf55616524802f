"""Embeddings by a contrastive loss (InfoNCE): every sample of a batch is a negative of every other.

The loss is cross entropy of similarities, so the similarities are the outputs: in them it is convex. Samples
see each other, so micro-batches would be another loss. ``python examples/infonce.py``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockhf import BlockHF, blocks


def views(num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two views of each object: other nonlinear mixtures of what the object is, and noise."""
    latents = torch.randn(num_samples, 6, generator=generator)
    fixed = torch.Generator().manual_seed(7)
    first, second = (
        torch.tanh(latents @ torch.randn(6, 30, generator=fixed))
        + 0.3 * torch.randn(num_samples, 30, generator=generator)
        for _ in range(2)
    )
    return first, second


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--width", type=int, default=64)
    arguments = parser.parse_args(argv)

    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    width = arguments.width
    towers = nn.ModuleDict(
        {
            name: nn.Sequential(nn.Linear(30, width), nn.Tanh(), nn.Linear(width, 16))
            for name in ("left", "right")
        }
    )

    def similarities(batch: tuple[Tensor, Tensor]) -> Tensor:
        left, right = (F.normalize(towers[name](own), dim=1) for name, own in zip(towers, batch, strict=True))
        return left @ right.T / 0.1

    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        scores = similarities(batch)
        return scores, F.cross_entropy(scores, torch.arange(len(scores)))

    def found(batch: tuple[Tensor, Tensor]) -> float:
        """How often the other view of an object is the nearest of all."""
        with torch.no_grad():
            return float((similarities(batch).argmax(1) == torch.arange(len(batch[0]))).float().mean())

    unseen = views(256, generator)
    before = found(unseen)
    optimizer = BlockHF(blocks.by_module(towers))
    losses = []
    for _ in range(arguments.steps):
        losses.append(float(optimizer.step(objective, views(arguments.samples, generator))))
        print(optimizer.report)
    after = found(unseen)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the other view is found {before:.1%} -> {after:.1%}")
    return {"losses": losses, "before": before, "after": after}


if __name__ == "__main__":
    main()
