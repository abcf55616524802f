"""What a task of the arena is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from blockhf.blocks import Group

Batch = tuple[Tensor, ...]
Objective = Callable[[Batch], tuple[Any, Tensor]]


@dataclass(frozen=True, eq=False)
class Data:
    """Samples of a task.

    Attributes:
        train: Tensors whose first dimension is that of the samples.
        evaluated: The fixed samples, of the same distribution or among those trained on, that targets are of.
        test: Samples that are not trained on, for information; none where there are no such.
        source: What they are and, where they are not made from a seed, the sum that tells them apart.
    """

    train: Batch
    evaluated: Batch
    test: Batch | None = None
    source: str = ""

    @property
    def size(self) -> int:
        return len(self.train[0])


@dataclass(frozen=True, eq=False)
class Task:
    """All that a run needs to know, but for the optimizer.

    Attributes:
        name: As on the command line.
        title: For people.
        load: Reads or makes the samples.
        make_model: Draws the model from torch's global generator.
        loss: From model and batch to outputs and loss, the mean over the samples.
        groups: The blocks that a user would choose.
        batches: The two batches of the peers' search. A gradient on the larger one is one GE.
        own_batch: What ``BlockHF`` is given at each step; none for all samples.
        seconds: CPU seconds of updates that a run may take.
        rates: Learning rates of the search for Adam, AdamW and SOAP; Muon's are three times as large.
        sgd_rates: Those of SGD, which depend on the loss' scale.
        is_complete: Whether the samples are all there is, so that a batch of all has no noise.
        has_lbfgs: Whether L-BFGS applies: batches of which it sees a good part of the samples.
        scale: What the optimizer sees the loss multiplied by; the one that is evaluated is not.
        order: Puts a batch in the order in which the optimizer gets it; none for as it comes.
    """

    name: str
    title: str
    load: Callable[[], Data]
    make_model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], tuple[Any, Tensor]]
    groups: Callable[[nn.Module], list[Group]]
    batches: tuple[int, int]
    own_batch: int | None
    seconds: float
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2)
    sgd_rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    is_complete: bool = False
    has_lbfgs: bool = False
    notes: str = field(default="", compare=False)
    scale: float = 1.0
    order: Callable[[Batch], Batch] | None = None

    def objective(self, model: nn.Module) -> Objective:
        """What the optimizer minimizes."""
        if self.scale == 1.0:
            return lambda batch: self.loss(model, batch)

        def scaled(batch: Batch) -> tuple[Any, Tensor]:
            outputs, loss = self.loss(model, batch)
            return outputs, self.scale * loss

        return scaled

    def model(self, seed: int) -> nn.Module:
        """The model as a seed draws it."""
        torch.manual_seed(seed)
        return self.make_model()


def take(samples: Batch, index: Any) -> Batch:
    """The samples of an index or a slice."""
    return tuple(tensor[index] for tensor in samples)


def evaluate(task: Task, model: nn.Module, samples: Batch, chunk: int = 2000) -> float:
    """The mean loss over fixed samples.

    The model stays in its training mode, so BatchNorm takes the statistics of these samples and not the
    running ones, which depend on how many updates there were; its buffers are put back.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    total, size = 0.0, len(samples[0])
    with torch.no_grad():
        for start in range(0, size, chunk):
            part = take(samples, slice(start, start + chunk))
            total += float(task.loss(model, part)[1].detach()) * len(part[0])
        for buffer, value in buffers:
            buffer.copy_(value)
    return total / size
