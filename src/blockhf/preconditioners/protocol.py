"""What a preconditioner is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from blockhf.objective import Problem
from blockhf.operators import BlockMatrix, LinearOperator


class Preconditioner(Protocol):
    """Makes, once a step, an approximate inverse for each block's damped matrix.

    A preconditioner that remembers things between steps also has ``state_dict`` and
    ``load_state_dict``; the optimizer saves and restores them with its own state.
    """

    def prepare(
        self, problem: Problem, matrix: BlockMatrix, dampings: Sequence[float]
    ) -> Sequence[LinearOperator | None]:
        """For each block an operator that maps a residual to an approximate solution, or ``None``."""
        ...


@dataclass(frozen=True)
class Identity:
    """No preconditioner; the paper's choice."""

    def prepare(
        self, problem: Problem, matrix: BlockMatrix, dampings: Sequence[float]
    ) -> Sequence[LinearOperator | None]:
        return [None] * len(problem.blocks)
