"""Random problems: a network, a loss, batches in some form, and a partition into blocks."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal, Poisson

from blockhf import blocks
from blockhf_lab.fuzz.networks import Network, draw_network

IGNORED = -100

Objective = Callable[..., tuple[Any, Tensor]]


@dataclass(frozen=True)
class Loss:
    """A loss and its targets.

    Attributes:
        kind: Its name in the record.
        of: The loss of outputs and targets.
        targets: Of a shape, from a generator; the shape has no classes where ``classes`` is true.
        classes: Whether the last dimension of the outputs stands for classes.
        is_sum: Whether it is the sum over samples.
        weight_of: The total weight of a mean, where it is a weighted one.
        distribution: What the outputs predict, where there is a likelihood.
    """

    kind: str
    of: Callable[[Tensor, Tensor], Tensor]
    targets: Callable[[Sequence[int], int, torch.Generator], Tensor]
    classes: bool = False
    is_sum: bool = False
    weight_of: Callable[[Tensor], Tensor] | None = None
    distribution: Callable[..., Distribution] | None = None


def _normal(shape: Sequence[int], _: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _coins(shape: Sequence[int], _: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, tuple(shape), generator=generator).double()


def _counts(shape: Sequence[int], _: int, generator: torch.Generator) -> Tensor:
    return torch.randint(4, tuple(shape), generator=generator).double()


def _labels(shape: Sequence[int], classes: int, generator: torch.Generator) -> Tensor:
    return torch.randint(classes, tuple(shape), generator=generator)


def _some_labels(shape: Sequence[int], classes: int, generator: torch.Generator) -> Tensor:
    labels = _labels(shape, classes, generator)
    hidden = torch.rand(tuple(shape), generator=generator) < 0.3
    hidden[0] = False
    return labels.masked_fill(hidden, IGNORED)


def _class_weights(outputs: Tensor) -> Tensor:
    return torch.linspace(0.5, 2.0, outputs.shape[-1], dtype=outputs.dtype)


def _cross_entropy(outputs: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1), **options)


def _independent(distribution: Callable[[Tensor], Distribution]) -> Callable[[Tensor], Distribution]:
    return lambda outputs: Independent(distribution(outputs), outputs.dim() - 1)


def losses(classes: int) -> list[Loss]:
    """All losses, for outputs with so many classes."""
    gauss = _independent(lambda outputs: Normal(outputs, 1.0, validate_args=False))
    coin = _independent(lambda outputs: Bernoulli(logits=outputs, validate_args=False))
    count = _independent(lambda outputs: Poisson(outputs.exp(), validate_args=False))
    categories = _independent_categories
    weights = torch.linspace(0.5, 2.0, classes, dtype=torch.float64)
    return [
        Loss("mse", F.mse_loss, _normal, distribution=gauss),
        Loss("mse, sum", lambda o, t: F.mse_loss(o, t, reduction="sum"), _normal, is_sum=True),
        Loss("huber", F.huber_loss, _normal),
        Loss("log cosh", lambda o, t: (F.softplus(2 * (o - t)) - (o - t)).mean(), _normal),
        Loss("binary cross entropy", F.binary_cross_entropy_with_logits, _coins, distribution=coin),
        Loss("poisson", F.poisson_nll_loss, _counts, distribution=count),
        Loss("cross entropy", _cross_entropy, _labels, classes=True, distribution=categories),
        Loss(
            "cross entropy, sum",
            lambda o, t: _cross_entropy(o, t, reduction="sum"),
            _labels,
            classes=True,
            is_sum=True,
            distribution=categories,
        ),
        Loss(
            "cross entropy, ignore_index",
            lambda o, t: _cross_entropy(o, t, ignore_index=IGNORED),
            _some_labels,
            classes=True,
            weight_of=lambda t: (t != IGNORED).sum(),
        ),
        Loss(
            "cross entropy, class weights",
            lambda o, t: _cross_entropy(o, t, weight=_class_weights(o)),
            _labels,
            classes=True,
            weight_of=lambda t: weights[t].sum(),
        ),
    ]


def _independent_categories(outputs: Tensor) -> Distribution:
    return Independent(Categorical(logits=outputs, validate_args=False), outputs.dim() - 2)


def _as_pair(rows: Tensor, targets: Tensor) -> Any:
    return rows, targets


def _as_dict(rows: Tensor, targets: Tensor) -> Any:
    return {"inputs": rows, "labels": targets, "name": "batch", "scale": 1.0, "nothing": None}


def _as_nest(rows: Tensor, targets: Tensor) -> Any:
    return {"data": [rows, (targets,)], "empty": ()}


def _as_numbers(rows: Tensor, targets: Tensor) -> Any:
    return (rows, targets.tolist()) if targets.dim() == 1 else (rows, targets)


def _as_arrays(rows: Tensor, targets: Tensor) -> Any:
    return {"inputs": rows, "labels": targets.numpy()}


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "tuple": (_as_pair, lambda batch: batch),
    "dict": (_as_dict, lambda batch: (batch["inputs"], batch["labels"])),
    "nested": (_as_nest, lambda batch: (batch["data"][0], batch["data"][1][0])),
    "lists of numbers": (_as_numbers, lambda batch: batch),
    "numpy arrays": (_as_arrays, lambda batch: (batch["inputs"], batch["labels"])),
    "tensor of indices": (_as_pair, lambda batch: batch),
    "no batch": (_as_pair, lambda batch: batch),
}


@dataclass
class Problem:
    """A problem, drawn from a seed: the same seed gives the same one again, to the last bit."""

    network: Network
    loss: Loss
    form: str
    partition: str
    dtype: torch.dtype
    num_samples: int
    tables: tuple[Tensor, Tensor]
    num_batches: int
    partition_of: Callable[[nn.Module], Any]
    kept: list[Any] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        return self.network.module

    @property
    def has_batch(self) -> bool:
        return self.form != "no batch"

    @property
    def splits(self) -> bool:
        """Whether parts of a batch add up to the whole."""
        return self.has_batch and not (self.network.mixes or self.network.draws)

    @property
    def forms(self) -> bool:
        """Whether the library says that it forms such a matrix."""
        listed = self.form == "lists of numbers" and self.loss.classes and not self.network.tokens
        return self.splits and not self.network.physics and not listed

    def groups(self, model: nn.Module | None = None) -> Any:
        return self.partition_of(model or self.model)

    def rows(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a batch, as tensors."""
        start = number % self.num_batches * self.num_samples
        inputs, targets = self.tables
        return inputs[start : start + self.num_samples], targets[start : start + self.num_samples]

    def batch(self, number: int, *, spoiled: bool = False) -> Any:
        """The batch of some number in the problem's form; a spoiled one has an input that is no number."""
        inputs, targets = self.rows(number)
        if spoiled:
            inputs = inputs.clone()
            inputs.view(-1)[0] = float("nan")
        if self.form == "tensor of indices" and not spoiled:
            return torch.arange(len(inputs)) + number % self.num_batches * self.num_samples
        return FORMS[self.form][0](inputs, targets)

    def unpack(self, batch: Any) -> tuple[Tensor, Tensor]:
        if isinstance(batch, Tensor):
            return self.tables[0][batch], self.tables[1][batch]
        inputs, targets = FORMS[self.form][1](batch)
        return inputs, torch.as_tensor(targets)

    def objective(self, model: nn.Module | None = None, number: int = 0) -> Objective:
        """The objective of a model; ``number`` is that of the batch where none is passed."""
        model = model or self.model
        dtype = next(model.parameters()).dtype
        loss, kept, physics = self.loss, self.kept, self.network.physics
        unpack, rows, has_batch = self.unpack, self.rows, self.has_batch

        def objective(batch: Any = None) -> tuple[Any, Tensor]:
            inputs, targets = unpack(batch) if has_batch else rows(number)
            inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
            targets = targets.to(dtype) if not loss.classes else targets
            if physics:
                inputs = inputs.detach().requires_grad_()
                values = model(inputs)
                (slope,) = torch.autograd.grad(values.sum(), inputs, create_graph=True)
                outputs = slope + values
            else:
                outputs = model(inputs)
            kept.append(weakref.ref(outputs))
            return outputs, loss.of(outputs, targets)

        return objective

    def weight_of(self, batch: Any) -> Any:
        """The total weight of a batch in its mean."""
        assert self.loss.weight_of is not None
        return self.loss.weight_of(self.unpack(batch)[1])

    @property
    def reduction(self) -> Any:
        if self.loss.weight_of is not None and self.has_batch:
            return self.weight_of
        return "sum" if self.loss.is_sum else "mean"

    def in_double(self) -> nn.Module:
        """A copy of the model in double precision."""
        return copy.deepcopy(self.model).double()

    @property
    def words(self) -> dict[str, str]:
        """What it is, for the record."""
        return {
            "network": self.network.kind,
            "loss": self.loss.kind,
            "batch": self.form,
            "partition": self.partition,
            "dtype": str(self.dtype).removeprefix("torch."),
        }


