"""Conjugate gradients: the one solver, its stopping rules, and how it says why it stopped.

Nothing here has heard of networks: a solver sees an operator and flat vectors. On a device the loop
never waits for a number, except to look every few iterations whether it is over. Iterations that were
started in vain leave everything as it was, so looking less often changes the cost and nothing else.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from blockhf.operators import BlockMatrix, Damped, LinearOperator


class Status(enum.Enum):
    """Why a solver stopped."""

    CONVERGED = "the residual is small enough"
    STALLED = "the last iterations no longer lowered the model noticeably"
    STEP_LIMIT = "the number of iterations is used up"
    NONPOSITIVE_CURVATURE = (
        "a direction of zero or negative curvature: the matrix is not positive definite; more damping, or "
        "Gauss-Newton instead of the Hessian, would help"
    )
    NON_FINITE = (
        "a product or a step is infinite or not a number: the curvature overflows; look at the samples, the "
        "precision, and whether the model has diverged"
    )

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class Iterate:
    """A solution on the way: after ``step`` iterations, with the value of the quadratic model."""

    step: int
    x: Tensor
    model: float


@dataclass(frozen=True)
class Solution:
    """What a solver found.

    Attributes:
        x: The best solution that was reached. It is finite, whatever the status.
        status: Why the solver stopped.
        num_steps: Iterations that changed ``x``.
        num_products: Products with the operator, the one for a start vector included.
        residual: Norm of ``b - A x`` relative to that of ``b``.
        model: The value of ``x @ A @ x / 2 - b @ x``; zero at ``x = 0``, negative where ``x`` is better.
        iterates: Solutions on the way, at geometric intervals, if they were asked for.
    """

    x: Tensor
    status: Status
    num_steps: int
    num_products: int
    residual: float
    model: float
    iterates: Sequence[Iterate] = field(default=())


# The order in which the ends of one iteration count.
_RUNNING, _CONVERGED, _STALLED, _NONPOSITIVE, _NON_FINITE = range(5)
_STATUS = {
    _RUNNING: Status.STEP_LIMIT,
    _CONVERGED: Status.CONVERGED,
    _STALLED: Status.STALLED,
    _NONPOSITIVE: Status.NONPOSITIVE_CURVATURE,
    _NON_FINITE: Status.NON_FINITE,
}


def conjugate_gradient(
    A: LinearOperator,
    b: Tensor,
    x: Tensor | None = None,
    *,
    preconditioner: LinearOperator | None = None,
    rtol: float = 0.0,
    progress: float = 0.0,
    max_steps: int,
    record: float | None = None,
    check_every: int | None = None,
) -> Solution:
    r"""Minimize :math:`\phi(x) = \tfrac12 x^\top A x - b^\top x` (Hestenes & Stiefel, 1952).

    Args:
        A: A symmetric positive definite operator.
        b: The right-hand side.
        x: Where to start; ``None`` is zero and saves a product.
        preconditioner: An approximate inverse of ``A``, symmetric positive definite.
        rtol: Stop where :math:`\lVert b - A x \rVert \le \text{rtol} \cdot \lVert b \rVert`.
        progress: Martens' rule (2010, section 4.4): stop after iteration :math:`i` where
            :math:`\phi(x_i) < 0` and :math:`(\phi(x_i) - \phi(x_{i-k})) / \phi(x_i) < k \epsilon` with
            :math:`k = \max(10, i / 10)`. Zero switches it off.
        max_steps: The most iterations to make.
        record: Keep iterates at steps that grow by this factor (Martens takes 1.3), the last included.
        check_every: Look every so many iterations whether it is over. By default at each one on the CPU,
            where a look is free, and at every tenth on a device, where it waits for the device.

    Returns:
        The solution. A matrix that is not positive definite, or not finite, is no error: it is the status
        of the solution, whose ``x`` is the last good iterate.

    >>> from blockhf.operators import Dense
    >>> A = Dense(torch.diag(torch.tensor([1.0, 2.0])))
    >>> solution = conjugate_gradient(A, torch.ones(2), max_steps=5, rtol=1e-6)
    >>> solution.x, str(solution.status), solution.num_steps
    (tensor([1.0000, 0.5000]), 'converged', 2)
    """
    if check_every is None:
        check_every = 1 if b.device.type == "cpu" else 10
    marks = _geometric(record, max_steps)
    recorded: list[tuple[int, Tensor]] = []

    num_products = 0 if x is None else 1
    r = b.clone() if x is None else b - A @ x
    x = torch.zeros_like(b) if x is None else x.clone()
    z = r if preconditioner is None else preconditioner @ r
    p, rz, rr = z.clone(), r @ z, r @ r
    goal = (rtol * torch.linalg.vector_norm(b)) ** 2
    zero = b.new_zeros(())
    # The model costs no product: A x = b - r at the start, and each step lowers it by alpha * rz / 2.
    models = b.new_zeros(max_steps + 1)
    models[0] = -0.5 * (x @ (b + r))
    end = torch.where(rr.isfinite() & rz.isfinite(), _RUNNING, _NON_FINITE)
    end = _first(end, rr <= goal, _CONVERGED)
    num_steps = torch.zeros((), dtype=torch.long, device=b.device)

    for step in range(1, max_steps + 1):
        if (step - 1) % check_every == 0 and int(end) != _RUNNING:
            break
        Ap = A @ p
        num_products += 1
        curvature = p @ Ap
        alpha = rz / curvature
        end = _first(end, ~curvature.isfinite(), _NON_FINITE)
        end = _first(end, (curvature <= 0) | (rz <= 0), _NONPOSITIVE)
        r.addcmul_(Ap, alpha, value=-1)
        if preconditioner is None:
            z = r
        elif step < max_steps:  # after the last step there is no next direction
            z = preconditioner @ r
        rz_new = r @ z
        rr_new = rz_new if preconditioner is None else r @ r
        beta = rz_new / rz
        # The step is taken only now that its residual is known to be finite, and with it its length. Where
        # it is not taken, the solution stays, and r and z are of no more use.
        end = _first(end, ~(beta.isfinite() & rr_new.isfinite()), _NON_FINITE)
        running = end == _RUNNING
        alpha = torch.where(running, alpha, zero)
        x.addcmul_(p, alpha)
        num_steps += running
        models[step] = models[step - 1] - 0.5 * alpha * rz
        if step in marks:
            recorded.append((step, x.clone()))

        if check_every > 1:
            z = torch.where(running, z, zero)
        torch.addcmul(z, p, torch.where(running, beta, zero), out=p)
        rz, rr = rz_new, torch.where(running, rr_new, rr)
        end = _first(end, rr <= goal, _CONVERGED)
        if progress > 0 and step > (k := max(10, step // 10)):
            gain = models[step] - models[step - k]
            end = _first(end, (models[step] < 0) & (gain > k * progress * models[step]), _STALLED)

    status, taken, values = _STATUS[int(end)], int(num_steps), models.tolist()
    norm = float(torch.linalg.vector_norm(b))
    residual = 0.0 if norm == 0 else math.sqrt(float(rr)) / norm
    if not bool(x.isfinite().all()):  # the solution itself overflowed, or the start vector was not finite
        x, status, taken, recorded = torch.zeros_like(x), Status.NON_FINITE, 0, []
        values[0], residual = 0.0, 1.0
    iterates = [Iterate(step, saved, values[step]) for step, saved in recorded if step < taken]
    if record is not None:
        iterates.append(Iterate(taken, x, values[taken]))
    return Solution(x, status, taken, num_products, residual, values[taken], tuple(iterates))


def _first(end: Tensor, happened: Tensor, status: int) -> Tensor:
    """The end that came first stays."""
    return torch.where((end == _RUNNING) & happened, status, end)


def _geometric(factor: float | None, limit: int) -> set[int]:
    marks: set[int] = set()
    if factor is not None:
        mark = 1.0
        while mark <= limit:
            marks.add(math.ceil(mark))
            mark = max(mark * factor, mark + 1)
    return marks


def num_iterates(record: float | None, max_steps: int) -> int:
    """How many iterates a solution has at most."""
    return 0 if record is None else len(_geometric(record, max_steps)) + 1


@dataclass(frozen=True)
class System:
    """A block's linear system, where to start and when to stop; ``index`` is that of the block."""

    index: int
    operator: LinearOperator
    rhs: Tensor
    start: Tensor | None = None
    preconditioner: LinearOperator | None = None
    rtol: float = 0.0
    progress: float = 0.0
    max_steps: int = 50
    record: float | None = None


