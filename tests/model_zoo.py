"""Families of models as users have them, small: what is tried on all of them is tried on these.

Each maker returns an objective, a batch and groups. Those of the transformers library need it installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockhf import blocks

Made = tuple[Callable[[Any], tuple[Any, Tensor]], Any, list[Any]]


def classes(*shape: int, num: int) -> Tensor:
    return torch.randint(0, num, shape)


def mlp(size: int = 256) -> Made:
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 10))

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return logits, F.cross_entropy(logits, batch[1])

    return objective, (torch.randn(size, 64), classes(size, num=10)), blocks.by_layer(model)


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(self.inner(inputs) + self.skip(inputs))


def resnet18(size: int = 32, width: int = 8) -> Made:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for after, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [_Residual(channels, after, stride), _Residual(after, after, 1)]
        channels = after
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return logits, F.cross_entropy(logits, batch[1])

    return objective, (torch.randn(size, 3, 32, 32), classes(size, num=10)), blocks.by_layer(model)


class _Decoder(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.before(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3)
        own = F.scaled_dot_product_attention(*parts.unbind(2), is_causal=True)
        x = x + self.out(own.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """A byte-level language model, with one matrix for embedding and head or with two."""

    def __init__(
        self, width: int = 64, depth: int = 2, length: int = 32, num: int = 96, tied: bool = True
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(num, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(_Decoder(width, length) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num, bias=False)
        for embedding in (self.embed, self.place):
            nn.init.normal_(embedding.weight, std=0.05)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.layers(x)))
        return logits


def gpt(size: int = 32, **sizes: Any) -> Made:
    model = GPT(**sizes)

    def objective(batch: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(batch[:, :-1])
        return logits, F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return objective, classes(size, 33, num=96), blocks.by_layer(model)


def bert(size: int = 32) -> Made:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=3,
    )
    model = transformers.BertForSequenceClassification(config)

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        result = model(**batch)
        return result.logits, result.loss

    batch = {
        "input_ids": classes(size, 16, num=100),
        "attention_mask": torch.ones(size, 16, dtype=torch.long),
        "labels": classes(size, num=3),
    }
    return objective, batch, blocks.by_layer(model)


def t5(size: int = 16) -> Made:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        result = model(**batch)
        return result.logits, result.loss

    labels = classes(size, 8, num=100)
    labels[:, -2:] = -100
    return objective, {"input_ids": classes(size, 12, num=100), "labels": labels}, blocks.by_layer(model)


def vit(size: int = 32) -> Made:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=10,
    )
    model = transformers.ViTForImageClassification(config)

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        logits = model(pixel_values=batch[0]).logits
        return logits, F.cross_entropy(logits, batch[1])

    return objective, (torch.randn(size, 3, 16, 16), classes(size, num=10)), blocks.by_layer(model)


def packed_lstm(size: int = 32) -> Made:
    embed, lstm, head = nn.Embedding(50, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 5)
    model = nn.ModuleList([embed, lstm, head])

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        tokens, lengths, labels = batch
        packed = nn.utils.rnn.pack_padded_sequence(
            embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (state, _) = lstm(packed)
        logits = head(state[-1])
        return logits, F.cross_entropy(logits, labels)

    batch = classes(size, 12, num=50), torch.randint(3, 13, (size,)), classes(size, num=5)
    return objective, batch, blocks.by_layer(model)


class _Experts(nn.Module):
    def __init__(self, width: int = 32, num: int = 4) -> None:
        super().__init__()
        self.enter, self.gate, self.head = nn.Linear(16, width), nn.Linear(width, num), nn.Linear(width, 5)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num))

    def forward(self, inputs: Tensor) -> Tensor:
        x = torch.tanh(self.enter(inputs))
        weights, chosen = torch.softmax(self.gate(x), 1).topk(2, dim=1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            total = total.index_add(0, rows, torch.tanh(expert(x[rows])) * weights[rows, place, None])
        logits: Tensor = self.head(x + total)
        return logits


def moe(size: int = 64) -> Made:
    model = _Experts()

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return logits, F.cross_entropy(logits, batch[1])

    return objective, (torch.randn(size, 16), classes(size, num=5)), blocks.by_layer(model)


def vae(size: int = 64) -> Made:
    encode = nn.Sequential(nn.Linear(36, 32), nn.ReLU(), nn.Linear(32, 16))
    decode = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 36))

    def objective(batch: Tensor) -> tuple[Any, Tensor]:
        mean, log_variance = encode(batch).chunk(2, 1)
        sample = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        mean, log_variance = mean.clone(), log_variance.clone()  # the loss is computed from these
        decoded = decode(sample)
        own = F.binary_cross_entropy_with_logits(decoded, batch, reduction="sum") / len(batch)
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum() / 2 / len(batch)
        return (mean, log_variance, decoded), own + divergence

    model = nn.ModuleList([encode, decode])
    return objective, torch.rand(size, 36).round(), blocks.by_layer(model)


def ctc(size: int = 16) -> Made:
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 7))

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets, lengths = batch
        logits = model(inputs)
        steps = torch.full((len(inputs),), inputs.shape[1])
        log_probabilities = F.log_softmax(logits, -1).transpose(0, 1)
        return logits, F.ctc_loss(log_probabilities, targets, steps, lengths)

    batch = torch.randn(size, 15, 12), torch.randint(1, 7, (size, 4)), torch.randint(2, 5, (size,))
    return objective, batch, blocks.by_layer(model)  # its loss has no second derivative


def poisson(size: int = 256) -> Made:
    model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))

    def objective(points: Tensor) -> tuple[Tensor, Tensor]:
        points = points.detach().requires_grad_()
        value = model(points) * (points * (1 - points)).prod(1, keepdim=True)
        (slope,) = torch.autograd.grad(value.sum(), points, create_graph=True)
        bends = [
            torch.autograd.grad(slope[:, place].sum(), points, create_graph=True)[0][:, place]
            for place in (0, 1)
        ]
        source = torch.sin(math.pi * points).prod(1)
        residual = bends[0] + bends[1] + source
        return residual, residual.square().mean()

    return objective, torch.rand(size, 2), blocks.by_layer(model)


ZOO: dict[str, Callable[..., Made]] = {
    maker.__name__: maker
    for maker in (mlp, resnet18, gpt, bert, t5, vit, packed_lstm, moe, vae, ctc, poisson)
}
