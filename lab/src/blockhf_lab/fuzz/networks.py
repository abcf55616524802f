"""Random small networks of many kinds, all drawn from one generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: Sequence[Callable[[], nn.Module]] = (
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.LeakyReLU,
)


@dataclass
class Network:
    """A network and what goes into it.

    Attributes:
        kind: Its name in the record.
        module: The network.
        draw: Inputs for so many samples, from a generator.
        num_outputs: The last dimension of the outputs.
        tokens: Predictions of a sample; 0 where the outputs have no such dimension.
        mixes: Whether samples see each other, as in BatchNorm.
        draws: Whether it uses random numbers.
        physics: Whether derivatives by the inputs are taken inside of the objective.
    """

    kind: str
    module: nn.Module
    draw: Callable[[int, torch.Generator], Tensor]
    num_outputs: int
    tokens: int = 0
    mixes: bool = False
    draws: bool = False
    physics: bool = False


def _vectors(width: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda number, generator: torch.randn(number, width, generator=generator, dtype=torch.float64)


class Gained(nn.Module):
    """A layer, its result times a parameter without dimensions, and a layer that is never called."""

    def __init__(self, inner: nn.Module, width: int, *, unused: bool) -> None:
        super().__init__()
        self.inner, self.gain = inner, nn.Parameter(torch.tensor(1.5))
        if unused:
            self.unused = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.inner(inputs) * self.gain
        return result


class Tied(nn.Module):
    """There and back with one matrix."""

    def __init__(self, width: int, hidden: int, activation: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, width) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.activation = activation

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.activation(inputs @ self.weight.T + self.bias) @ self.weight
        return result


class Mixture(nn.Module):
    """Experts, of which a sample's first entry chooses one; some may never be chosen."""

    def __init__(self, width: int, outputs: int, experts: int, reach: float) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, outputs) for _ in range(experts))
        self.reach = reach

    def forward(self, inputs: Tensor) -> Tensor:
        last = len(self.experts) - 1
        chosen = (inputs[:, 0].abs() * self.reach).nan_to_num(0.0).long().clamp(max=last)
        found = torch.stack([expert(inputs) for expert in self.experts], dim=1)
        return found.gather(1, chosen.view(-1, 1, 1).expand(-1, 1, found.shape[2]))[:, 0]


class Dispatch(Mixture):
    """The same where only those experts are called that have samples."""

    def forward(self, inputs: Tensor) -> Tensor:
        use = 0 if float(inputs.detach().abs().sum()) >= 0 else 1
        result: Tensor = self.experts[use](inputs)
        return result


class Recurrent(nn.Module):
    """A cell, step by step."""

    def __init__(self, cell: nn.Module, hidden: int, outputs: int, *, per_token: bool) -> None:
        super().__init__()
        self.cell, self.readout = cell, nn.Linear(hidden, outputs)
        self.hidden, self.per_token = hidden, per_token

    def forward(self, inputs: Tensor) -> Tensor:
        state: Any = inputs.new_zeros(len(inputs), self.hidden)
        if isinstance(self.cell, nn.LSTMCell):
            state = state, state
        found = []
        for step in range(inputs.shape[1]):
            state = self.cell(inputs[:, step], state)
            found.append(state[0] if isinstance(state, tuple) else state)
        result: Tensor = self.readout(torch.stack(found, 1) if self.per_token else found[-1])
        return result


class Attention(nn.Module):
    """One head of attention, by hand or by torch's own function, over tokens or vectors."""

    def __init__(self, width: int, outputs: int, *, vocabulary: int, by_hand: bool, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width) if vocabulary else None
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.readout = None if tied else nn.Linear(width, outputs)
        self.by_hand = by_hand

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        if self.by_hand:
            weights = (query @ key.transpose(1, 2) * query.shape[-1] ** -0.5).softmax(-1)
            mixed = weights @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value)
        hidden = hidden + mixed
        if self.readout is None:
            assert self.embedding is not None
            return torch.matmul(hidden, self.embedding.weight.T)
        result: Tensor = self.readout(hidden)
        return result


def mlp(rng: Random) -> Network:
    """Linear layers with whatever may stand between them."""
    width, outputs = rng.randint(1, 4), rng.randint(1, 3)
    layers: list[nn.Module] = []
    mixes = draws = False
    size = width
    for _ in range(rng.randint(0, 2)):
        hidden = rng.randint(1, 3)
        layer: nn.Module = nn.Linear(size, hidden, bias=rng.random() < 0.7)
        if rng.random() < 0.2:
            layer = Gained(layer, size, unused=rng.random() < 0.5)
        layers.append(layer)
        extra = rng.random()
        if extra < 0.15:
            layers.append(nn.LayerNorm(hidden))
        elif extra < 0.3:
            norm = nn.BatchNorm1d(hidden, momentum=rng.choice([0.1, None]))
            norm.train(rng.random() < 0.6)
            mixes = mixes or norm.training
            layers.append(norm)
        elif extra < 0.4:
            layers.append(nn.Dropout(0.3))
            draws = True
        layers.append(rng.choice(ACTIVATIONS)())
        size = hidden
    layers.append(nn.Linear(size, outputs, bias=rng.random() < 0.7))
    return Network("linear", nn.Sequential(*layers), _vectors(width), outputs, mixes=mixes, draws=draws)


