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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
    ftol: float = 1e-14,
    xtol: float = 1e-12,
    gtol: float = 1e-12,
    max_steps: int = 1000,
) -> LeastSquaresResult:
    r"""Minimize half the sum of squares, like ``scipy.optimize.least_squares``; ``params`` change in place.

    Levenberg-Marquardt in a trust region: the step minimizes :math:`\|J x + r\|` among those with
    :math:`\|D x\|` within a radius that follows the reduction ratio, where ``D`` has the largest norms so far
    of the columns of ``J`` (Moré, 1978). It is found from the singular values of the stored Jacobian, which
    keeps all digits; for networks, ``BlockHF.least_squares`` takes less memory and time.

    Args:
        residuals: Computes the residuals, of any shape, from the parameters as they are.
        params: The parameters: leaf tensors that require gradients.
        ftol: Stops where a step lowers the cost by less than this share of it, and so does the model.
        xtol: Stops where the radius is less than this share of ``D`` times the parameters.
        gtol: Stops where the residuals have no larger cosine with a column of the Jacobian.
        max_steps: Stops after so many steps.
    """
    fit = _Fit(residuals, tuple(params))
    status, success, num_steps = "", False, 0
    if not math.isfinite(fit.cost):
        status = "the residuals are not finite"
    elif fit.is_flat(gtol):
        status, success = "the gradient is below gtol", True
    first = fit.cost
    while not status:
        if num_steps == max_steps:
            status = f"the limit of {max_steps} steps is used up"
            break
        before = fit.cost
        actual, predicted = fit.step()
        num_steps += 1
        if not math.isfinite(predicted):
            status = "the Jacobian is not finite"
            break
        reached = {
            "the residuals are gone": fit.cost <= fit.rounding**2 * first,
            "the gradient is below gtol": actual > 0 and fit.is_flat(max(gtol, fit.rounding)),
            "the cost falls by less than ftol": max(abs(actual), predicted)
            <= max(ftol, 8 * fit.rounding) * before,
            "steps are shorter than xtol": fit.radius <= max(xtol, fit.rounding) * fit.length,
        }
        success = any(reached.values())
        status = next((reason for reason, holds in reached.items() if holds), "")
    return LeastSquaresResult(
        fit.params, fit.cost, fit.optimality, status, success, num_steps, fit.num_evaluations
    )


class _Fit:
    """A fit under way: where it is, the Jacobian there, and the radius of the region that is trusted."""

    def __init__(self, residuals: Callable[[], Tensor], params: tuple[Tensor, ...]) -> None:
        if not params or not all(param.is_leaf and param.requires_grad for param in params):
            raise ValueError("params must be leaf tensors that require gradients. Use requires_grad_().")
        self.params, self._residuals = params, residuals
        self.rounding = torch.finfo(params[0].dtype).eps
        self.num_evaluations = 0
        self._scales = torch.zeros_like(self._place())
        self._linearize()
        self.radius = _FIRST_RADIUS * (self.length or 1.0)

    def _linearize(self) -> None:
        """Residuals and Jacobian here, its columns scaled, and what decides about steps."""
        with torch.enable_grad():
            found = self._evaluate()
            jacobian = _jacobian(found, self.params)
        self.values = found.detach().reshape(-1)
        self.cost = _cost(self.values)
        self.optimality = float((jacobian.T @ self.values).abs().max())
        self._norms = torch.linalg.vector_norm(jacobian, dim=0)
        largest = torch.maximum(self._scales, self._norms)
        self._jacobian, self._scales = jacobian, torch.where(largest > 0, largest, 1.0)
        self.length = _norm(self._scales * self._place())
        self._factors: tuple[Tensor, Tensor, Tensor] | None = None

    def is_flat(self, gtol: float) -> bool:
        """Whether no column of the Jacobian has a larger cosine with the residuals."""
        size = _norm(self.values)
        if size == 0:
            return True
        norms = torch.where(self._norms > 0, self._norms, 1.0)
        return float(((self._jacobian / norms).T @ self.values).abs().max()) <= gtol * size

    def step(self) -> tuple[float, float]:
        """Try a step; returns by how much the cost fell and was to fall. It is undone where it did not."""
        if self._factors is None:
            scaled = self._jacobian / self._scales
            if not bool(scaled.isfinite().all()):
                return 0.0, math.nan
            left, values, right = torch.linalg.svd(scaled, full_matrices=False)
            self._factors = left, values, right
        left, values, right = self._factors
        shares, damping = _constrained(left.T @ self.values, values, self.radius, self.rounding)
        scaled_step = -(right.T @ shares)
        size = _norm(scaled_step)
        bent = _norm(values * shares)
        predicted = bent**2 / 2 + damping * size**2
        before, start = self.cost, self._place()
        scaled_step = scaled_step + self._bend(start, scaled_step, damping, size)
        cost = _cost(self._values_at(start + scaled_step / self._scales))
        actual = before - cost
        ratio = actual / predicted if predicted > 0 and math.isfinite(actual) else -1.0
        if ratio < 0.25:
            self.radius = 0.25 * min(self.radius, size)
        elif ratio > 0.75 or damping == 0:
            self.radius = max(self.radius, 2 * size) if damping else 2 * size
        if ratio < 1e-4:
            self._move(start)
            return 0.0 if math.isfinite(actual) else -before, predicted
        self._linearize()
        return actual, predicted

    def _bend(self, start: Tensor, step: Tensor, damping: float, size: float) -> Tensor:
        """Half the geodesic acceleration (Transtrum & Sethna, 2012), or nothing where it is no small part."""
        assert self._factors is not None
        left, values, right = self._factors
        rises = self._values_at(start + _PROBE * step / self._scales) - self.values
        second = 2 / _PROBE * (rises / _PROBE - left @ (values * (right @ step)))
        if not bool(second.isfinite().all()):
            return torch.zeros_like(step)
        shares = _damped(left.T @ second, values, damping, self.rounding)
        return -(right.T @ shares) / 2 if 2 * _norm(shares) <= _MOST_BENT * size else torch.zeros_like(step)

    @torch.no_grad()
    def _values_at(self, place: Tensor) -> Tensor:
        self._move(place)
        return self._evaluate().reshape(-1)

    def _evaluate(self) -> Tensor:
        self.num_evaluations += 1
        return self._residuals()

    def _place(self) -> Tensor:
        return torch.cat([param.detach().flatten() for param in self.params])

    @torch.no_grad()
    def _move(self, place: Tensor) -> None:
        pieces = torch.split(place, [param.numel() for param in self.params])
        for param, piece in zip(self.params, pieces, strict=True):
            param.copy_(piece.view_as(param))


