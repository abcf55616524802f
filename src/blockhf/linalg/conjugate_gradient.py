"""Conjugate gradients: the stopping rules, and how the solver says why it stopped.

Nothing here has heard of networks: the solver sees an operator and flat vectors. On a device the loop
never waits for a number, except to look every few iterations whether it is over. Iterations that were
started in vain leave everything as it was, so looking less often changes the cost and nothing else.

>>> from blockhf.linalg import Dense
>>> A = Dense(torch.diag(torch.tensor([1.0, 2.0])))
>>> solution = conjugate_gradient(A, torch.ones(2), max_steps=5, rtol=1e-6)
>>> solution.x, str(solution.status), solution.num_steps
(tensor([1.0000, 0.5000]), 'converged', 2)
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockhf.linalg.operators import LinearOperator
from blockhf.scalars import gathered, read


class Status(enum.Enum):
    """Why a solver stopped."""

    CONVERGED = "the residual is small enough"
    STALLED = "the last iterations no longer lowered the model noticeably"
    STEP_LIMIT = "the number of iterations is used up"
    NO_INFLUENCE = "the outputs do not depend on the block in this batch, so it stays as it is"
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
class Solution:
    """What a solver found.

    Attributes:
        x: The best solution that was reached. It is finite, whatever the status.
        status: Why the solver stopped.
        num_steps: Iterations that changed ``x``.
        num_products: Products with the operator, the one for a start vector included.
        residual: Norm of ``b - A x`` relative to that of ``b``.
        model: The value of ``x @ A @ x / 2 - b @ x``; zero at ``x = 0``, negative where ``x`` is better.
    """

    x: Tensor
    status: Status
    num_steps: int
    num_products: int
    residual: float
    model: float


@dataclass(frozen=True, eq=False)
class PendingSolution:
    """A solution whose numbers are still on the device, to be read together with those of others.

    Attributes:
        numbers: What is to be read.
        finish: Makes the solution of them.
    """

    numbers: Tensor
    finish: Callable[[Sequence[float]], Solution]


def settle(pending: Sequence[PendingSolution | Solution]) -> list[Solution]:
    """The solutions of several systems, by one wait for the device."""
    numbers = iter(read([each.numbers for each in pending if isinstance(each, PendingSolution)]))
    return [each.finish(next(numbers)) if isinstance(each, PendingSolution) else each for each in pending]


_ROUNDING = 4.0
"""How many units of rounding, relative to the right-hand side, a residual consists of at the least."""

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
    check_every: int | None = None,
) -> Solution:
    r"""Minimize :math:`\phi(x) = \tfrac12 x^\top A x - b^\top x` (Hestenes & Stiefel, 1952).

    Args:
        A: A symmetric positive definite operator.
        b: The right-hand side.
        x: Where to start; ``None`` is zero and saves a product.
        preconditioner: An approximate inverse of ``A``, symmetric positive definite.
        rtol: Stop where :math:`\lVert b - A x \rVert \le \text{rtol} \cdot \lVert b \rVert`, and in any case
            at rounding level, beyond which errors grow, on a singular matrix without bound.
        progress: Martens' rule (2010, section 4.4): stop after iteration :math:`i` where
            :math:`\phi(x_i) < 0` and :math:`(\phi(x_i) - \phi(x_{i-k})) / \phi(x_i) < k \epsilon` with
            :math:`k = \max(10, i / 10)`. Zero switches it off.
        max_steps: The most iterations to make.
        check_every: Look every so many iterations whether it is over. By default at each one on the CPU. A
            device has to be waited for: there it is after 100, 200, 400, … iterations, with ``progress``
            after 10, 20, 40, …, and never where only rounding can end them early (both rules are off).

    Returns:
        The solution. A matrix that is not positive definite, or not finite, is no error: it is the status
        of the solution, whose ``x`` is the last good iterate.
    """
    (solution,) = settle(
        [
            begin_conjugate_gradient(
                A,
                b,
                x,
                preconditioner=preconditioner,
                rtol=rtol,
                progress=progress,
                max_steps=max_steps,
                check_every=check_every,
            )
        ]
    )
    return solution


def begin_conjugate_gradient(
    A: LinearOperator,
    b: Tensor,
    x: Tensor | None = None,
    *,
    preconditioner: LinearOperator | None = None,
    rtol: float = 0.0,
    progress: float = 0.0,
    max_steps: int,
    check_every: int | None = None,
) -> PendingSolution:
    """The same without waiting for the numbers of the solution."""
    looks = _Looks(b.device, check_every, first=10 if progress > 0 else 100 if rtol > 0 else max_steps)
    r, num_products = (b.clone(), 0) if x is None else (b - A @ x, 1)
    x = torch.zeros_like(b) if x is None else x.clone()
    z = r if preconditioner is None else preconditioner @ r
    p, rz, zero = z.clone(), r @ z, b.new_zeros(())
    log = _Log(b, x, r, rz, rtol=rtol, progress=progress, max_steps=max_steps)
    for step in range(1, max_steps + 1):
        if looks.after(step - 1) and log.is_over():
            break
        Ap = A @ p
        alpha = rz / (curvature := p @ Ap)
        r.addcmul_(Ap, alpha, value=-1)
        if preconditioner is None:
            z = r
        elif step < max_steps:  # after the last step there is no next direction
            z = preconditioner @ r
        rz_new = r @ z
        rr = rz_new if preconditioner is None else r @ r
        beta = rz_new / rz
        # Only now is the residual known to be finite. Where it is not, x stays, and r and z are of no use.
        running = log.check(curvature, rz, beta, rr)
        alpha = torch.where(running, alpha, zero)
        x.addcmul_(p, alpha)
        if not looks.always:
            z = torch.where(running, z, zero)
        torch.addcmul(z, p, torch.where(running, beta, zero), out=p)
        log.advance(step, alpha * rz, rr, running)
        rz = rz_new
    return log.solution(x, num_products + log.num_checks)


class _Looks:
    """After which iterations the host looks whether it is over."""

    def __init__(self, device: torch.device, every: int | None, *, first: int) -> None:
        self.every = 1 if every is None and device.type == "cpu" else every
        self.always, self._first = self.every == 1, first

    def after(self, num_steps: int) -> bool:
        if self.every is not None:
            return num_steps % self.every == 0
        times, rest = divmod(num_steps, self._first)
        return times > 0 and rest == 0 and times & (times - 1) == 0  # a power of two


class _Log:
    """Where conjugate gradients are: the model after each iteration, and whether and why it is over.

    All of it stays on the device until it is asked for.
    """

    def __init__(
        self, b: Tensor, x: Tensor, r: Tensor, rz: Tensor, *, rtol: float, progress: float, max_steps: int
    ) -> None:
        self.norm, self.progress = torch.linalg.vector_norm(b), progress
        rounding = torch.maximum(self.norm, torch.linalg.vector_norm(b - r)) * _ROUNDING
        rounding = rounding * torch.finfo(b.dtype).eps
        self.rr, self.goal = r @ r, torch.maximum(rtol * self.norm, rounding) ** 2
        # The model costs no product: A x = b - r at the start, and each step lowers it by alpha * rz / 2.
        self.models = b.new_zeros(max_steps + 1)
        self.models[0] = -0.5 * (x @ (b + r))
        self.num_checks = 0  # one for each product
        self.num_steps = torch.zeros((), dtype=torch.long, device=b.device)
        self.end = torch.where(self.rr.isfinite() & rz.isfinite(), _RUNNING, _NON_FINITE)
        self._end_if(self.rr <= self.goal, _CONVERGED)

    def is_over(self) -> bool:
        return int(self.end) != _RUNNING

    def check(self, curvature: Tensor, rz: Tensor, beta: Tensor, rr: Tensor) -> Tensor:
        """Whether the step may be taken."""
        self.num_checks += 1
        self._end_if(~curvature.isfinite(), _NON_FINITE)
        self._end_if((curvature <= 0) | (rz <= 0), _NONPOSITIVE)
        self._end_if(~(beta.isfinite() & rr.isfinite()), _NON_FINITE)
        return self.end == _RUNNING

    def advance(self, step: int, decrease: Tensor, rr: Tensor, running: Tensor) -> None:
        self.num_steps += running
        self.models[step] = self.models[step - 1] - 0.5 * decrease
        self.rr = torch.where(running, rr, self.rr)
        self._end_if(self.rr <= self.goal, _CONVERGED)
        if self.progress > 0 and step > (k := max(10, step // 10)):
            model = self.models[step]
            gain = model - self.models[step - k]
            self._end_if((model < 0) & (gain > k * self.progress * model), _STALLED)

    def solution(self, x: Tensor, num_products: int) -> PendingSolution:
        model = self.models.index_select(0, self.num_steps.reshape(1))

        def finish(found: Sequence[float]) -> Solution:
            end, taken, norm, rr, fine, model = found
            if not fine:  # the solution itself overflowed, or the start vector was not finite
                return Solution(torch.zeros_like(x), Status.NON_FINITE, 0, num_products, 1.0, 0.0)
            residual = 0.0 if norm == 0 else math.sqrt(rr) / norm
            return Solution(x, _STATUS[int(end)], int(taken), num_products, residual, model)

        fine = x.isfinite().all()
        return PendingSolution(gathered(self.end, self.num_steps, self.norm, self.rr, fine, model), finish)

    def _end_if(self, happened: Tensor, status: int) -> None:
        """The end that comes first stays."""
        self.end = torch.where((self.end == _RUNNING) & happened, status, self.end)
