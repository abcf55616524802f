"""The heat equation with three modes that decay at different rates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blockhf import blocks
from blockhf_lab.physics import problem
from blockhf_lab.physics.networks import JetNetwork
from blockhf_lab.physics.problem import Kind, PhysicsTask

DIFFUSIVITY = 0.05
MODES = ((1, 1.0), (2, -0.5), (4, 0.4))


def solution(points: Tensor) -> Tensor:
    """Σ a exp(-κ (kπ)² t) sin kπx."""
    x, t = points.unbind(1)
    rates = [(k * math.pi, amplitude) for k, amplitude in MODES]
    return torch.stack([a * torch.exp(-DIFFUSIVITY * w**2 * t) * torch.sin(w * x) for w, a in rates]).sum(0)


def residuals(model: nn.Module, points: Tensor, values: Tensor) -> Sequence[Tensor]:
    """u_t - κ u_xx inside, u - g at the start and at the ends."""
    jet = model(points)
    return jet.slopes[1, :, 0] - DIFFUSIVITY * jet.second[:, 0], jet.value[:, 0] - values


def _points() -> list[Kind]:
    inside = problem.grid(problem.middles(30), problem.middles(30))
    zero, one = (torch.full((1,), value, dtype=problem.DTYPE) for value in (0.0, 1.0))
    start = problem.grid(problem.line(0, 1, 100), zero)
    ends = torch.cat([problem.grid(end, problem.line(0, 1, 50)) for end in (zero, one)])
    known = torch.cat([start, ends])
    return [Kind(inside, torch.zeros_like(inside[:, 0])), Kind(known, solution(known), weight=10.0)]


def task(preset: str) -> PhysicsTask:
    """900 points inside, 100 at the start, 100 at the ends; network 2-32-32-1."""
    return problem.make(
        "heat",
        preset,
        title="Heat equation, network 2-32-32-1, 1,100 points",
        equation=f"u_t = {DIFFUSIVITY} u_xx on [0, 1]², u = sin πx - ½ sin 2πx + 0.4 sin 4πx at t = 0",
        make_model=lambda: JetNetwork((2, 32, 32, 1), (1.0, 0.0)),
        make_blocks=blocks.single,
        kinds=_points(),
        test_points=lambda: problem.space_time(0, 1, 1).points,
        residuals=residuals,
        solution=solution,
        view=lambda: problem.space_time(0, 1, 1),
        targets=(1e-1, 1e-2, 1e-3, 1e-4),
    )
