"""Muon for the races: matrices by orthogonalized momentum, all other parameters by AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

_COEFFICIENTS = (3.4445, -4.775, 2.0315)


def orthogonalized(matrix: Tensor, num_steps: int = 5) -> Tensor:
    """The matrix with singular values near 1, by Newton and Schulz's iteration.

    Each step is X ← aX + b(XXᵀ)X + c(XXᵀ)²X, with the coefficients of Jordan et al. (2024), which bring the
    singular values between 0.7 and 1.2 in five steps and not nearer.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    X: Tensor = matrix.T if is_tall else matrix
    X = X / X.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        S = X @ X.T
        X = a * X + (b * S + c * S @ S) @ X
    return X.T if is_tall else X


class Muon(Optimizer):
    """Muon (Jordan et al., 2024) in the parameters' own precision, with AdamW for what is no matrix.

    ``torch.optim.Muon`` takes matrices alone and orthogonalizes them in bfloat16, which is for GPUs: on a
    processor it is slower than float32. An orthogonalized matrix of m × n is multiplied by 0.2 √max(m, n), so
    that it is as large as an update of Adam (Liu et al., 2025) and both kinds have one learning rate.

    Args:
        params: Parameters.
        lr: Learning rate of both.
        momentum: Of the matrices, after Nesterov.
        betas: Of AdamW.
        weight_decay: Of both, decoupled; AdamW's own default.
        num_steps: Of the orthogonalization.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-2,
        num_steps: int = 5,
    ) -> None:
        if lr < 0:
            raise ValueError(f"lr is {lr}, but must be at least 0.")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}, but must be at least 0 and below 1.")
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "num_steps": num_steps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                if param.ndim == 2:
                    self._turn(param, group)
            self._adamw([param for param in params if param.ndim != 2], group)
        return loss

    def _turn(self, matrix: Tensor, group: dict[str, Any]) -> None:
        assert matrix.grad is not None
        average = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
        average.lerp_(matrix.grad, 1 - group["momentum"])
        direction = orthogonalized(matrix.grad.lerp(average, group["momentum"]), group["num_steps"])
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.sub_(direction, alpha=0.2 * math.sqrt(max(matrix.shape)) * group["lr"])

    def _adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
        adamw(
            params,
            [param.grad for param in params if param.grad is not None],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            [self.state[param]["step"] for param in params],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=1e-8,
            maximize=False,
        )
