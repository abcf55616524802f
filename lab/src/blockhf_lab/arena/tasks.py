"""The tasks of the arena."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockhf import blocks
from blockhf_lab import autoencoder, data, lstm, residual
from blockhf_lab.arena import models, physics, text
from blockhf_lab.arena.base import Batch, Data, Task, take
from blockhf_lab.tasks import sequences, standardized

Score = Callable[[Tensor, Tensor], Tensor]


def get(name: str) -> Task:
    """A task by its name.

    >>> get("classifier").batches
    (64, 512)
    """
    if name not in TASKS:
        raise ValueError(f"There is no task {name!r} in the arena. There are {', '.join(TASKS)}.")
    return TASKS[name]


def supervised(score: Score) -> Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]:
    """Outputs of the inputs, and a loss of outputs and targets."""

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs: Tensor = model(batch[0])
        return outputs, score(outputs, batch[1])

    return loss


def _shuffled(train: Batch, num_evaluated: int, test: Batch, source: str, num_test: int = 1000) -> Data:
    """Samples in an order of their own, the first of which are evaluated; they are trained on too."""
    order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(0))
    train = take(train, order)
    return Data(train, take(train, slice(num_evaluated)), take(test, slice(num_test)), source)


# Pictures


@functools.cache
def _mnist() -> data.Pictures:
    return data.mnist(None)


@functools.cache
def _cifar10() -> data.Pictures:
    """Pictures of 16 × 16 pixels, which take a quarter of the time."""
    found = data.cifar10(None)
    train, test = (
        F.avg_pool2d(standardized(pictures), 2) for pictures in (found.train_images, found.test_images)
    )
    return data.Pictures(train, found.train_labels, test, found.test_labels)


def _reconstructed() -> Data:
    found = _mnist()
    return _shuffled(
        (found.train_images, found.train_images), 1000, (found.test_images, found.test_images), "MNIST"
    )


def _classified(pictures: Callable[[], data.Pictures], name: str, num_evaluated: int = 2000) -> Data:
    found = pictures()
    return _shuffled(
        (found.train_images, found.train_labels),
        num_evaluated,
        (found.test_images, found.test_labels),
        name,
    )


def _pixel_sequences() -> Data:
    found = _mnist()
    return _shuffled(
        (sequences(found.train_images), found.train_labels),
        1000,
        (sequences(found.test_images), found.test_labels),
        "MNIST, pooled to 7 × 7",
    )


def _small_digits() -> Data:
    found = data.digits()
    pool = partial(F.avg_pool2d, kernel_size=4)
    train, test = (
        pool(pictures.view(-1, 1, 28, 28)).flatten(1) for pictures in (found.train_images, found.test_images)
    )
    return _shuffled(
        (train, found.train_labels), 2000, (test, found.test_labels), "6,000 MNIST digits, pooled to 7 × 7"
    )


def _binary_reconstruction(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets)


# Text


def _characters(length: int, num_evaluated: int) -> Data:
    pieces, checksum = text.sequences(length)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    pieces = pieces[order]
    held, rest = pieces[:num_evaluated], pieces[num_evaluated:]
    source = f"{pieces.numel():,} characters of Python's standard library, SHA-256 {checksum[:16]}"
    return Data((rest,), (held,), None, source)


def _next_character(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    tokens = batch[0]
    logits: Tensor = model(tokens[:, :-1])
    return logits, F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# Tables, made from seeds


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _badly_scaled() -> Data:
    """Sixteen correlated features with units from 0.01 to 100, and a smooth function of them with noise."""
    generator = _generator(16)
    number, width = 10_000, 16
    mixing = torch.eye(width) + 0.3 * torch.randn(width, width, generator=generator)
    hidden = torch.randn(number, width, generator=generator) @ mixing.T
    units = torch.logspace(-2, 2, width)[torch.randperm(width, generator=generator)]
    first, second = torch.randn(2, width, generator=generator) / math.sqrt(width)
    targets = torch.sin(2 * hidden @ first) + 0.5 * (hidden @ second).tanh() * hidden[:, 0]
    targets = targets + 0.1 * torch.randn(number, generator=generator)
    targets = ((targets - targets.mean()) / targets.std())[:, None]
    inputs = hidden * units
    test = (inputs[8000:], targets[8000:])
    return _shuffled((inputs[:8000], targets[:8000]), 2000, test, "made from seed 16", 2000)


def _friedman() -> Data:
    """Friedman's first function (1991) of five of ten features, with noise of deviation 1; standardized."""
    x = torch.rand(4000, 10, generator=_generator(17))
    y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y = y + torch.randn(len(x), generator=_generator(18))
    y = ((y - y.mean()) / y.std())[:, None]
    return _shuffled((x[:2000], y[:2000]), 2000, (x[2000:], y[2000:]), "made from seeds 17 and 18", 2000)


