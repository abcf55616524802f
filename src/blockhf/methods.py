"""Methods by their names: settings of ``BlockHF`` that belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from blockhf.bookkeeping import BlockOptimizer
from blockhf.curvature import Auto, Factored
from blockhf.linalg import Cholesky, ConjugateGradient
from blockhf.policies import (
    AllSamples,
    Backtracking,
    DampingRule,
    FixedStep,
    LevenbergMarquardt,
    RelativeDamping,
)
from blockhf.preconditioners import Identity

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on


def _plain() -> dict[str, Any]:
    """CG alone, on the whole batch."""
    return {
        "curvature_batch_size": None,
        "solver": ConjugateGradient(),
        "preconditioner": Identity(),
        "sampling": AllSamples(),
    }


class NamedMethods(BlockOptimizer):
    """The methods that ``BlockHF`` has by name. All take the options of ``BlockHF``."""

    @classmethod
    def paper(
        cls,
        params: Iterable[Any],
        *,
        lr: float = 0.1,
        damping: float = 0.0,
        max_cg_steps: int = 30,
        cg_rtol: float = 0.0,
        cg_progress: float = 0.0,
        warm_start: float = 0.95,
        **options: Any,
    ) -> Self:
        """Algorithm 1 of the paper to the letter.

        Plain CG on the Gauss-Newton matrix with constant damping, warm-started, and a fixed step.

        Args:
            params: As for ``BlockHF``.
            lr: The learning rate.
            damping: The constant damping.
            max_cg_steps: The most CG iterations.
            cg_rtol: The CG stop criterion.
            cg_progress: Another one, which the paper does not have.
            warm_start: The paper's "momentum".
            options: Further options of ``BlockHF``, e.g. ``curvature_batch_size`` and ``slow_start``.
        """
        make: Callable[..., Self] = cls  # with a subclass's options
        return make(
            params,
            lr=lr,
            damping=damping,
            max_cg_steps=max_cg_steps,
            cg_rtol=cg_rtol,
            cg_progress=cg_progress,
            warm_start=warm_start,
            **{"search": FixedStep(), **_plain(), **options},
        )

    @classmethod
    def martens(
        cls,
        params: Iterable[Any],
        *,
        damping: float | DampingRule | None = None,
        max_cg_steps: int = 50,
        cg_progress: float = 5e-4,
        warm_start: float = 0.95,
        **options: Any,
    ) -> Self:
        """Hessian-free optimization as Martens (2010) has it, in blocks.

        Plain CG until it makes little progress, warm-started, with Levenberg-Marquardt damping and
        backtracking.

        Args:
            params: As for ``BlockHF``.
            damping: A number, or a rule that adapts it.
            max_cg_steps: The most CG iterations.
            cg_progress: His stopping rule's constant.
            warm_start: How much of the last solution CG starts from.
            options: Further options of ``BlockHF``.
        """
        make: Callable[..., Self] = cls  # with a subclass's options
        return make(
            params,
            damping=LevenbergMarquardt() if damping is None else damping,
            max_cg_steps=max_cg_steps,
            cg_progress=cg_progress,
            warm_start=warm_start,
            **{"search": Backtracking(), **_plain(), **options},
        )

    @classmethod
    def least_squares(
        cls,
        params: Iterable[Any],
        *,
        damping: float | DampingRule | None = None,
        max_cg_steps: int = 250,
        **options: Any,
    ) -> Self:
        """For losses without noise: physics-informed networks, curve fits, small data (docs/physics.md).

        Each step takes all samples of the batch and solves each block's system exactly, among the parameters
        or among the samples, whichever are fewer. Damping follows the reduction ratio, relative to the
        curvature, and the step is shrunk for as long as the loss falls. Pass the same samples at each step.
        Where Jacobians cannot be stored, one warning says why, and conjugate gradients solve.

        Args:
            params: As for ``BlockHF``.
            damping: A number, or a rule that adapts it.
            max_cg_steps: The most CG iterations, where exact solutions cannot be had.
            options: Further options of ``BlockHF``.
        """
        settings = {
            **_plain(),
            "products": Factored(other=Auto()),
            "solver": Cholesky(),
            "search": Backtracking(max_tries=16, goes_on=True),
        }
        make: Callable[..., Self] = cls  # with a subclass's options
        return make(
            params,
            damping=RelativeDamping() if damping is None else damping,
            max_cg_steps=max_cg_steps,
            **{**settings, **options},
        )
