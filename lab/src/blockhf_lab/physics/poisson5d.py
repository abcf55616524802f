"""Poisson's equation in five dimensions, as in arXiv 2405.15603: u = Σ cos πxᵢ on [0, 1]⁵."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blockhf import blocks
from blockhf_lab.physics import problem
from blockhf_lab.physics.networks import JetNetwork
from blockhf_lab.physics.problem import Kind, PhysicsTask, View

DIMENSIONS = 5


def solution(points: Tensor) -> Tensor:
    """Σ cos πxᵢ."""
    return torch.cos(math.pi * points).sum(1)


def residuals(model: nn.Module, points: Tensor, values: Tensor) -> Sequence[Tensor]:
    """-Δu - f inside, u - g on the boundary."""
    jet = model(points)
    return -jet.second[:, 0] - values, jet.value[:, 0] - values


def draw(num_inside: int, num_edge: int, generator: torch.Generator | None = None) -> list[Kind]:
    """Uniform points inside and on the boundary, by torch's own generator unless there is another."""
    inside = torch.rand(num_inside, DIMENSIONS, dtype=problem.DTYPE, generator=generator)
    edge = torch.rand(num_edge, DIMENSIONS, dtype=problem.DTYPE, generator=generator)
    which = torch.randint(DIMENSIONS, (num_edge,), generator=generator)
    edge[torch.arange(num_edge), which] = torch.randint(2, (num_edge,), generator=generator).to(edge.dtype)
    return [Kind(inside, math.pi**2 * solution(inside)), Kind(edge, solution(edge))]


def _view() -> View:
    axis = problem.line(0, 1, 61)
    plane = problem.grid(axis, axis)
    middle = torch.full((len(plane), DIMENSIONS - 2), 0.25, dtype=plane.dtype)
    return View(torch.cat([plane, middle], dim=1), (61, 61), (0, 1, 0, 1), ("x₂", "x₁, other coordinates ¼"))


def _test_points() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(9000, DIMENSIONS, dtype=problem.DTYPE, generator=generator)


def task(preset: str) -> PhysicsTask:
    """3,000 points inside and 500 on the boundary; network 5-64-64-48-48-1, 10,065 parameters."""
    return problem.make(
        "poisson5d",
        preset,
        title="Poisson's equation in five dimensions, 10,065 parameters, 3,500 points",
        equation="-Δu = π² Σ cos πxᵢ on [0, 1]⁵, u = Σ cos πxᵢ on its boundary",
        make_model=lambda: JetNetwork((DIMENSIONS, 64, 64, 48, 48, 1), (1.0,) * DIMENSIONS),
        make_blocks=blocks.single,
        kinds=draw(3000, 500, torch.Generator().manual_seed(0)),
        test_points=_test_points,
        residuals=residuals,
        solution=solution,
        view=_view,
        targets=(1e-1, 1e-2, 1e-3),
        seconds=(20, 60),
        draw=lambda number: problem.batch(draw(number - number // 5, number // 5)).take(slice(None)),
    )
