"""What the tests of preconditioners share: a point with a simple loss, and second moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from blockhf import (
    DoubleBackward,
    GaussNewton,
    LinearOperator,
    Point,
    PolicyState,
    Preconditioner,
    Samples,
    blocks,
)
from blockhf.point import Linearizer
from cases import as_blocks


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X2 = randn(6, 3)


def point_of(
    model: nn.Module, inputs: Tensor, loss: Callable[[Tensor], Tensor] | None = None, **options: Any
) -> Point:
    """With half the mean square of the outputs, unless another loss is given."""

    def objective(batch: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(batch)
        if loss is not None:
            return outputs, loss(outputs)
        squares = outputs.square().flatten(1).sum(1) / 2
        return outputs, squares.sum() if options.get("reduction") == "sum" else squares.mean()

    samples = Samples(objective, inputs, as_blocks(blocks.single(model)), **options)
    return Point(samples, Linearizer(GaussNewton(), DoubleBackward(), PolicyState()))


def prepared(
    preconditioner: Preconditioner, point: Point, damping: float = 0.1, state: PolicyState | None = None
) -> LinearOperator:
    """The inverse of the only block."""
    with point.linearize() as operator:
        state = PolicyState() if state is None else state
        (inverse,) = preconditioner.prepare(
            point.samples, point.linearizer.curvature, operator, [damping], state
        )
    assert inverse is not None
    return inverse


def moment(rows: Tensor, bias: bool = True) -> Tensor:
    """The second moment of inputs, which a bias gives a 1 at the end."""
    rows = rows.reshape(-1, rows.shape[-1])
    rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], 1) if bias else rows
    return rows.T @ rows / len(rows)