@dataclass(frozen=True)
class Solved:
    """A block's solution, the products that it took, a word on how these are made, and the seconds."""

    solution: Solution
    num_products: int
    note: str
    seconds: float = 0.0


class BlockSolver(Protocol):
    """Solves the systems of all blocks; ``matrix`` also has the products between blocks."""

    def solve(self, systems: Sequence[System], matrix: BlockMatrix) -> list[Solution]: ...


def worth_of(solver: BlockSolver, size: int, max_steps: int) -> int:
    """How many products it is worth to form the matrix of a block of so many parameters.

    A solver that has no ``worth_of(size, max_steps)`` of its own makes as many products as steps.
    """
    own = getattr(solver, "worth_of", None)
    return max_steps if own is None else int(own(size, max_steps))


@dataclass(frozen=True)
class ConjugateGradient:
    """Each block by itself, as in the paper: no block needs to know of another.

    Args:
        check_every: As for ``conjugate_gradient``.
    """

    check_every: int | None = None

    def solve(self, systems: Sequence[System], matrix: BlockMatrix) -> list[Solution]:
        return [
            conjugate_gradient(
                system.operator,
                system.rhs,
                system.start,
                preconditioner=system.preconditioner,
                rtol=system.rtol,
                progress=system.progress,
                max_steps=system.max_steps,
                record=system.record,
                check_every=self.check_every,
            )
            for system in systems
        ]


