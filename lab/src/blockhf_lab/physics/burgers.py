"""Burgers' equation with viscosity 0.01/π: a sine that steepens into a front."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from blockhf import blocks
from blockhf_lab.physics import problem
from blockhf_lab.physics.networks import JetNetwork
from blockhf_lab.physics.problem import Kind, PhysicsTask

VISCOSITY = 0.01 / math.pi
_NODES = 200


def solution(points: Tensor) -> Tensor:
    """The solution by Cole and Hopf, whose two integrals are taken by Gauss-Hermite quadrature.

    With η = z √(4νt), u = -∫ sin π(x-η) F(x-η) e^(-z²) dz / ∫ F(x-η) e^(-z²) dz and
    F(y) = exp(-cos(πy) / (2πν)), which is scaled by its largest value to stay finite.
    """
    z, weights = (torch.from_numpy(own) for own in np.polynomial.hermite.hermgauss(_NODES))
    x, t = points.unbind(1)
    moved = x[:, None] - z * (4 * VISCOSITY * t.clamp(min=0))[:, None].sqrt()
    exponents = -torch.cos(math.pi * moved) / (2 * math.pi * VISCOSITY) + weights.log()
    shares = torch.softmax(exponents, dim=1)
    return -(torch.sin(math.pi * moved) * shares).sum(1)


def residuals(model: nn.Module, points: Tensor, values: Tensor) -> Sequence[Tensor]:
    """u_t + u u_x - ν u_xx inside, u - g at the start and at the ends."""
    jet = model(points)
    u, (u_x, u_t) = jet.value[:, 0], jet.slopes[:, :, 0]
    return u_t + u * u_x - VISCOSITY * jet.second[:, 0], u - values


def _points() -> list[Kind]:
    inside = problem.sobol(1200, (-1, 0), (1, 1))
    start = problem.grid(problem.line(-1, 1, 80), torch.zeros(1, dtype=problem.DTYPE))
    ends = problem.grid(torch.tensor([-1.0, 1.0], dtype=problem.DTYPE), problem.line(0, 1, 40))
    values = torch.cat([-torch.sin(math.pi * start[:, 0]), torch.zeros_like(ends[:, 0])])
    return [Kind(inside, torch.zeros_like(inside[:, 0])), Kind(torch.cat([start, ends]), values)]


def task(preset: str) -> PhysicsTask:
    """1,200 points inside, 80 at the start, 80 at the ends; network 2-20-20-20-1."""
    return problem.make(
        "burgers",
        preset,
        title="Burgers' equation, network 2-20-20-20-1, 1,360 points",
        equation="u_t + u u_x = 0.01/π u_xx on [-1, 1] × [0, 1], u = -sin πx at t = 0, u(±1) = 0",
        make_model=lambda: JetNetwork((2, 20, 20, 20, 1), (1.0, 0.0)),
        make_blocks=blocks.single,
        kinds=_points(),
        test_points=lambda: problem.space_time(-1, 1, 1).points,
        residuals=residuals,
        solution=solution,
        view=lambda: problem.space_time(-1, 1, 1),
        targets=(1e-1, 1e-2, 1e-3),
    )
