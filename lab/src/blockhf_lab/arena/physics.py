"""Two physics-informed networks. Their points are all there are, so a batch of all has no noise."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from blockhf import blocks
from blockhf_lab.arena import models
from blockhf_lab.arena.base import Batch, Data, Task


def _network(*sizes: int) -> nn.Module:
    return models.mlp(sizes, nn.Tanh).double()


def _derivatives(model: nn.Module, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The network at points in the plane, its gradient, and its second derivatives along both axes."""
    points = points.detach().requires_grad_()
    with torch.enable_grad():
        values = model(points)[:, 0]
        (slopes,) = torch.autograd.grad(values.sum(), points, create_graph=True)
        seconds = [
            torch.autograd.grad(slopes[:, axis].sum(), points, create_graph=True)[0][:, axis]
            for axis in (0, 1)
        ]
    return values, slopes, torch.stack(seconds, dim=1)


def _residual_loss(residual: Tensor) -> tuple[Tensor, Tensor]:
    return residual, residual.square().mean() / 2


def _poisson_points() -> Data:
    axis = torch.linspace(0, 1, 32, dtype=torch.float64)[1:-1]
    inside = torch.cartesian_prod(axis, axis)
    edge = torch.linspace(0, 1, 30, dtype=torch.float64)
    zero, one = torch.zeros_like(edge), torch.ones_like(edge)
    sides = [torch.stack(pair, dim=1) for pair in ((edge, zero), (edge, one), (zero, edge), (one, edge))]
    points = torch.cat([inside, *sides])
    is_edge = torch.arange(len(points)) >= len(inside)
    return Data((points, is_edge), (points, is_edge), None, "900 points inside, 120 on the boundary")


def _poisson_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    points, is_edge = batch
    values, _, seconds = _derivatives(model, points)
    source = 2 * math.pi**2 * torch.sin(math.pi * points).prod(dim=1)
    return _residual_loss(torch.where(is_edge, 10 * values, seconds.sum(dim=1) + source))


def _burgers_points() -> Data:
    generator = torch.Generator().manual_seed(20)
    inside = torch.rand(1200, 2, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 2.0])
    inside = inside - torch.tensor([0.0, 1.0])  # time in [0, 1], place in [-1, 1]
    start = torch.stack([torch.zeros(100), torch.linspace(-1, 1, 100)], dim=1).double()
    times = torch.linspace(0, 1, 30).double()
    sides = [torch.stack([times, torch.full_like(times, place)], dim=1) for place in (-1.0, 1.0)]
    points = torch.cat([inside, start, *sides])
    known = torch.where(points[:, 0] == 0, -torch.sin(math.pi * points[:, 1]), 0.0)
    is_known = torch.arange(len(points)) >= len(inside)
    samples = (points, known, is_known)
    return Data(samples, samples, None, "1,200 points inside, 160 on the boundary, seed 20")


def _burgers_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    points, known, is_known = batch
    values, slopes, seconds = _derivatives(model, points)
    inside = slopes[:, 0] + values * slopes[:, 1] - 0.01 / math.pi * seconds[:, 1]
    return _residual_loss(torch.where(is_known, values - known, inside))


def poisson() -> Task:
    """Poisson's equation -Δu = 2π² sin πx sin πy on the unit square, u = 0 on its boundary."""
    return Task(
        "poisson",
        "Poisson's equation in two dimensions: network 2-32-32-1, tanh, float64",
        _poisson_points,
        partial(_network, 2, 32, 32, 1),
        _poisson_loss,
        blocks.single,
        batches=(255, 1020),
        own_batch=None,
        seconds=3,
        rates=(1e-3, 3e-3, 1e-2, 3e-2),
        sgd_rates=(1e-4, 3e-4, 1e-3, 3e-3),
        is_complete=True,
        has_lbfgs=True,
    )


def burgers() -> Task:
    """Burgers' equation u' + u uₓ = 0.01/π uₓₓ from u = -sin πx, with u = 0 at both ends."""
    return Task(
        "burgers",
        "Burgers' equation, viscosity 0.01/π: network 2-20-20-20-1, tanh, float64",
        _burgers_points,
        partial(_network, 2, 20, 20, 20, 1),
        _burgers_loss,
        blocks.single,
        batches=(340, 1360),
        own_batch=None,
        seconds=3,
        rates=(1e-3, 3e-3, 1e-2, 3e-2),
        sgd_rates=(0.01, 0.03, 0.1, 0.3),
        is_complete=True,
        has_lbfgs=True,
    )
