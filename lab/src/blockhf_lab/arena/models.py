"""The networks of the arena that the paper does not have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockhf_lab.transformer import Transformer


def mlp(sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers as torch draws them, with activations between them and none after the last."""
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(num_inputs, num_outputs), activation()]
    return nn.Sequential(*layers[:-1])


class Halves(nn.Module):
    """An encoder and a decoder, each a perceptron with ReLU; the code has its activation too."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.encoder = nn.Sequential(mlp(sizes), nn.ReLU())
        self.decoder = mlp(sizes[::-1])

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.decoder(self.encoder(inputs))
        return outputs


class NormalizedBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm and a shortcut around them (He et al., 2016)."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(num_inputs, num_outputs, 3, stride=stride, padding=1, bias=False)
        self.enter_norm = nn.BatchNorm2d(num_outputs)
        self.leave = nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False)
        self.leave_norm = nn.BatchNorm2d(num_outputs)
        self.shortcut = (
            nn.Identity()
            if num_inputs == num_outputs and stride == 1
            else nn.Conv2d(num_inputs, num_outputs, 1, stride=stride, bias=False)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        inner = F.relu(self.enter_norm(self.enter(inputs)))
        return F.relu(self.leave_norm(self.leave(inner)) + self.shortcut(inputs))


class NormalizedResNet(nn.Module):
    """A convolution, three residual blocks with BatchNorm, the average over the picture, a linear layer."""

    def __init__(self, channels: tuple[int, int, int] = (8, 16, 32), num_classes: int = 10) -> None:
        super().__init__()
        bottom, middle, top = channels
        self.first = nn.Sequential(nn.Conv2d(3, bottom, 3, padding=1, bias=False), nn.BatchNorm2d(bottom))
        self.bottom = NormalizedBlock(bottom, bottom, 1)
        self.middle = NormalizedBlock(bottom, middle, 2)
        self.top = NormalizedBlock(middle, top, 2)
        self.head = nn.Linear(top, num_classes)

    def forward(self, pictures: Tensor) -> Tensor:
        features = self.top(self.middle(self.bottom(F.relu(self.first(pictures)))))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


class GPT(Transformer):
    """Logits of the next character for each position; ``is_tied`` shares the embedding with the head."""

    def __init__(
        self, vocabulary: int, length: int, width: int, num_layers: int, num_heads: int, *, is_tied: bool
    ) -> None:
        super().__init__(vocabulary, length, width, num_layers, num_heads, is_causal=True, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        if is_tied:
            self.head.weight = self.tokens.weight


class RecurrentLanguageModel(nn.Module):
    """Logits of the next character from an ``nn.LSTM``."""

    def __init__(self, vocabulary: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.tokens(tokens))[0])
        return logits


class Factorization(nn.Module):
    """A rating from a user's and an item's vector, their biases and one bias for all."""

    def __init__(self, num_users: int, num_items: int, rank: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(num_users, rank), nn.Embedding(num_items, rank)
        self.user_bias, self.item_bias = nn.Embedding(num_users, 1), nn.Embedding(num_items, 1)
        self.bias = nn.Parameter(torch.zeros(1))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        for table in (self.user_bias, self.item_bias):
            nn.init.zeros_(table.weight)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        product = (self.users(users) * self.items(items)).sum(dim=-1)
        rating: Tensor = product + self.user_bias(users)[:, 0] + self.item_bias(items)[:, 0] + self.bias
        return rating
