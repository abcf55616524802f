"""Solvers of a block's damped system: by conjugate gradients, exactly, or by the preconditioner alone."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from blockhf.linalg.conjugate_gradient import (
    PendingSolution,
    Solution,
    Status,
    begin_conjugate_gradient,
    settle,
)
from blockhf.linalg.operators import (
    BlockOperator,
    Damped,
    DiagonalBlock,
    LinearOperator,
    Root,
    factorizable,
    measure_roots,
    plus_diagonal,
)
from blockhf.policy import Policy, State
from blockhf.scalars import gathered


@dataclass(frozen=True)
class System:
    """A block's linear system ``(A + damping I) x = rhs``, where to start and when to stop.

    Attributes:
        operator: The matrix of all blocks.
        index: The block.
        rhs: The right-hand side.
        damping: Added to the diagonal, weight decay included.
        weight_decay: How much of that is the curvature of an L2 penalty, and not damping.
        penalty: The penalty's gradient, which is part of ``-rhs``, if there is one.
        start: Where to start; ``None`` stands for zero.
        preconditioner: An approximate inverse of the damped matrix.
        rtol: As for ``conjugate_gradient``.
        progress: As for ``conjugate_gradient``.
        max_steps: The most iterations.
    """

    operator: BlockOperator
    index: int
    rhs: Tensor
    damping: float = 0.0
    weight_decay: float = 0.0
    penalty: Tensor | None = None
    start: Tensor | None = None
    preconditioner: LinearOperator | None = None
    rtol: float = 0.0
    progress: float = 0.0
    max_steps: int = 50

    @property
    def matrix(self) -> LinearOperator:
        """The block's damped matrix, for products."""
        return Damped(DiagonalBlock(self.operator, self.index), self.damping)

    def dense(self) -> Tensor | None:
        """The block's damped matrix itself, where it is stored."""
        matrix = self.operator.dense(self.index)
        if matrix is None:
            return None
        return plus_diagonal(matrix, self.damping)


class Solver(Policy):
    """Solves the system of one block; no block needs to know of another."""

    @abc.abstractmethod
    def solve(self, system: System, state: State) -> Solution:
        """The solution, whatever its quality; ``state`` is what the solver keeps of the block."""

    def begin(self, system: System, state: State) -> PendingSolution | Solution:
        """The same, but the numbers may still be on the device: those of all blocks are read together."""
        return self.solve(system, state)

    def __init_subclass__(cls) -> None:
        """A class that solves otherwise than the one it derives from begins otherwise too."""
        super().__init_subclass__()
        if "solve" in vars(cls) and "begin" not in vars(cls):
            cls.begin = Solver.begin  # type: ignore[method-assign]

    def product_budget(self, size: int, max_steps: int) -> int:
        """How many products it is worth to form the matrix of a block of so many parameters."""
        return max_steps


@dataclass(frozen=True)
class ConjugateGradient(Solver):
    """Truncated conjugate gradients, as in the paper.

    Args:
        check_every: As for ``conjugate_gradient``.
    """

    check_every: int | None = None

    def solve(self, system: System, state: State) -> Solution:
        return settle([ConjugateGradient.begin(self, system, state)])[0]

    def begin(self, system: System, state: State) -> PendingSolution:
        return begin_conjugate_gradient(
            system.matrix,
            system.rhs,
            system.start,
            preconditioner=system.preconditioner,
            rtol=system.rtol,
            progress=system.progress,
            max_steps=system.max_steps,
            check_every=self.check_every,
        )


@dataclass(frozen=True)
class Precondition(Solver):
    """The preconditioner's answer alone, without an iteration.

    With ``preconditioner=Kronecker()`` and a search that scales the steps this is K-FAC.
    """

    def product_budget(self, size: int, max_steps: int) -> int:
        """It makes no products, so there is nothing to form."""
        return 0

    def solve(self, system: System, state: State) -> Solution:
        return settle([Precondition.begin(self, system, state)])[0]

    def begin(self, system: System, state: State) -> PendingSolution:
        if system.preconditioner is None:
            raise ValueError(
                "Precondition() needs an inverse of each block. Use preconditioner=Kronecker(), which has "
                "none for blocks that products=Formed() has formed."
            )
        x = system.preconditioner @ system.rhs

        def finish(found: Sequence[float]) -> Solution:
            fine, along = found
            if not fine:
                return Solution(torch.zeros_like(x), Status.NON_FINITE, 0, 0, 1.0, 0.0)
            # Without a product the matrix is taken to be what the preconditioner inverts: x A x = b x.
            return Solution(x, Status.STEP_LIMIT, 0, 0, 1.0, -0.5 * along)

        return PendingSolution(gathered(x.isfinite().all(), x @ system.rhs), finish)


