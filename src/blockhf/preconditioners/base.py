"""What a preconditioner is."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from blockhf.curvature import Curvature
from blockhf.linalg import BlockOperator, LinearOperator
from blockhf.policy import Policy, PolicyState
from blockhf.samples import Samples


class Preconditioner(Policy):
    """Makes, once a step, an approximate inverse for each block's damped matrix."""

    def mean_diagonals(
        self, samples: Samples, curvature: Curvature, operator: BlockOperator, state: PolicyState
    ) -> Sequence[Tensor | None]:
        """For each block the mean of its matrix's diagonal, where that is known without a product.

        Asked before ``prepare``, with the same arguments, where the damping is relative to the curvature.
        """
        return [None] * len(samples.blocks)

    @abc.abstractmethod
    def prepare(
        self,
        samples: Samples,
        curvature: Curvature,
        operator: BlockOperator,
        dampings: Sequence[float],
        state: PolicyState,
    ) -> Sequence[LinearOperator | None]:
        """For each block an operator that maps a residual to an approximate solution, or ``None``.

        Args:
            samples: The curvature's samples and the blocks. On a mesh these are this rank's blocks.
            curvature: Which matrix it is.
            operator: The matrix on these samples.
            dampings: Added to the diagonal of each block.
            state: What the preconditioner keeps from step to step.
        """


@dataclass(frozen=True)
class Identity(Preconditioner):
    """No preconditioner; the paper's choice."""

    def prepare(
        self,
        samples: Samples,
        curvature: Curvature,
        operator: BlockOperator,
        dampings: Sequence[float],
        state: PolicyState,
    ) -> Sequence[LinearOperator | None]:
        return [None] * len(samples.blocks)
