"""Dense matrices and gradients in double precision, by nothing but torch's own derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockhf_lab.fuzz.problems import Problem

Rows = tuple[Sequence[Tensor], Sequence[int]]


@dataclass(frozen=True)
class Dense:
    """What is known of a problem at a point.

    Attributes:
        loss: The loss.
        gradient: Flat, in the order of the parameters that it was asked for.
        matrix: The curvature.
        scale: What the matrix's entries are large or small by.
    """

    loss: Tensor
    gradient: Tensor
    matrix: Tensor

    @property
    def scale(self) -> float:
        return float(self.matrix.abs().max())


def _flat(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    return torch.cat(
        [
            own.new_zeros(own.numel()) if tensor is None else tensor.reshape(-1)
            for tensor, own in zip(tensors, like, strict=True)
        ]
    )


def _derivatives(value: Tensor, params: Sequence[Tensor], **options: Any) -> Tensor:
    if not value.requires_grad:
        return _flat([None] * len(params), params)
    found = torch.autograd.grad(value, params, retain_graph=True, allow_unused=True, **options)
    return _flat(found, params)


def dense(problem: Problem, model: nn.Module, names: Sequence[str], number: int, kind: str) -> Dense:
    """Loss, gradient and curvature of a model in double precision on a batch, random numbers as they are now.

    Args:
        problem: The problem.
        model: The model in double precision.
        names: Of the parameters, in order.
        number: Of the batch.
        kind: ``GaussNewton``, ``Hessian`` or ``EmpiricalFisher``.
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    params = [known[name] for name in names]
    objective = problem.objective(model, number)
    outputs, loss = objective(problem.batch(number)) if problem.has_batch else objective()
    gradient = _derivatives(loss, params, create_graph=True)
    if kind == "Hessian":
        matrix = torch.stack([_derivatives(entry, params) for entry in gradient])
        return Dense(loss.detach(), gradient.detach(), matrix.detach())
    (slopes,) = torch.autograd.grad(loss, outputs, create_graph=True)
    if kind == "GaussNewton":
        jacobian = torch.stack([_derivatives(entry, params) for entry in outputs.reshape(-1)])
        hessian = torch.stack([_derivatives(entry, [outputs]) for entry in slopes.reshape(-1)])
        matrix = jacobian.T @ hessian @ jacobian
    else:
        rows = []
        for index in range(len(outputs)):
            own = torch.zeros_like(slopes)
            own[index] = slopes[index].detach()
            rows.append(_derivatives(outputs, params, grad_outputs=own))
        stacked = torch.stack(rows)
        matrix = stacked.T @ stacked * (1 if problem.loss.is_sum else len(outputs))
    return Dense(loss.detach(), gradient.detach(), matrix.detach())
