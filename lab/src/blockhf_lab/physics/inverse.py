"""An inverse problem: speed and diffusivity of a drifting pulse, and the pulse itself, from measurements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blockhf import blocks
from blockhf_lab.physics import problem
from blockhf_lab.physics.networks import JetNetwork
from blockhf_lab.physics.problem import Kind, PhysicsTask
from blockhf_lab.tasks import Samples

SPEED, DIFFUSIVITY = 0.8, 0.05
_AGE = 0.2  # at t = 0, since it was a point


def solution(points: Tensor) -> Tensor:
    """The pulse, of height one at t = 0."""
    x, t = points.unbind(1)
    age = t + _AGE
    return (_AGE / age).sqrt() * torch.exp(-(x + 0.5 - SPEED * t).square() / (4 * DIFFUSIVITY * age))


class Pulse(JetNetwork):
    """A network for the pulse, and the two coefficients; they start at no speed and twice the diffusivity."""

    def __init__(self) -> None:
        super().__init__((2, 32, 32, 1), (1.0, 0.0))
        self.physics = nn.Parameter(torch.tensor([0.0, 2 * DIFFUSIVITY], dtype=problem.DTYPE))


def residuals(model: nn.Module, points: Tensor, values: Tensor) -> Sequence[Tensor]:
    """u_t + c u_x - ν u_xx, and u less what was measured."""
    assert isinstance(model, Pulse)
    jet = model(points)
    u_x, u_t = jet.slopes[:, :, 0]
    return u_t + model.physics[0] * u_x - model.physics[1] * jet.second[:, 0], jet.value[:, 0] - values


class InverseTask(PhysicsTask):
    """Tells also how far the coefficients are off."""

    def test_metrics(self, model: nn.Module, samples: Samples) -> dict[str, float]:
        """The relative L2 error of the pulse, and the larger of the coefficients' relative errors."""
        assert isinstance(model, Pulse)
        exact = torch.tensor([SPEED, DIFFUSIVITY], dtype=problem.DTYPE)
        off = float(((model.physics.detach() - exact) / exact).abs().max())
        return {**super().test_metrics(model, samples), "coefficients": off}


def task(preset: str) -> PhysicsTask:
    """200 measurements and 900 points for the equation; network 2-32-32-1 and two coefficients."""
    inside = problem.grid(-1 + 2 * problem.middles(30), problem.middles(30))
    measured = problem.sobol(200, (-1, 0), (1, 1))
    return problem.make(
        "inverse",
        preset,
        kind=InverseTask,
        title="Speed, diffusivity and field from 200 measurements, network 2-32-32-1",
        equation="u_t + c u_x = ν u_xx on [-1, 1] × [0, 1], c and ν unknown",
        make_model=Pulse,
        make_blocks=blocks.single,
        kinds=[
            Kind(inside, torch.zeros_like(inside[:, 0])),
            Kind(measured, solution(measured), weight=10.0),
        ],
        test_points=lambda: problem.space_time(-1, 1, 1).points,
        residuals=residuals,
        solution=solution,
        view=lambda: problem.space_time(-1, 1, 1),
        targets=(1e-1, 1e-2, 1e-3, 1e-4),
    )
