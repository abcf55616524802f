"""The Hessian of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockhf.blocks import Block
from blockhf.curvature.base import Curvature
from blockhf.linalg import BlockOperator
from blockhf.objective import Evaluation, check_derivatives


@dataclass(frozen=True)
class Hessian(Curvature):
    """The matrix of second derivatives of the loss, by differentiating its gradient (Pearlmutter, 1994).

    It need not be positive definite: conjugate gradients then stop with nonpositive curvature. The
    objective may return the loss alone.
    """

    def at(self, evaluation: Evaluation, blocks: Sequence[Block]) -> BlockOperator:
        check_derivatives(evaluation)
        params = [param for block in blocks for param in block.params]
        gradients = iter(torch.autograd.grad(evaluation.loss, params, create_graph=True, allow_unused=True))
        return _Matrix(blocks, [[next(gradients) for _ in block.params] for block in blocks])


@dataclass(frozen=True, eq=False)
class _Matrix(BlockOperator):
    blocks: Sequence[Block]
    gradients: Sequence[Sequence[Tensor | None]]

    @property
    def sizes(self) -> Sequence[int]:
        return [block.size for block in self.blocks]

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        # By symmetry the derivative of the column's gradient along the vector is the row's product.
        pairs = zip(self.gradients[column], self.blocks[column].unflatten(vector), strict=True)
        used = [(slope, tangent) for slope, tangent in pairs if slope is not None and slope.requires_grad]
        if not used:
            return torch.zeros_like(self.blocks[row].values())
        products = torch.autograd.grad(
            [slope for slope, _ in used],
            self.blocks[row].params,
            [tangent for _, tangent in used],
            retain_graph=True,
            allow_unused=True,
        )
        return self.blocks[row].flatten(products)
