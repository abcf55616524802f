"""Optimizers that losses without noise are trained by, to compare with. Each is written plainly.

- ``SelfScaledBFGS``: BFGS with a dense inverse Hessian and Al-Baali's self-scaling, which Urbán, Stefanou and
  Pons (2025) recommend for physics-informed networks;
- ``KernelGaussNewton``: Gauss-Newton steps with a fixed damping, solved among the residuals, and the best
  length of a grid;
- ``full_lbfgs`` and ``AdamThenLBFGS``: what most papers on physics-informed networks do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim import LBFGS, Adam, Optimizer

_LENGTHS = tuple(2.0**-i for i in range(12))


class _Flat(Optimizer):
    """An optimizer of one group of parameters, seen as one vector."""

    def __init__(self, params: Iterable[Tensor], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        if len(self.param_groups) > 1:
            raise ValueError(f"{type(self).__name__} has one group of parameters, but got several.")

    @property
    def params(self) -> list[Tensor]:
        own: list[Tensor] = self.param_groups[0]["params"]
        return own

    @property
    def memory(self) -> dict[str, Any]:
        """What is kept from step to step, under the first parameter as in ``torch.optim.LBFGS``."""
        own: dict[str, Any] = self.state[self.params[0]]
        return own

    def _read(self) -> Tensor:
        return torch.cat([param.detach().flatten() for param in self.params])

    @torch.no_grad()
    def _write(self, values: Tensor) -> None:
        sizes = [param.numel() for param in self.params]
        for param, own in zip(self.params, torch.split(values, sizes), strict=True):
            param.copy_(own.view_as(param))

    def _at(self, values: Tensor, closure: Callable[[], Tensor]) -> tuple[float, Tensor]:
        """Loss and gradient of the parameters with these values."""
        self._write(values)
        with torch.enable_grad():
            loss = float(closure().detach())
        slopes = [torch.zeros_like(param) if param.grad is None else param.grad for param in self.params]
        return loss, torch.cat([slope.flatten() for slope in slopes])


class SelfScaledBFGS(_Flat):
    """BFGS with a dense inverse Hessian, scaled by min(1, yᵀs / sᵀBs) before each update (Al-Baali, 1998).

    Args:
        params: One group of parameters; memory grows with the square of their number.
        lr: The length that the search tries first.
        max_tries: Lengths that are tried, by bisection to Wolfe's two conditions (Lewis & Overton, 2013).
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1.0, max_tries: int = 25) -> None:
        super().__init__(params, {"lr": lr, "max_tries": max_tries})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> float:  # type: ignore[override]
        """One step; returns the loss before it."""
        memory, start = self.memory, self._read()
        if "gradient" not in memory:
            memory["loss"], memory["gradient"] = self._at(start, closure)
        before, gradient = memory["loss"], memory["gradient"]
        if "inverse" not in memory:
            norm = float(gradient.norm())
            scale = 1 / norm if 0 < norm < math.inf else 1.0
            memory["inverse"] = scale * torch.eye(len(start), dtype=start.dtype, device=start.device)
        inverse = memory["inverse"]
        direction = -(inverse @ gradient)
        if float(direction @ gradient) >= 0:  # rounding has the last word
            del memory["inverse"], memory["gradient"]
            return float(before)
        length, loss, slopes = self._search(closure, start, before, gradient, direction)
        if length == 0:
            self._write(start)
            del memory["inverse"], memory["gradient"]
            return float(before)
        _update_inverse(inverse, length * direction, slopes - gradient, length * gradient)
        memory["loss"], memory["gradient"] = loss, slopes
        return float(before)

    def _search(
        self,
        closure: Callable[[], Tensor],
        start: Tensor,
        before: float,
        gradient: Tensor,
        direction: Tensor,
    ) -> tuple[float, float, Tensor]:
        """A length with Wolfe's conditions; zero where none was found that lowers the loss."""
        slope = float(direction @ gradient)
        low, high, length = 0.0, math.inf, float(self.param_groups[0]["lr"])
        best = (0.0, before, gradient)
        for _ in range(self.param_groups[0]["max_tries"]):
            loss, slopes = self._at(start + length * direction, closure)
            if not loss <= before + 1e-4 * length * slope:
                high = length
            else:
                best = (length, loss, slopes)
                if float(slopes @ direction) >= 0.9 * slope:
                    break
                low = length
            length = 2 * low if high == math.inf else (low + high) / 2
        self._write(start + best[0] * direction)
        return best


