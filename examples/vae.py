"""A variational autoencoder: outputs of three kinds, a loss that ties them, and noise that is replayed.

No output may be computed from another one: the decoder reads mean and scale, so the loss reads clones of
them. Each step draws new noise, and all its evaluations draw the same. ``python examples/vae.py``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockhf import BlockHF, blocks


class VAE(nn.Module):
    def __init__(self, num_pixels: int, width: int, num_latents: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(num_pixels, width), nn.Tanh(), nn.Linear(width, 2 * num_latents)
        )
        self.decoder = nn.Sequential(nn.Linear(num_latents, width), nn.Tanh(), nn.Linear(width, num_pixels))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_scale = self.encoder(pictures).chunk(2, dim=1)
        latents = mean + torch.randn_like(mean) * log_scale.exp()
        return self.decoder(latents), mean.clone(), log_scale.clone()


def bars(num_samples: int, size: int, generator: torch.Generator) -> Tensor:
    """Pictures of horizontal and vertical bars, each there with probability 1/4."""
    rows, columns = (torch.rand(2, num_samples, size, generator=generator) < 0.25).float()
    return torch.maximum(rows[:, :, None], columns[:, None, :]).flatten(1)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--size", type=int, default=6)
    parser.add_argument("--width", type=int, default=64)
    arguments = parser.parse_args(argv)

    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = VAE(arguments.size**2, arguments.width, 2 * arguments.size)

    def objective(pictures: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        logits, mean, log_scale = model(pictures)
        surprise = F.binary_cross_entropy_with_logits(logits, pictures, reduction="none").sum(1)
        divergence = 0.5 * (mean**2 + (2 * log_scale).exp() - 1 - 2 * log_scale).sum(1)
        return (logits, mean, log_scale), (surprise + divergence).mean()

    optimizer = BlockHF(blocks.by_module(model))
    losses = []
    for step in range(arguments.steps):
        pictures = bars(arguments.samples, arguments.size, generator)
        losses.append(float(optimizer.step(objective, pictures)))
        if step % 10 == 0:
            print(optimizer.report)
    print(f"negative evidence bound {losses[0]:.2f} -> {losses[-1]:.2f} nats a picture")
    return {"losses": losses, "model": model}


if __name__ == "__main__":
    main()
