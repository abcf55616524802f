"""``least_squares``: curve fits and small models without the ceremony of an optimizer.

>>> x = torch.linspace(0, 1, 20, dtype=torch.float64)
>>> y = 2 * torch.exp(-3 * x)
>>> a = torch.ones(2, dtype=torch.float64, requires_grad=True)
>>> result = least_squares(lambda: a[0] * torch.exp(-a[1] * x) - y, [a])
>>> result.success, [round(value, 6) for value in a.tolist()]
(True, [2.0, 3.0])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockhf.linalg import Cholesky
from blockhf.optimizer import BlockHF


@dataclass(frozen=True, eq=False)
class LeastSquaresResult:
    """Where a fit ended, and why.

    Attributes:
        params: The parameters, which hold the solution.
        cost: Half the sum of the squared residuals there.
        optimality: The largest entry of the gradient of the cost there.
        status: Why it stopped, in words.
        success: Whether one of the tolerances was reached.
        num_steps: How many steps were made, rejected ones included.
        num_evaluations: How often the residuals were computed.
    """

    params: tuple[Tensor, ...]
    cost: float
    optimality: float
    status: str
    success: bool
    num_steps: int
    num_evaluations: int


def least_squares(
    residuals: Callable[[], Tensor],
    params: Iterable[Tensor],
    *,
    ftol: float = 1e-10,
    xtol: float = 1e-10,
    gtol: float = 1e-10,
    max_steps: int = 200,
) -> LeastSquaresResult:
    """Minimize half the sum of squares, like ``scipy.optimize.least_squares``; ``params`` change in place.

    Args:
        residuals: Computes the residuals, of any shape, from the parameters as they are.
        params: The parameters: leaf tensors that require gradients.
        ftol: Stops where a step lowers the cost by less than this share of it, and so does the model.
        xtol: Stops where a step is shorter than this share of the parameters' norm.
        gtol: Stops where no entry of the gradient is larger.
        max_steps: Stops after so many steps.
    """
    own = tuple(params)
    num_evaluations = 0

    def objective() -> tuple[Tensor, Tensor]:
        nonlocal num_evaluations
        num_evaluations += 1
        found = residuals()
        return found, found.square().sum() / 2

    optimizer = BlockHF.least_squares(own, solver=Cholesky(rescales=True))
    cost, optimality = _state(objective, own)
    status, success, num_steps, rejected = "the gradient is below gtol", optimality <= gtol, 0, 0
    while not success:
        if num_steps == max_steps:
            status = f"the limit of {max_steps} steps is used up"
            break
        before = _flat(own)
        cost = float(optimizer.step(objective))
        num_steps += 1
        report = optimizer.report
        assert report is not None
        if not math.isfinite(cost):
            status = "the residuals are not finite"
            break
        rejected = 0 if report.accepted else rejected + 1
        if rejected == 8:
            status = "stalled: no step lowers the cost, however short or damped"
            break
        if report.accepted:
            after, optimality = _state(objective, own)
            fallen = max(cost - after, -(report.predicted or 0.0))
            reached = {
                "the gradient is below gtol": optimality <= gtol,
                "the cost falls by less than ftol": fallen <= ftol * cost,
                "steps are shorter than xtol": _norm(_flat(own) - before) <= xtol * (xtol + _norm(before)),
            }
            cost, success = after, any(reached.values())
            status = next((reason for reason, holds in reached.items() if holds), status)
    return LeastSquaresResult(own, cost, optimality, status, success, num_steps, num_evaluations)


def _flat(params: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([param.detach().flatten() for param in params])


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


def _state(objective: Callable[[], tuple[Tensor, Tensor]], params: tuple[Tensor, ...]) -> tuple[float, float]:
    """The cost and the largest entry of its gradient."""
    with torch.enable_grad():
        _, cost = objective()
        gradients = torch.autograd.grad(cost, params, allow_unused=True, materialize_grads=True)
    return float(cost.detach()), max(float(gradient.abs().max()) for gradient in gradients)