_FIRST_RADIUS = 10.0  # in lengths of the scaled parameters
_PROBE = 0.1  # the share of a step at which its curvature is measured
_MOST_BENT = 0.75


def _constrained(along: Tensor, values: Tensor, radius: float, rounding: float) -> tuple[Tensor, float]:
    """The step in the singular vectors' coordinates that fits into the radius, and its damping."""
    free = _damped(along, values, 0.0, rounding)
    if _norm(free) <= 1.1 * radius:
        return free, 0.0
    # Newton's iteration on 1 / radius - 1 / size(damping), which is nearly straight (Hebden, 1973).
    squares = values.square()
    damping = 0.0
    for _ in range(30):
        shares = _damped(along, values, damping, rounding)
        size = _norm(shares)
        if abs(size - radius) <= 0.1 * radius:
            break
        below = squares + damping
        slope = float((shares.square() / torch.where(below > 0, below, 1.0)).sum())
        damping = max(damping + (size / radius - 1) * size**2 / slope, 0.0)
    return shares, damping


def _damped(along: Tensor, values: Tensor, damping: float, rounding: float) -> Tensor:
    """The damped solution in the singular vectors' coordinates; without damping, but for those of noise."""
    if damping:
        return values * along / (values.square() + damping)
    kept = values > rounding * len(values) * values.max()
    return torch.where(kept, along / torch.where(kept, values, 1.0), 0.0)


def _jacobian(values: Tensor, params: Sequence[Tensor]) -> Tensor:
    """The derivatives of all values by all parameters: by columns where there are fewer, else by rows."""
    flat = values.reshape(-1)
    size = sum(param.numel() for param in params)
    if not flat.requires_grad:
        return flat.new_zeros(len(flat), size)
    if size < len(flat):
        weights = torch.zeros_like(flat, requires_grad=True)
        pulled = torch.autograd.grad(
            flat, params, weights, create_graph=True, allow_unused=True, materialize_grads=True
        )
        joined = torch.cat([own.reshape(-1) for own in pulled])
        return _products(joined, [weights], size).T
    return _products(flat, params, len(flat))


def _products(outputs: Tensor, inputs: Sequence[Tensor], number: int) -> Tensor:
    """The Jacobian of a vector, row by row, all at once where each operation knows how."""
    eye = torch.eye(number, dtype=outputs.dtype, device=outputs.device)

    def rows(directions: Tensor, *, batched: bool) -> Tensor:
        found = torch.autograd.grad(
            outputs,
            inputs,
            directions,
            retain_graph=True,
            is_grads_batched=batched,
            allow_unused=True,
            materialize_grads=True,
        )
        return torch.cat([own.reshape(*directions.shape[:-1], -1) for own in found], dim=-1).detach()

    try:
        return rows(eye, batched=True)
    except RuntimeError:  # an operation without a batching rule
        return torch.stack([rows(own, batched=False) for own in eye])


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


def _cost(values: Tensor) -> float:
    return float(values.detach().square().sum()) / 2
