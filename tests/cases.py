"""Networks × losses, small and in float64, for tests against dense matrices.

A case has a name, makes its model and its batch, and knows its loss and its seed. Every batch is a pair of
inputs and targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockhf import blocks
from blockhf.blocks import Block, Group
from blockhf_lab.lstm import SequenceClassifier

NUM_SAMPLES = 5
NUM_STEPS = 3  # of sequences
NUM_CLASSES = 3


@dataclass(frozen=True)
class Network:
    """A model and inputs for it.

    Args:
        name: Its name.
        build: Makes the model.
        inputs: Makes a number of inputs.
        shape: The shape of one sample's predictions.
        predict: From the output tensors to the predictions, which are what a loss compares with targets.
        separable: Whether a sample's outputs depend on that sample alone.
        random: Whether the model draws random numbers.
        functional: Whether ``torch.func`` can differentiate the model.
        has_samples: Whether the samples come first in all of the outputs.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    shape: tuple[int, ...] = (NUM_CLASSES,)
    predict: Callable[..., Any] = lambda outputs: outputs
    separable: bool = True
    random: bool = False
    functional: bool = True
    has_samples: bool = True


@dataclass(frozen=True)
class Loss:
    """A mean over the samples, and targets of a shape for it."""

    name: str
    function: Callable[[Any, Tensor], Tensor]
    targets: Callable[[tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class Case:
    """A network with a loss. What it makes depends on the seed alone and leaves no trace."""

    network: Network
    loss: Loss
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.network.name}, {self.loss.name}"

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model = self.network.build().double()
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(0.3 * torch.randn_like(param))  # away from initial zeros and ones
        return model

    def batch(self, num_samples: int = NUM_SAMPLES, seed: int | None = None) -> tuple[Tensor, Tensor]:
        """A pair of inputs and targets."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed if seed is None else seed)
            inputs = self.network.inputs(num_samples)
            return inputs, self.loss.targets((num_samples, *self.network.shape))

    def loss_of(self, outputs: Any, targets: Tensor) -> Tensor:
        return self.loss.function(self.network.predict(*leaves(outputs)), targets)

    def objective(self, model: nn.Module, reduction: str = "mean") -> Callable[[Any], tuple[Any, Tensor]]:
        """The objective as a user writes it."""

        def objective(batch: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
            inputs, targets = batch
            outputs = model(inputs)
            loss = self.loss_of(outputs, targets)
            return outputs, loss if reduction == "mean" else loss * len(targets)

        return objective


def leaves(outputs: Any) -> tuple[Tensor, ...]:
    """The tensors of outputs that are a tensor, a tuple or a dict."""
    if isinstance(outputs, Tensor):
        return (outputs,)
    return tuple(outputs.values()) if isinstance(outputs, dict) else tuple(outputs)


def vectors(num_samples: int) -> Tensor:
    return torch.randn(num_samples, 3, dtype=torch.float64)


def images(num_samples: int) -> Tensor:
    return torch.randn(num_samples, 1, 4, 4, dtype=torch.float64)


def sequences(num_samples: int) -> Tensor:
    return torch.randn(num_samples, NUM_STEPS, 2, dtype=torch.float64)


def tokens(num_samples: int) -> Tensor:
    return torch.randint(0, 5, (num_samples, NUM_STEPS))


def points(num_samples: int) -> Tensor:
    return torch.rand(num_samples, 2, dtype=torch.float64)


class Tied(nn.Module):
    """Two layers and, under two names, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.head = nn.Linear(3, NUM_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        return self.head(hidden)


class Residual(nn.Module):
    """Convolutions, the second around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.second = nn.Conv2d(2, 2, 3, padding=1)
        self.head = nn.Linear(2, NUM_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        hidden = F.relu(hidden + self.second(hidden))
        return self.head(hidden.mean((2, 3)))


def batch_norm(*, train: bool) -> nn.Module:
    norm = nn.BatchNorm1d(4)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, NUM_CLASSES)).train(train)


class BagOfTokens(nn.Module):
    """An embedding and a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, NUM_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.embedding(inputs))).mean(1))


