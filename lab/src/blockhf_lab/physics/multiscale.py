"""Regression of a curve with frequencies 1, 4 and 16, of which networks learn the fast ones late."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blockhf import blocks
from blockhf_lab.physics import problem
from blockhf_lab.physics.networks import ValueNetwork
from blockhf_lab.physics.problem import Kind, PhysicsTask, View

PARTS = ((1, 1.0), (4, 0.5), (16, 0.2))


def solution(points: Tensor) -> Tensor:
    """Σ a sin πkx."""
    return torch.stack([a * torch.sin(math.pi * k * points[:, 0]) for k, a in PARTS]).sum(0)


def residuals(model: nn.Module, points: Tensor, values: Tensor) -> Sequence[Tensor]:
    """What the network is off."""
    return (model(points)[:, 0] - values,)


def _view() -> View:
    return View(problem.line(-1, 1, 2001)[:, None], (2001,), (-1, 1, -2, 2), ("x", "u"))


def task(preset: str) -> PhysicsTask:
    """512 points; network 1-40-40-1, 1,761 parameters."""
    points = problem.line(-1, 1, 512)[:, None]
    return problem.make(
        "multiscale",
        preset,
        title="Regression on three scales, network 1-40-40-1, 512 points",
        equation="u = sin πx + ½ sin 4πx + 0.2 sin 16πx on [-1, 1]",
        make_model=lambda: ValueNetwork((1, 40, 40, 1)),
        make_blocks=blocks.single,
        kinds=[Kind(points, solution(points))],
        test_points=lambda: _view().points,
        residuals=residuals,
        solution=solution,
        view=_view,
        targets=(1e-1, 1e-2, 1e-3, 1e-4),
    )
