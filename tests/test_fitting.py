"""Classic least-squares problems, beside scipy's ``least_squares``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor

import blockhf

T = torch.linspace(0.1, 4, 25, dtype=torch.float64)
NOISE = 0.05 * torch.sin(37 * torch.arange(25, dtype=torch.float64))


def rosenbrock(x: Tensor) -> Tensor:
    return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])


def powell_singular(x: Tensor) -> Tensor:
    return torch.stack(
        [
            x[0] + 10 * x[1],
            5**0.5 * (x[2] - x[3]),
            (x[1] - 2 * x[2]) ** 2,
            10**0.5 * (x[0] - x[3]) ** 2,
        ]
    )


def two_exponentials(x: Tensor) -> Tensor:
    data = 3 * torch.exp(-0.5 * T) + 2 * torch.exp(-3 * T) + NOISE
    return x[0] * torch.exp(-x[1] * T) + x[2] * torch.exp(-x[3] * T) - data


def saturation(x: Tensor) -> Tensor:
    """A curve like that of Misra1a, whose parameters differ by six orders of magnitude."""
    at = 200 * T
    data = 240 * (1 - torch.exp(-5.5e-4 * at)) + 0.1 * NOISE
    return x[0] * (1 - torch.exp(-x[1] * at)) - data


def decay(x: Tensor) -> Tensor:
    return x[0] * torch.exp(-x[1] * T) + x[2] - (5 * torch.exp(-1.3 * T) + 1 + NOISE)


PROBLEMS: list[tuple[Callable[[Tensor], Tensor], list[float]]] = [
    (rosenbrock, [-1.2, 1.0]),
    (powell_singular, [3.0, -1.0, 0.0, 1.0]),
    (two_exponentials, [2.0, 0.3, 1.0, 2.0]),
    (saturation, [500.0, 1e-4]),
    (decay, [1.0, 1.0, 0.0]),
]


@pytest.mark.parametrize(
    ("function", "start"), PROBLEMS, ids=["rosenbrock", "powell", "two exponentials", "saturation", "decay"]
)
def test_the_cost_is_that_of_scipy(function: Callable[[Tensor], Tensor], start: list[float]) -> None:
    point = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    result = blockhf.least_squares(lambda: function(point), [point])
    expected = optimize.least_squares(
        lambda x: function(torch.as_tensor(x)).numpy(), np.array(start), method="lm", xtol=1e-14, ftol=1e-14
    )
    assert result.success, result.status
    assert result.cost == pytest.approx(expected.cost, rel=1e-6, abs=1e-12)
    assert result.params[0] is point
    assert result.cost == pytest.approx(float(function(point.detach()).square().sum()) / 2, abs=1e-20)
    assert 0 < result.num_steps < result.num_evaluations


def test_the_limit_of_steps_is_a_status() -> None:
    point = torch.tensor([-1.2, 1.0], dtype=torch.float64, requires_grad=True)
    result = blockhf.least_squares(lambda: rosenbrock(point), [point], max_steps=2)
    assert (result.success, result.num_steps) == (False, 2)
    assert result.status == "the limit of 2 steps is used up"


def test_a_start_at_the_solution_takes_no_step() -> None:
    point = torch.ones(2, dtype=torch.float64, requires_grad=True)
    result = blockhf.least_squares(lambda: rosenbrock(point), [point])
    assert (result.success, result.num_steps, result.status) == (True, 0, "the gradient is below gtol")


def test_residuals_that_are_not_finite_are_a_status() -> None:
    point = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    result = blockhf.least_squares(lambda: point.log() * torch.ones(2, dtype=torch.float64), [point])
    assert not result.success
    assert result.status == "the residuals are not finite"


def test_more_parameters_than_residuals_are_fitted_by_the_shortest_steps() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(3, 7, dtype=torch.float64)
    weights, shift = (torch.zeros(size, dtype=torch.float64, requires_grad=True) for size in (5, 2))
    target = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    result = blockhf.least_squares(lambda: matrix @ torch.cat([weights, shift]) - target, [weights, shift])
    assert result.success, result.status
    assert result.cost < 1e-28
    assert [param.shape for param in result.params] == [(5,), (2,)]


def test_numbers_of_single_precision_end_at_their_rounding() -> None:
    point = torch.tensor([-1.2, 1.0], requires_grad=True)
    result = blockhf.least_squares(lambda: rosenbrock(point), [point])
    assert result.success, result.status
    torch.testing.assert_close(point.detach(), torch.ones(2), atol=1e-5, rtol=0)


def test_scales_of_parameters_and_residuals_do_not_matter() -> None:
    steps = []
    for unit, scale in ((1.0, 1.0), (1e-6, 1e8)):
        point = torch.tensor([500.0, 1e-4 * unit], dtype=torch.float64, requires_grad=True)

        def residuals(point: Tensor = point, unit: float = unit, scale: float = scale) -> Tensor:
            return scale * saturation(torch.stack([point[0], point[1] / unit]))

        result = blockhf.least_squares(residuals, [point])
        assert result.success, result.status
        assert point.tolist()[0] == pytest.approx(240, rel=1e-2)
        steps.append(result.num_steps)
    assert abs(steps[0] - steps[1]) <= 1  # rounding may decide about the last


def test_parameters_that_cannot_be_fitted_are_refused() -> None:
    with pytest.raises(ValueError, match="must be leaf tensors that require gradients"):
        blockhf.least_squares(lambda: torch.zeros(2), [torch.zeros(2)])
