"""A curve fit of nine parameters: two overlapping peaks on a decaying background, without noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blockhf import blocks
from blockhf_lab.physics import problem
from blockhf_lab.physics.problem import Kind, PhysicsTask, View

# Height, place and width of each peak; height and rate of the background, and its floor.
EXACT = (8.0, 110.0, 20.0, 7.0, 150.0, 18.0, 9.0, 0.01, 1.5)
START = (6.0, 100.0, 30.0, 9.0, 160.0, 25.0, 7.0, 0.02, 0.5)


def curve(params: Tensor, x: Tensor) -> Tensor:
    """Of nine parameters at places x."""
    peaks = [own[0] * torch.exp(-((x - own[1]) / own[2]).square()) for own in (params[:3], params[3:6])]
    background: Tensor = params[6] * torch.exp(-params[7] * x) + params[8]
    return peaks[0] + peaks[1] + background


def solution(points: Tensor) -> Tensor:
    """The curve that is looked for."""
    return curve(torch.tensor(EXACT, dtype=problem.DTYPE), points[:, 0])


class Peaks(nn.Module):
    """The curve's nine parameters, in units of the common start, from which they are up to a tenth away."""

    def __init__(self) -> None:
        super().__init__()
        self.units: Tensor
        self.register_buffer("units", torch.tensor(START, dtype=problem.DTYPE), persistent=False)
        self.params = nn.Parameter(1 + 0.1 * (2 * torch.rand(len(START), dtype=problem.DTYPE) - 1))

    def forward(self, points: Tensor) -> Tensor:
        return self.value(points)

    def value(self, points: Tensor) -> Tensor:
        """The curve."""
        return curve(self.units * self.params, points[:, 0])[:, None]


def residuals(model: nn.Module, points: Tensor, values: Tensor) -> Sequence[Tensor]:
    """What the curve is off."""
    return (model(points)[:, 0] - values,)


def _view() -> View:
    return View(problem.line(0, 250, 1001)[:, None], (1001,), (0, 250, 0, 15), ("x", "u"))


def task(preset: str) -> PhysicsTask:
    """250 points, nine parameters."""
    points = problem.line(1, 250, 250)[:, None]
    return problem.make(
        "curve-fit",
        preset,
        title="Two peaks on a background, nine parameters, 250 points",
        equation="u = Σ a exp(-((x - b)/c)²) + d exp(-ex) + f",
        make_model=Peaks,
        make_blocks=blocks.single,
        kinds=[Kind(points, solution(points))],
        test_points=lambda: _view().points,
        residuals=residuals,
        solution=solution,
        view=_view,
        targets=(1e-2, 1e-4, 1e-6, 1e-8),
        seconds=(5, 10),
    )