class Recurrent(nn.Module):
    """The last hidden state of one of torch's recurrent modules, and a linear layer."""

    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.recurrent = kind(2, 2, batch_first=True)
        self.head = nn.Linear(2, NUM_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        states, _ = self.recurrent(inputs)
        return self.head(states[:, -1])


class Attention(nn.Module):
    """A transformer layer with a prediction for each time step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer(self.stem(inputs)))


class TwoHeads(nn.Module):
    """Outputs in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.left = nn.Linear(3, 1)
        self.right = nn.Linear(3, NUM_CLASSES - 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(inputs))
        return self.left(hidden), self.right(hidden)


class Scaled(nn.Module):
    """Outputs in a dict; the loss ties them together."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.logits = nn.Linear(3, NUM_CLASSES)
        self.log_scale = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.trunk(inputs))
        return {"logits": self.logits(hidden), "log_scale": self.log_scale(hidden)}


class Pendulum(nn.Module):
    """The residual of ``u'' + sin u = 0`` by autograd, and that of ``u(0) = 1, u'(0) = 0``."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        times = inputs[:, :1]
        value, _, second = self.derivatives(times)
        start, speed, _ = self.derivatives(torch.zeros_like(times[:1]))
        return second + torch.sin(value), torch.cat([start - 1, speed])

    def derivatives(self, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        times = times.detach().requires_grad_()
        value = self.u(times)
        (first,) = torch.autograd.grad(value.sum(), times, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), times, create_graph=True)
        return value, first, second


class Heat(nn.Module):
    """The residual of ``u_t = u_xx`` by ``torch.func``, and that of ``u = 0`` at two walls."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        walls = inputs.new_tensor([[0.0, 0.5], [1.0, 0.5]])
        return torch.func.vmap(self.residual)(inputs), self.u(walls)

    def residual(self, point: Tensor) -> Tensor:
        def u(point: Tensor) -> Tensor:
            return self.u(point).squeeze()

        return torch.func.grad(u)(point)[1:] - torch.func.jacrev(torch.func.grad(u))(point)[0, :1]


def residual_loss(residuals: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    residual, boundary = residuals
    return F.mse_loss(residual, targets) + boundary.square().mean()


def cross_entropy(predictions: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(predictions.flatten(0, -2), targets.flatten())


def log_cosh(predictions: Tensor, targets: Tensor) -> Tensor:
    error = predictions - targets
    return (error + F.softplus(-2 * error)).mean()


def real(shape: tuple[int, ...]) -> Tensor:
    return 1.5 * torch.randn(shape, dtype=torch.float64)


MSE = Loss("mse", F.mse_loss, real)
CROSS_ENTROPY = Loss("cross entropy", cross_entropy, lambda shape: torch.randint(0, shape[-1], shape[:-1]))
BCE = Loss(
    "bce", F.binary_cross_entropy_with_logits, lambda shape: torch.randint(0, 2, shape, dtype=torch.float64)
)
POISSON = Loss("poisson", F.poisson_nll_loss, lambda shape: torch.randint(0, 4, shape, dtype=torch.float64))
HUBER = Loss("huber", F.huber_loss, real)
LOG_COSH = Loss("log cosh", log_cosh, real)
RESIDUAL = Loss("residual", residual_loss, lambda shape: torch.zeros(shape, dtype=torch.float64))
LOSSES = (MSE, CROSS_ENTROPY, BCE, POISSON, HUBER, LOG_COSH)

MLP = Network("mlp", lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, NUM_CLASSES)), vectors)
DROPOUT = Network(
    "dropout",
    lambda: nn.Sequential(
        nn.Linear(3, 5),
        nn.Dropout(0.3),
        nn.Tanh(),
        nn.Linear(5, 4),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Linear(4, NUM_CLASSES),
    ),
    vectors,
    random=True,
)
BATCH_NORM = Network("batch norm in train mode", lambda: batch_norm(train=True), vectors, separable=False)
TWO_HEADS = Network("tuple", TwoHeads, vectors, predict=lambda *heads: torch.cat(heads, dim=1))
SCALED = Network("dict", Scaled, vectors, predict=lambda logits, log_scale: logits * log_scale.exp())
NETWORKS = (
    MLP,
    Network("tied weights", Tied, vectors),
    Network("residual cnn", Residual, images),
    BATCH_NORM,
    Network("batch norm in eval mode", lambda: batch_norm(train=False), vectors),
    Network("layer norm and embedding", BagOfTokens, tokens),
    DROPOUT,
    Network("gru", lambda: Recurrent(nn.GRU), sequences),
    Network("lstm", lambda: Recurrent(nn.LSTM), sequences),
    Network("peephole lstm", lambda: SequenceClassifier(2, NUM_CLASSES, 2, 2), sequences),
    Network("transformer layer", Attention, sequences, shape=(NUM_STEPS, NUM_CLASSES)),
    TWO_HEADS,
    SCALED,
)

PHYSICS = (
    Case(
        Network(
            "pendulum",
            Pendulum,
            points,
            shape=(1,),
            predict=lambda *residuals: residuals,
            functional=False,
            has_samples=False,
        ),
        RESIDUAL,
    ),
    Case(
        Network(
            "heat equation",
            Heat,
            points,
            shape=(1,),
            predict=lambda *residuals: residuals,
            has_samples=False,
        ),
        RESIDUAL,
    ),
)
CASES = (*(Case(network, loss) for network in NETWORKS for loss in LOSSES), *PHYSICS)
ONE_PER_NETWORK = (*(Case(network, CROSS_ENTROPY) for network in NETWORKS), *PHYSICS)
"""With the loss whose ``H`` is the fullest."""


def as_blocks(groups: Sequence[Group]) -> list[Block]:
    return [Block(group["name"], tuple(param for _, param in group["params"])) for group in groups]


def two_uneven(model: nn.Module) -> list[Group]:
    """Every third parameter in one block and the rest in the other, so neither is contiguous."""
    named = list(model.named_parameters())
    rest = [pair for index, pair in enumerate(named) if index % 3]
    return [{"params": named[::3], "name": "few"}, {"params": rest, "name": "many"}]


PARTITIONS: dict[str, Callable[[nn.Module], list[Group]]] = {
    "single": blocks.single,
    "by layer": blocks.by_layer,
    "two uneven": two_uneven,
}
