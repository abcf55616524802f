"""The generalized Gauss-Newton matrix, ``Jᵀ H J``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockhf.blocks import Block
from blockhf.curvature.base import Curvature, JacobianForm
from blockhf.curvature.double_backward import Linearization, explained
from blockhf.linalg import BlockOperator
from blockhf.objective import Evaluation, check_outputs


@dataclass(frozen=True)
class GaussNewton(Curvature):
    r""":math:`G = J^\top H J` with ``J`` of the outputs and ``H`` of the loss (Schraudolph, 2002).

    ``H`` is applied by differentiating the objective's own loss with respect to its outputs, so any loss
    will do. The matrix is positive semi-definite where the loss is convex in the outputs.
    """

    def at(self, evaluation: Evaluation, blocks: Sequence[Block]) -> BlockOperator:
        check_outputs(evaluation)
        outputs = evaluation.outputs
        slopes = torch.autograd.grad(
            evaluation.loss, outputs, create_graph=True, allow_unused=True, materialize_grads=True
        )
        curved = tuple(slope for slope in slopes if slope.requires_grad)
        keep = tuple(slope.requires_grad for slope in slopes)
        return _Matrix(Linearization(outputs, blocks), curved, keep)


@dataclass(frozen=True, eq=False)
class _Matrix(JacobianForm):
    linearization: Linearization
    slopes: tuple[Tensor, ...]
    curved: tuple[bool, ...]

    @property
    def sizes(self) -> Sequence[int]:
        return self.linearization.sizes

    def has_influence(self, block: int) -> bool:
        return self.linearization.has_influence(block)

    def halves(self, column: int, vector: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        tangents = self.linearization.pushforward(column, vector)
        return tangents, self._hessian(tangents)

    def way_back(self, row: int, curved: Sequence[Tensor]) -> Tensor:
        return self.linearization.pullback(row, curved)

    def _hessian(self, tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``H`` times a tangent of the outputs."""
        if not self.slopes:  # the loss is linear in the outputs
            return tuple(torch.zeros_like(tangent) for tangent in tangents)
        with explained("the loss"):
            return torch.autograd.grad(
                self.slopes,
                self.linearization.outputs,
                [tangent for tangent, curved in zip(tangents, self.curved, strict=True) if curved],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