def tied(rng: Random) -> Network:
    width = rng.randint(2, 4)
    module = Tied(width, rng.randint(1, 3), rng.choice(ACTIVATIONS)())
    return Network("tied weights", module, _vectors(width), width)


def mixture(rng: Random) -> Network:
    width, outputs = rng.randint(1, 3), rng.randint(1, 3)
    kind = rng.choice([Mixture, Dispatch])
    module = kind(width, outputs, rng.randint(2, 4), rng.choice([0.1, 1.0, 3.0]))
    return Network("mixture of experts", module, _vectors(width), outputs)


def convolution(rng: Random) -> Network:
    """Plain, grouped or transposed, in one or two dimensions."""
    flat, transposed = rng.random() < 0.5, rng.random() < 0.3
    groups = rng.choice([1, 2])
    channels, hidden, outputs = 2, 2, rng.randint(1, 2)
    kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d) if transposed else (nn.Conv1d, nn.Conv2d)
    layer = kinds[0 if flat else 1](
        channels, hidden, rng.choice([1, 2, 3]), stride=rng.choice([1, 2]), groups=groups, padding=0
    )
    shape = (channels, 3) if flat else (channels, 3, 3)
    norm: list[nn.Module] = []
    mixes = rng.random() < 0.2
    if mixes:
        norm = [nn.BatchNorm1d(hidden) if flat else nn.BatchNorm2d(hidden)]
    with torch.no_grad():
        size = layer(torch.zeros(1, *shape)).numel()
    module = nn.Sequential(layer, *norm, rng.choice(ACTIVATIONS)(), nn.Flatten(), nn.Linear(size, outputs))

    def draw(number: int, generator: torch.Generator) -> Tensor:
        return torch.randn(number, *shape, generator=generator, dtype=torch.float64)

    kind = ("transposed " if transposed else "") + f"convolution {1 if flat else 2}d"
    return Network(kind, module, draw, outputs, mixes=mixes)


def recurrent(rng: Random) -> Network:
    width, hidden, outputs = rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 2)
    cell = rng.choice([nn.RNNCell, nn.GRUCell, nn.LSTMCell])(width, hidden)
    length, per_token = rng.randint(1, 2), rng.random() < 0.5

    def draw(number: int, generator: torch.Generator) -> Tensor:
        return torch.randn(number, length, width, generator=generator, dtype=torch.float64)

    module = Recurrent(cell, hidden, outputs, per_token=per_token)
    return Network("recurrent cell", module, draw, outputs, tokens=length if per_token else 0)


def attention(rng: Random) -> Network:
    width, length, vocabulary = 2, rng.randint(1, 2), rng.choice([0, 2, 3])
    is_tied = vocabulary > 0 and rng.random() < 0.4
    outputs = vocabulary if is_tied else rng.randint(1, 2)
    module = Attention(width, outputs, vocabulary=vocabulary, by_hand=rng.random() < 0.6, tied=is_tied)

    def draw(number: int, generator: torch.Generator) -> Tensor:
        if vocabulary:
            return torch.randint(vocabulary, (number, length), generator=generator)
        return torch.randn(number, length, width, generator=generator, dtype=torch.float64)

    return Network("attention", module, draw, outputs, tokens=length)


def embedding(rng: Random) -> Network:
    vocabulary, width, outputs = rng.randint(2, 5), rng.randint(1, 3), rng.randint(1, 3)
    padding = 0 if rng.random() < 0.3 else None
    module = nn.Sequential(
        nn.Embedding(vocabulary, width, padding_idx=padding),
        rng.choice(ACTIVATIONS)(),
        nn.Linear(width, outputs),
    )

    def draw(number: int, generator: torch.Generator) -> Tensor:
        return torch.randint(vocabulary, (number,), generator=generator)

    return Network("embedding", module, draw, outputs)


def physics(rng: Random) -> Network:
    """A function whose derivatives are part of the outputs."""
    hidden = rng.randint(2, 4)
    smooth = rng.choice([nn.Tanh, nn.Sigmoid, nn.Softplus])
    module = nn.Sequential(nn.Linear(1, hidden), smooth(), nn.Linear(hidden, 1))
    return Network("physics residual", module, _vectors(1), 1, physics=True)


KINDS: Sequence[Callable[[Random], Network]] = (
    mlp, mlp, mlp, tied, mixture, convolution, convolution, recurrent, attention, embedding, physics
)  # fmt: skip


def draw_network(rng: Random) -> Network:
    """One of the kinds, its weights drawn too."""
    with torch.random.fork_rng():
        torch.manual_seed(rng.getrandbits(40))
        return rng.choice(KINDS)(rng)