@dataclass(frozen=True)
class Cholesky(Solver):
    """By a factorization where a block's matrix is stored (``products=Formed()``), else as ``other`` does.

    A matrix that is not positive definite is left to ``other`` too.

    Args:
        other: Solves what is not stored.
        worth: How many products it is worth at most to have a small block's exact solution.
        small: The most parameters of a small block. A larger one's matrix is known but roughly from the
            samples that there are, and its exact solution is worth no more than a few CG steps.
        rescales: Where a block's root is stored, damp each parameter by its own curvature (Marquardt, 1963),
            so that the parameters' units do not matter.
    """

    other: Solver = field(default_factory=ConjugateGradient)
    worth: int = 10
    small: int = 1000
    rescales: bool = False

    def product_budget(self, size: int, max_steps: int) -> int:
        """The products of the other solver's steps or, for a small block, what an exact solution is worth."""
        return max(max_steps, self.worth if size <= self.small else 0)

    def solve(self, system: System, state: State) -> Solution:
        return settle([Cholesky.begin(self, system, state)])[0]

    def begin(self, system: System, state: State) -> PendingSolution | Solution:
        def otherwise() -> PendingSolution | Solution:
            return self._factorized(system, state) or self.other.begin(system, state)

        root = system.operator.root(system.index)
        if root is None:
            return otherwise()
        return _by_root(system, root, otherwise, rescales=self.rescales)

    def _factorized(self, system: System, state: State) -> PendingSolution | None:
        A, b = system.dense(), system.rhs
        if A is None:
            return None
        factor, failed = torch.linalg.cholesky_ex(factorizable(A))
        x = torch.cholesky_solve(b[:, None].to(factor.dtype), factor)[:, 0].to(b.dtype)
        r = b - A @ x

        def finish(found: Sequence[float]) -> Solution:
            broken, fine, norm, rest, along = found
            if broken or not fine:
                return self.other.solve(system, state)
            return Solution(x, Status.CONVERGED, 0, 0, rest / norm if norm > 0 else 0.0, -0.5 * along)

        norm = torch.linalg.vector_norm
        return PendingSolution(gathered(failed, x.isfinite().all(), norm(b), norm(r), x @ (b + r)), finish)


def _by_root(
    system: System, root: Root, otherwise: Callable[[], PendingSolution | Solution], *, rescales: bool
) -> PendingSolution:
    """The exact solution on the smaller side, where the square root of the block is stored."""
    inner = system
    if rescales:
        system, inner, root = _in_own_units(system, root)
    b, damping, norm = inner.rhs, inner.damping, torch.linalg.vector_norm

    def begin(factor: Tensor, failed: Tensor) -> PendingSolution:
        y, fine = _solved(inner, root, factor)
        image = root.rows @ y
        r = b - root.rows.T @ image - damping * y
        x = y / root.units if rescales else y
        # In other units, as if the damping were that of the system, which others take away again.
        model = 0.5 * (image @ image + system.damping * (x @ x)) - system.rhs @ x

        def finish(found: Sequence[float]) -> Solution:
            broken, fine, size, rest, model = found
            if broken and (more := root.factor(damping)) is not None:
                return settle([begin(more, torch.zeros_like(failed))])[0]
            residual = rest / size if size > 0 else 0.0
            # Without damping, a matrix may be singular, and this but rounding.
            if broken or not fine or (damping == 0 and residual > 0.1):
                return settle([otherwise()])[0]
            return Solution(x, Status.CONVERGED, 0, 0, residual, model)

        return PendingSolution(gathered(failed, fine & x.isfinite().all(), norm(b), norm(r), model), finish)

    return begin(*root.attempt(damping))


def _solved(system: System, root: Root, factor: Tensor) -> tuple[Tensor, Tensor]:
    """The solution by a factor of the smaller side, and whether that is one."""
    R, s, b, damping = root.rows, root.slopes, system.rhs, system.damping
    fine = torch.ones((), dtype=torch.bool, device=b.device)
    if not root.is_wide:
        return torch.cholesky_solve(b[:, None], factor)[:, 0], fine

    def inverted(vector: Tensor) -> Tensor:  # Woodbury
        inner = torch.cholesky_solve((R @ vector)[:, None], factor)[:, 0]
        return (vector - R.T @ inner) / damping

    x = root.solve(s, factor)  # b = -Rᵀ s, so nothing is subtracted
    if system.penalty is not None:
        x = x - inverted(system.penalty)
    is_gradient = _is_gradient(R, s, -b if system.penalty is None else -b - system.penalty)
    if damping > 0:
        return torch.where(is_gradient, x, inverted(b)), fine
    return x, is_gradient


def _in_own_units(system: System, root: Root) -> tuple[System, System, Root]:
    """The system, and it and its root with each parameter in units in which its curvature is 1."""
    if system.penalty is not None:
        root = _with_penalty(root, system.weight_decay, system.penalty)
        damping = max(0.0, system.damping - system.weight_decay)
        system = replace(system, damping=damping, weight_decay=0.0, penalty=None)
    scaled = root.in_own_units()
    measure_roots([root, scaled])
    damping = system.damping * scaled.mean_diagonal / (root.mean_diagonal or 1.0)
    return system, replace(system, rhs=system.rhs / scaled.units, damping=damping), scaled


def _with_penalty(root: Root, weight_decay: float, penalty: Tensor) -> Root:
    """The root of the matrix with the penalty's curvature: it has one more row for each parameter."""
    scale = weight_decay**0.5
    rows = torch.eye(len(penalty), dtype=penalty.dtype, device=penalty.device) * scale
    return Root(torch.cat([root.rows, rows]), torch.cat([root.slopes, penalty / scale]))


def _is_gradient(R: Tensor, s: Tensor, gradient: Tensor) -> Tensor:
    """Whether ``gradient`` is ``Rᵀ s``, up to what rounding leaves of that sum."""
    norm = torch.linalg.vector_norm
    rounding = 16 * torch.finfo(R.dtype).eps * norm(R) * norm(s)
    close: Tensor = norm(R.T @ s - gradient) <= 1e-6 * norm(gradient) + rounding
    return close