def _update_inverse(inverse: Tensor, step: Tensor, change: Tensor, slope: Tensor) -> None:
    """The self-scaled update of BFGS, in place; ``slope`` is minus the Hessian's guess times the step."""
    along = float(change @ step)
    if along <= 0:
        return
    scale = min(1.0, along / -float(slope @ step))
    if not scale > 0:
        return
    moved = inverse @ change
    across = float(change @ moved)
    # H ← (H - H y (H y)ᵀ / yᵀHy + v vᵀ) / τ + s sᵀ / yᵀs with v = √yᵀHy (s / yᵀs - Hy / yᵀHy)
    bend = across**0.5 * (step / along - moved / across)
    inverse.addr_(moved, moved, alpha=-1 / across).addr_(bend, bend).div_(scale)
    inverse.addr_(step, step, alpha=1 / along)


class KernelGaussNewton(_Flat):
    """Gauss-Newton with a fixed damping, solved among the residuals.

    The direction is -Jᵀ (J Jᵀ + λ)⁻¹ r, and of the lengths 1, ½, ¼ and so on the best is taken.

    Args:
        params: All parameters of the model, as one group.
        damping: λ, for residuals whose squares the loss halves and averages.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1.0, damping: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "damping": damping})

    @torch.no_grad()
    def minimize(self, model: nn.Module, objective: Callable[[Any], Any], batch: tuple[Tensor, ...]) -> float:
        """One step on the residuals that an objective of a model returns first; returns the loss before."""
        start = self._read()
        names = [f"model.{name}" for name, param in model.named_parameters() if param.requires_grad]
        sizes = [param.numel() for param in self.params]
        wrapped = _Residuals(model, objective)

        def residual(values: Tensor, *sample: Tensor) -> Tensor:
            pieces = zip(names, torch.split(values, sizes), self.params, strict=True)
            swapped = {name: own.view_as(param) for name, own, param in pieces}
            found: Tensor = functional_call(wrapped, swapped, tuple(own[None] for own in sample))
            return found[0]

        dims = (None, *(0 for _ in batch))
        rows = vmap(grad(residual), dims)(start, *batch) / len(batch[0]) ** 0.5
        values = vmap(residual, dims)(start, *batch) / len(batch[0]) ** 0.5
        kernel = rows @ rows.T
        kernel.diagonal().add_(self.param_groups[0]["damping"])
        factor, failed = torch.linalg.cholesky_ex(kernel)
        before = float(values.square().sum()) / 2
        if bool(failed):
            return before
        direction = -(rows.T @ torch.cholesky_solve(values[:, None], factor)[:, 0])
        best, length = before, 0.0
        for tried in _LENGTHS:
            self._write(start + tried * direction)
            loss = float(objective(batch)[1])
            if loss < best:
                best, length = loss, tried
        self._write(start + length * direction)
        return before


class _Residuals(nn.Module):
    """An objective's outputs, as those of a module that has the model in it."""

    def __init__(self, model: nn.Module, objective: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self._objective = model, objective

    def forward(self, *batch: Tensor) -> Tensor:
        found: Tensor = self._objective(batch)[0]
        return found


class AdamThenLBFGS(Optimizer):
    """Adam for the first share of the budget, then L-BFGS with strong Wolfe conditions and a history of 100.

    Args:
        params: One group of parameters.
        lr: Adam's rate.
        share: Of the budget, for Adam.

    Attributes:
        spent: The share of the budget that is spent, which the caller keeps up to date.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 3e-3, share: float = 0.4) -> None:
        own = list(params)
        super().__init__(own, {"lr": lr, "share": share})
        self._adam, self._lbfgs = Adam(own, lr=lr), full_lbfgs(own)
        self.spent = 0.0

    def step(self, closure: Callable[[], Tensor]) -> float:  # type: ignore[override]
        """One step of the one or the other; returns the loss before it."""
        first = self.spent < self.param_groups[0]["share"]
        optimizer: Optimizer = self._adam if first else self._lbfgs
        return float(optimizer.step(closure))  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Of both, and the group."""
        parts = {"adam": self._adam.state_dict(), "lbfgs": self._lbfgs.state_dict()}
        return {**super().state_dict(), "parts": parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of both, and the group."""
        parts = state_dict["parts"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "parts"})
        self._adam.load_state_dict(parts["adam"])
        self._lbfgs.load_state_dict(parts["lbfgs"])


def full_lbfgs(params: Iterable[Tensor], lr: float = 1.0, history_size: int = 100) -> LBFGS:
    """L-BFGS for full batches: strong Wolfe conditions, and no end while float64 has something to gain."""
    return LBFGS(
        params,
        lr=lr,
        history_size=history_size,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-16,
        tolerance_change=1e-16,
    )
