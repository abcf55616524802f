"""Poisson's equation on the unit square: -Δu = 2π² sin πx sin πy with u = 0 on the boundary."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blockhf import blocks
from blockhf_lab.physics import problem
from blockhf_lab.physics.networks import JetNetwork
from blockhf_lab.physics.problem import Kind, PhysicsTask, View


def solution(points: Tensor) -> Tensor:
    """The product sin πx sin πy."""
    return torch.sin(math.pi * points).prod(1)


def residuals(model: nn.Module, points: Tensor, values: Tensor) -> Sequence[Tensor]:
    """-Δu - f inside, u - g on the boundary."""
    jet = model(points)
    return -jet.second[:, 0] - values, jet.value[:, 0] - values


def _points() -> list[Kind]:
    inside = problem.grid(problem.middles(30), problem.middles(30))
    along, zero, one = problem.middles(30), torch.zeros(30, dtype=problem.DTYPE), torch.ones(30).double()
    sides = [(along, zero), (along, one), (zero, along), (one, along)]
    edge = torch.cat([torch.stack(side, dim=1) for side in sides])
    return [Kind(inside, 2 * math.pi**2 * solution(inside)), Kind(edge, torch.zeros_like(edge[:, 0]))]


def _view() -> View:
    axis = problem.line(0, 1, 101)
    return View(problem.grid(axis, axis), (101, 101), (0, 1, 0, 1), ("y", "x"))


def task(preset: str) -> PhysicsTask:
    """900 points inside and 120 on the boundary; network 2-32-32-1, 1,185 parameters."""
    return problem.make(
        "poisson2d",
        preset,
        title="Poisson's equation in two dimensions, network 2-32-32-1, 1,020 points",
        equation="-Δu = 2π² sin πx sin πy on the unit square, u = 0 on its boundary",
        make_model=lambda: JetNetwork((2, 32, 32, 1), (1.0, 1.0)),
        make_blocks=blocks.single,
        kinds=_points(),
        test_points=lambda: _view().points,
        residuals=residuals,
        solution=solution,
        view=_view,
        targets=(1e-1, 1e-2, 1e-3, 1e-4),
    )