@dataclass(frozen=True)
class GaussSeidel:
    r"""One block after the other, each with the answer to what the blocks before it will change.

    From the last block to the first, :math:`(G_{bb} + \lambda_b I) d_b = -g_b - \sum_{c > b} G_{bc} d_c`. A
    product between blocks is needed for each pair, and the blocks can no longer run in parallel.

    Args:
        other: Solves each block's system.
    """

    other: BlockSolver = field(default_factory=lambda: Cholesky())

    def worth_of(self, size: int, max_steps: int) -> int:
        """As for ``other``."""
        return worth_of(self.other, size, max_steps)

    def solve(self, systems: Sequence[System], matrix: BlockMatrix) -> list[Solution]:
        solutions: dict[int, Solution] = {}
        for system in reversed(systems):
            rhs = system.rhs
            for column, solution in solutions.items():
                if solution.status is not Status.NON_FINITE:
                    rhs = rhs - matrix.product(system.index, column, solution.x)
            (solutions[system.index],) = self.other.solve([replace(system, rhs=rhs)], matrix)
        return [solutions[system.index] for system in systems]


@dataclass(frozen=True)
class Precondition:
    """The preconditioner's answer alone, without an iteration.

    With ``preconditioner=Kronecker()`` and a search that scales the steps this is K-FAC.
    """

    def worth_of(self, size: int, max_steps: int) -> int:
        """It makes no products, so there is nothing to form."""
        return 0

    def solve(self, systems: Sequence[System], matrix: BlockMatrix) -> list[Solution]:
        return [self._apply(system) for system in systems]

    @staticmethod
    def _apply(system: System) -> Solution:
        if system.preconditioner is None:
            raise ValueError(
                "Precondition() needs an inverse of each block. Use preconditioner=Kronecker(), which has "
                "none for blocks that products=Formed() has formed."
            )
        x = system.preconditioner @ system.rhs
        if not bool(x.isfinite().all()):
            return Solution(torch.zeros_like(x), Status.NON_FINITE, 0, 0, 1.0, 0.0)
        # Without a product the matrix is taken to be what the preconditioner inverts: x A x = b x.
        model = -0.5 * float(x @ system.rhs)
        iterates = () if system.record is None else (Iterate(0, x, model),)
        return Solution(x, Status.STEP_LIMIT, 0, 0, 1.0, model, iterates)


@dataclass(frozen=True)
class Cholesky:
    """Outright where a block's matrix is there (``products=Formed()``), and otherwise as ``other`` does.

    A matrix that is not positive definite is left to ``other`` too.

    Args:
        other: Solves what is not there.
        worth: How many products it is worth at most to have a small block's exact solution.
        small: The most parameters of a small block. A larger one's matrix is known but roughly from the
            samples that there are, and its exact solution is worth no more than a few CG steps.
    """

    other: BlockSolver = field(default_factory=ConjugateGradient)
    worth: int = 100
    small: int = 1000

    def worth_of(self, size: int, max_steps: int) -> int:
        """The products of the other solver's steps or, for a small block, what an exact solution is worth."""
        return max(max_steps, self.worth if size <= self.small else 0)

    def solve(self, systems: Sequence[System], matrix: BlockMatrix) -> list[Solution]:
        dense: Mapping[int, Tensor] = getattr(matrix, "dense", {})
        solutions = [
            self._factorize(dense[system.index], system) if system.index in dense else None
            for system in systems
        ]
        rest = [system for system, solution in zip(systems, solutions, strict=True) if solution is None]
        others = iter(self.other.solve(rest, matrix) if rest else ())
        return [solution or next(others) for solution in solutions]

    def _factorize(self, matrix: Tensor, system: System) -> Solution | None:
        damping = system.operator.damping if isinstance(system.operator, Damped) else 0.0
        A = matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        factor, failed = torch.linalg.cholesky_ex(A)
        b = system.rhs
        x = torch.cholesky_solve(b[:, None], factor)[:, 0]
        if bool(failed) or not bool(x.isfinite().all()):
            return None
        r = b - A @ x
        norm = float(torch.linalg.vector_norm(b))
        residual = float(torch.linalg.vector_norm(r)) / norm if norm > 0 else 0.0
        last = Iterate(0, x, -0.5 * float(x @ (b + r)))
        iterates = () if system.record is None else (last,)
        return Solution(x, Status.CONVERGED, 0, 0, residual, last.model, iterates)
