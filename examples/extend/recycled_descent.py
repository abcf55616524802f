"""A solver of one's own: conjugate descent that starts along the solution of the last step.

    optimizer = BlockHF.martens(blocks.by_module(model), solver=RecycledDescent(), warm_start=0.0)

A solver derives from ``Solver`` and solves in ``solve`` the ``System`` of one block, where ``system.matrix @
vector`` multiplies with the damped matrix. It returns a ``Solution``, whatever its quality, whose ``Status``
says why it stopped. What it remembers of the block goes into ``state``, a mapping that is empty at first. On
a mesh it solves the blocks of its rank, and products are those on the samples of all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blockhf import Solution, Solver, State, Status, System


@dataclass(frozen=True)
class RecycledDescent(Solver):
    r"""Descent along residuals made conjugate to the direction before; the first is the last solution.

    Each iteration minimizes the model along :math:`d = z - \frac{z^\top A p}{p^\top A p} p` with ``z`` the
    preconditioned residual and ``p`` the direction before. Where nothing is known this is the method of
    conjugate gradients. Unlike a warm start, which takes a fixed share of the last solution, it goes along
    the last solution as far as the model falls.

    >>> from blockhf import DenseBlocks
    >>> system = System(DenseBlocks({0: torch.diag(torch.tensor([1.0, 4.0]))}), 0, torch.ones(2), rtol=1e-6)
    >>> state = {}
    >>> [RecycledDescent().solve(system, state).num_products for _ in range(2)]
    [2, 1]
    """

    def product_budget(self, size: int, max_steps: int) -> int:
        """A product for each step, and one for the recycled vector."""
        return max_steps + 1

    def solve(self, system: System, state: State) -> Solution:
        run = _Run(system)
        known = state.get("last")
        if known is not None and known.shape == system.rhs.shape and bool(known.any()):
            run.descend(known.to(system.rhs))
        num_recycled = run.num_products
        while run.status is None:
            if run.num_products - num_recycled == system.max_steps:
                run.status = Status.STEP_LIMIT
            else:
                run.descend(run.conjugate())
        solution = run.solution()
        state["last"] = solution.x.clone()
        return solution


class _Run:
    def __init__(self, system: System) -> None:
        self.system, self.matrix = system, system.matrix
        self.x, self.r = torch.zeros_like(system.rhs), system.rhs.clone()
        self.num_products = 0
        if system.start is not None:
            self.x = system.start.clone()
            self.r -= self._times(self.x)
        self.goal = system.rtol * float(system.rhs.norm())
        self.num_steps = 0
        self.last: tuple[Tensor, Tensor, float] | None = None  # p, A p and p A p
        self.status: Status | None = None
        self._check()

    def _times(self, vector: Tensor) -> Tensor:
        self.num_products += 1
        return self.matrix @ vector

    def conjugate(self) -> Tensor:
        inverse = self.system.preconditioner
        z = self.r if inverse is None else inverse @ self.r
        if self.last is None:
            return z
        p, Ap, curvature = self.last
        return z - (float(z @ Ap) / curvature) * p

    def descend(self, d: Tensor) -> None:
        """Go to the minimum of the model along ``d``."""
        Ad = self._times(d)
        curvature = float(d @ Ad)
        if not math.isfinite(curvature):
            self.status = Status.NON_FINITE
        elif curvature <= 0:
            self.status = Status.NONPOSITIVE_CURVATURE
        else:
            length = float(d @ self.r) / curvature
            self.x, self.r = self.x + length * d, self.r - length * Ad
            self.last = (d, Ad, curvature)
            self.num_steps += 1
            self._check()

    def _check(self) -> None:
        norm = float(self.r.norm())
        if not math.isfinite(norm):
            self.status = Status.NON_FINITE
        elif norm <= self.goal:
            self.status = Status.CONVERGED

    def solution(self) -> Solution:
        assert self.status is not None
        if not bool(self.x.isfinite().all() & self.r.isfinite().all()):
            return Solution(torch.zeros_like(self.x), self.status, 0, self.num_products, 1.0, 0.0)
        b, r = self.system.rhs, self.r
        residual = float(r.norm() / b.norm()) if bool(b.any()) else 0.0
        model = -0.5 * float(self.x @ (b + r))  # of A x = b - r
        return Solution(self.x, self.status, self.num_steps, self.num_products, residual, model)
