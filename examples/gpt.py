"""A GPT on the sources of Python's standard library, letter by letter, with the embedding as its head.

Each letter is a prediction, so 256 sequences of 32 letters are 8,192 of them. ``python examples/gpt.py``
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockhf import BlockHF, blocks


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        parts = self.attention(self.norms[0](inputs)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        hidden = inputs + self.out(mixed)
        return hidden + self.mlp(self.norms[1](hidden))


class GPT(nn.Module):
    def __init__(self, num_letters: int, context: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(num_letters, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList([Layer(width, 2) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        for embedding in (self.letters, self.places):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.letters(text) + self.places.weight[: text.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden) @ self.letters.weight.T  # the same weight again


def library_text(num_letters: int) -> Tensor:
    """The sources one after the other, as numbers below 128."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text, size = bytearray(), 0
    for file in files:
        text += bytes(letter for letter in file.read_bytes() if letter < 128)
        if (size := len(text)) >= num_letters:
            break
    return torch.tensor(list(text[: min(size, num_letters)]))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args(argv)

    text = library_text(1_000_000)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = GPT(128, arguments.context, arguments.width, arguments.layers)

    def draw() -> tuple[Tensor, Tensor]:
        starts = torch.randint(
            len(text) - arguments.context - 1, (arguments.sequences, 1), generator=generator
        )
        letters = text[starts + torch.arange(arguments.context + 1)]
        return letters[:, :-1], letters[:, 1:]

    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return logits, F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    optimizer = BlockHF(blocks.by_module(model))
    losses = []
    for _ in range(arguments.steps):
        losses.append(float(optimizer.step(objective, draw())))
        print(optimizer.report)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a letter")
    return {"losses": losses}


if __name__ == "__main__":
    main()