def draw_problem(rng: Random, *, num_batches: int = 4) -> Problem:
    """A random problem."""
    network = draw_network(rng)
    dtype = torch.float64 if network.draws or rng.random() < 0.6 else torch.float32
    network.module.to(dtype)
    small = not (network.tokens or network.physics) and rng.random() < 0.03
    number = 128 if small else rng.randint(2, 6)
    choices = [loss for loss in losses(network.num_outputs) if not (network.physics and loss.classes)]
    loss = rng.choice(choices)
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    inputs = network.draw(number * num_batches, generator)
    middle = [network.tokens] if network.tokens else []
    shape = [len(inputs), *middle, *([] if loss.classes else [network.num_outputs])]
    targets = loss.targets(shape, network.num_outputs, generator)
    if loss.classes and rng.random() < 0.8:  # else there may be samples without a label
        targets[(targets == IGNORED).reshape(len(targets), -1).all(1)] = 0
    if inputs.is_floating_point():
        inputs = inputs.to(dtype)
    if targets.is_floating_point():
        targets = targets.to(dtype)
    name, partition = _draw_partition(rng, network.module)
    form = rng.choice(list(FORMS))
    return Problem(network, loss, form, name, dtype, number, (inputs, targets), num_batches, partition)


def _draw_partition(rng: Random, model: nn.Module) -> tuple[str, Callable[[nn.Module], Any]]:
    num_params = len(list(model.parameters()))
    name = rng.choice(["single", "by_module", "by_layer", "by_size", "by_pattern"])
    if name == "by_size":
        number = rng.randint(1, num_params)
        return name, lambda own: blocks.by_size(own, number)
    if name == "by_pattern":
        names = [own for own, _ in model.named_parameters()]
        has_bias = any("bias" in own for own in names) and not all("bias" in own for own in names)
        patterns = {"biases": "bias", "rest": ""} if has_bias else {"all": ""}
        return name, lambda own: blocks.by_pattern(own, patterns)
    makers = {"single": blocks.single, "by_module": blocks.by_module, "by_layer": blocks.by_layer}
    return name, makers[name]