_USERS, _ITEMS = 600, 400


def _ratings() -> Data:
    """Ratings by vectors of rank 5, biases and noise of deviation 0.3; a fifth of all pairs is known."""
    generator = _generator(19)
    users, items = (torch.randn(size, 5, generator=generator) for size in (_USERS, _ITEMS))
    user_bias, item_bias = (0.5 * torch.randn(size, generator=generator) for size in (_USERS, _ITEMS))
    pairs = torch.randperm(_USERS * _ITEMS, generator=generator)[:50_000]
    who, what = pairs // _ITEMS, pairs % _ITEMS
    ratings = 3 + (users[who] * items[what]).sum(dim=1) / 2 + user_bias[who] + item_bias[what]
    ratings = ratings + 0.3 * torch.randn(len(pairs), generator=generator)
    train, test = ((who[part], what[part], ratings[part]) for part in (slice(48_000), slice(48_000, None)))
    return _shuffled(train, 2000, test, "made from seed 19", 2000)


def _rating_error(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    outputs: Tensor = model(batch[0], batch[1])
    return outputs, F.mse_loss(outputs, batch[2])


# The list

_entropy, _squares = supervised(F.cross_entropy), supervised(F.mse_loss)


def _gpt(name: str, *, is_tied: bool, **settings: Any) -> Task:
    return Task(
        name=name,
        title=f"Byte-level GPT, {'tied' if is_tied else 'untied'}: 2 layers of width 64, 32 characters",
        load=partial(_characters, 32, 256),
        make_model=partial(models.GPT, text.VOCABULARY, 32, 64, 2, 4, is_tied=is_tied),
        loss=_next_character,
        groups=partial(blocks.by_module, depth=2),
        batches=(32, 256),
        own_batch=1024,
        seconds=5,
        **settings,
    )


_LIST = (
    Task(
        "autoencoder",
        "The paper's autoencoder, smaller: 784-250-100-20, tanh, on MNIST",
        _reconstructed,
        partial(autoencoder.Autoencoder, (784, 250, 100, 20)),
        supervised(autoencoder.reconstruction_error),
        blocks.by_module,
        batches=(100, 1000),
        own_batch=None,
        seconds=3,
        sgd_rates=(1e-4, 3e-4, 1e-3, 3e-3),
    ),
    Task(
        "lstm",
        "The paper's three peephole LSTM layers of 10 cells on MNIST as sequences of 49 pixels",
        _pixel_sequences,
        partial(lstm.SequenceClassifier, 1, 10),
        _entropy,
        lambda model: blocks.by_pattern(model, lstm.PATTERNS),
        batches=(100, 1000),
        own_batch=6000,
        seconds=6,
        sgd_rates=(0.03, 0.1, 0.3, 1.0),
    ),
    Task(
        "cnn",
        "The paper's residual network without BatchNorm, of 8, 16 and 32 channels, on CIFAR-10",
        partial(_classified, _cifar10, "CIFAR-10, pooled to 16 × 16", 1000),
        partial(residual.ResidualNetwork, 10, (8, 16, 32)),
        _entropy,
        lambda model: blocks.by_pattern(model, residual.PATTERNS),
        batches=(64, 512),
        own_batch=2048,
        seconds=5,
    ),
    Task(
        "relu-autoencoder",
        "Autoencoder 784-250-50 with ReLU and binary cross entropy on MNIST",
        _reconstructed,
        partial(models.Halves, (784, 250, 50)),
        supervised(_binary_reconstruction),
        blocks.by_module,
        batches=(100, 1000),
        own_batch=None,
        seconds=3,
        sgd_rates=(0.1, 0.3, 1.0, 3.0),
    ),
    Task(
        "classifier",
        "Perceptron 784-128-64-10 with ReLU on MNIST",
        partial(_classified, _mnist, "MNIST"),
        partial(models.mlp, (784, 128, 64, 10)),
        _entropy,
        blocks.by_layer,
        batches=(64, 512),
        own_batch=None,
        seconds=5,
    ),
    Task(
        "resnet",
        "Residual network with BatchNorm of 8, 16 and 32 channels on CIFAR-10",
        partial(_classified, _cifar10, "CIFAR-10, pooled to 16 × 16", 1000),
        models.NormalizedResNet,
        _entropy,
        blocks.by_module,
        batches=(64, 512),
        own_batch=2048,
        seconds=5,
    ),
    _gpt("gpt", is_tied=True),
    _gpt("gpt-untied", is_tied=False),
    Task(
        "lstm-text",
        "Byte-level language model: nn.LSTM of 96 cells, 32 characters",
        partial(_characters, 32, 256),
        partial(models.RecurrentLanguageModel, text.VOCABULARY, 32, 96),
        _next_character,
        blocks.by_module,
        batches=(32, 256),
        own_batch=1024,
        seconds=5,
        rates=(1e-3, 3e-3, 1e-2, 3e-2),
        sgd_rates=(0.1, 0.3, 1.0, 3.0),
    ),
    Task(
        "tabular",
        "Regression by a perceptron 16-64-64-1 with ReLU; features have units from 0.01 to 100",
        _badly_scaled,
        partial(models.mlp, (16, 64, 64, 1)),
        _squares,
        blocks.by_layer,
        batches=(64, 512),
        own_batch=None,
        seconds=2,
        rates=(1e-3, 3e-3, 1e-2, 3e-2),
        sgd_rates=(1e-5, 1e-4, 1e-3, 1e-2),
        has_lbfgs=True,
    ),
    Task(
        "friedman",
        "Regression of Friedman's function by a perceptron 10-50-50-1 with tanh, 2,000 samples",
        _friedman,
        partial(models.mlp, (10, 50, 50, 1), nn.Tanh),
        _squares,
        blocks.single,
        batches=(64, 512),
        own_batch=None,
        seconds=2,
        rates=(1e-3, 3e-3, 1e-2, 3e-2),
        has_lbfgs=True,
    ),
    Task(
        "digits",
        "Perceptron 49-64-10 with tanh on 6,000 digits of 7 × 7 pixels",
        _small_digits,
        partial(models.mlp, (49, 64, 10), nn.Tanh),
        _entropy,
        blocks.by_layer,
        batches=(64, 512),
        own_batch=None,
        seconds=2,
        rates=(1e-3, 3e-3, 1e-2, 3e-2),
        sgd_rates=(0.03, 0.1, 0.3, 1.0),
        has_lbfgs=True,
    ),
    Task(
        "factorization",
        f"Matrix factorization of rank 5 by nn.Embedding: {_USERS} users, {_ITEMS} items, 48,000 ratings",
        _ratings,
        partial(models.Factorization, _USERS, _ITEMS, 5),
        _rating_error,
        blocks.by_module,
        batches=(512, 4096),
        own_batch=None,
        seconds=2,
        rates=(3e-3, 1e-2, 3e-2, 1e-1),
        sgd_rates=(0.3, 1.0, 3.0, 10.0),
        has_lbfgs=True,
    ),
    Task(
        "logistic",
        "Logistic regression of MNIST: 784-10",
        partial(_classified, _mnist, "MNIST"),
        partial(nn.Linear, 784, 10),
        _entropy,
        blocks.single,
        batches=(64, 512),
        own_batch=None,
        seconds=2,
        sgd_rates=(0.03, 0.1, 0.3, 1.0),
        has_lbfgs=True,
    ),
    physics.poisson(),
    physics.burgers(),
)
TASKS: Mapping[str, Task] = {task.name: task for task in _LIST}
"""The tasks by name."""
