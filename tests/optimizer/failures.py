"""Models that draw and remember, objectives that fail in one place, and the ways to make a step of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimizer_tasks import Task, values

Loss = Callable[[Any], tuple[Tensor, Tensor]]


def noisy() -> nn.Sequential:
    """A model with all that a forward pass may touch: parameters, buffers and random numbers."""
    return nn.Sequential(
        nn.Linear(3, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Dropout(0.4),
        nn.Linear(8, 4),
        nn.Tanh(),
        nn.Linear(4, 2),
    )


class Treacherous(torch.autograd.Function):
    """The identity, whose first derivative is fine and whose second is not a number."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return TreacherousBackward.apply(gradient)


class TreacherousBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Any:
        return tangent * torch.nan


def plus(value: float) -> Callable[[Task], Loss]:
    """The loss with something added to it that has no derivative."""

    def make(task: Task) -> Loss:
        def objective(batch: Any) -> tuple[Tensor, Tensor]:
            outputs, loss = task.objective(batch)
            return outputs, loss + value

        return objective

    return make


def root(task: Task) -> Loss:
    """A finite loss whose gradient is that of a square root at zero."""

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs, loss = task.objective(batch)
        return outputs, loss + (outputs - outputs.detach()).abs().sum().sqrt()

    return objective


def treacherous(task: Task) -> Loss:
    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = Treacherous.apply(task.model(batch[0]))
        return outputs, task.loss(outputs, batch[1])

    return objective


def elsewhere(value: float, radius: float = 1e-12) -> Callable[[Task], Loss]:
    """The loss jumps to ``value`` at this distance from the parameters as they are now."""

    def make(task: Task) -> Loss:
        home = values(task.model)

        def objective(batch: Any) -> tuple[Tensor, Tensor]:
            outputs, loss = task.objective(batch)
            away = (values(task.model) - home).norm() > radius
            return outputs, loss + value if away else loss

        return objective

    return make


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "part": {"curvature_batch_size": 6},
    "micro-batches": {"curvature_batch_size": 10, "micro_batch_size": 6},
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
