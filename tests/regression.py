"""A small regression in float64, as samples and as a point, for the tests of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from blockhf.batches import Share, batch_size, take
from blockhf.blocks import Block
from blockhf.curvature import DoubleBackward, GaussNewton
from blockhf.point import Linearizer, Point
from blockhf.policy import PolicyState
from blockhf.samples import Samples


def point_of(samples: Samples, *, keeps_graph: bool = False) -> Point:
    point = Point(samples, Linearizer(GaussNewton(), DoubleBackward(), PolicyState()))
    point.keeps_graph = keeps_graph
    return point


class Regression:
    """With what a model may have: BatchNorm, dropout, a frozen layer; and a number in its batch."""

    def __init__(self, *layers: nn.Module, reduction: Any = "mean", **options: Any) -> None:
        torch.manual_seed(0)
        default = (nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.model = nn.Sequential(*(layers or default)).double()
        self.batch = {"x": torch.randn(7, 3).double(), "y": torch.randn(7, 2).double(), "scale": 1.5}
        self.reduction = reduction
        self.blocks = [
            Block(name, tuple(module.parameters()))
            for name, module in self.model.named_children()
            if any(True for _ in module.parameters())
        ]
        self.samples = Samples(self.objective, self.batch, self.blocks, reduction=reduction, **options)
        self.point = point_of(self.samples)

    def objective(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        outputs = self.model(batch["x"]) * batch["scale"]
        squares = (outputs - batch["y"]).square().sum(1)
        return outputs, squares.mean() if self.reduction == "mean" else squares.sum()

    def front(self, number: int) -> Samples:
        """The first of the samples, with the same random numbers, as the curvature has them."""
        return self.other(take(self.batch, 0, number))

    def other(self, batch: Any) -> Samples:
        """A batch of the curvature's own."""
        number = batch_size(batch)
        return self.samples.on(batch, Share(number, number), like=self.samples.parts)


def dropout(**options: Any) -> Regression:
    return Regression(nn.Linear(3, 40), nn.Dropout(0.5), nn.Linear(40, 2), **options)


def batch_norm(**options: Any) -> Regression:
    return Regression(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), **options)
