"""Policies of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockhf import (
    FixedStep,
    Hessian,
    blocks,
)
from blockhf.blocks import Block
from blockhf.damping import Outcome
from blockhf.objective import Evaluation, Problem
from blockhf.operators import BlockMatrix, Dense
from blockhf.search import Choice, Proposal
from blockhf.solvers import Solution, Status, System
from optimizer_tasks import (
    FIXED,
    Factory,
    Task,
    dense_gauss_newton,
    dense_gradient,
    dense_loss,
    values,
)


def to_the_end(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups, with a CG that does not stop for want of progress."""
    return [{**group, "cg_progress": 0.0} for group in groups]


def test_with_the_hessian_the_objective_may_return_the_loss_alone(factory: Factory) -> None:
    task = Task("cross_entropy", model=lambda: nn.Linear(3, 2))
    optimizer = factory(
        to_the_end(blocks.single(task.model)),
        lr=1.0,
        curvature=Hessian(),
        max_cg_steps=100,
        cg_rtol=1e-13,
        **FIXED,
    )
    gradient, matrix = dense_gradient(task, task.batch), dense_gauss_newton(task, task.batch)
    newton = torch.linalg.solve(matrix + 0.01 * torch.eye(8, dtype=torch.float64), -gradient)
    expected = values(task.model) + newton  # of a linear model the Gauss-Newton matrix is the Hessian
    optimizer.step(lambda batch: task.objective(batch)[1], task.batch)
    torch.testing.assert_close(values(task.model), expected, rtol=1e-8, atol=1e-9)


def test_with_gauss_newton_the_loss_alone_is_an_error(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.single(task.model))
    with pytest.raises(ValueError, match="nothing to take J of"):
        optimizer.step(lambda batch: task.objective(batch)[1], task.batch)


class Identity:
    """A curvature of one's own."""

    def at(self, evaluation: Evaluation, blocks: Sequence[Block]) -> BlockMatrix:
        return self

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        return vector


def test_a_curvature_of_ones_own_will_do(factory: Factory) -> None:
    """With the identity for curvature, the method is gradient descent."""
    task = Task()
    before, gradient = values(task.model), dense_gradient(task, task.batch)
    factory(
        blocks.by_layer(task.model), curvature=Identity(), lr=0.5, max_cg_steps=50, cg_rtol=1e-14, **FIXED
    ).step(task.objective, task.batch)
    torch.testing.assert_close(values(task.model), before - 0.5 * gradient / 1.01, rtol=1e-12, atol=1e-14)


class Countdown:
    """A damping rule of one's own."""

    initial, needs_ratio = 8.0, False

    def update(self, damping: float, outcome: Outcome) -> float:
        assert outcome.accepted
        return damping / 2


def test_a_damping_rule_of_ones_own_will_do(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.by_layer(task.model), damping=Countdown(), search=FixedStep())
    used = []
    for _ in range(3):
        optimizer.step(task.objective, task.batch)
        used.append({block.damping for block in optimizer.report.blocks})
    assert used == [{8.0}, {4.0}, {2.0}]


class Cautious:
    """A search of one's own: the gradient step of each block, if the second try is worse than the first."""

    evaluates, record = True, None

    def choose(self, problem: Problem, loss: float, proposals: Sequence[Proposal]) -> Choice:
        update = [-0.01 * proposal.gradient for proposal in proposals]
        return Choice(update, "a gradient step", loss=float(problem.loss_at(update)))


def test_a_search_of_ones_own_will_do(factory: Factory) -> None:
    task = Task()
    before, gradient = values(task.model), dense_gradient(task, task.batch)
    optimizer = factory(blocks.by_layer(task.model), search=Cautious())
    optimizer.step(task.objective, task.batch)
    torch.testing.assert_close(values(task.model), before - 0.01 * gradient, rtol=1e-12, atol=1e-14)
    assert optimizer.report.reason == "a gradient step"
    assert optimizer.report.loss_after == float(dense_loss(task, task.batch))


class Coupled:
    """A solver of one's own: all blocks at once, with the products between blocks."""

    def solve(self, systems: Sequence[System], matrix: BlockMatrix) -> list[Solution]:
        sizes = [len(system.rhs) for system in systems]
        rows = []
        for row, own in enumerate(sizes):
            parts = [
                torch.stack(
                    [matrix.product(row, column, e) for e in torch.eye(other, dtype=torch.float64)], dim=1
                )
                if row != column
                else torch.stack(
                    [systems[row].operator @ e for e in torch.eye(own, dtype=torch.float64)], dim=1
                )
                for column, other in enumerate(sizes)
            ]
            rows.append(torch.cat(parts, dim=1))
        rhs = torch.cat([system.rhs for system in systems])
        pieces = torch.split(torch.linalg.solve(torch.cat(rows), rhs), sizes)
        return [Solution(x, Status.CONVERGED, 1, 0, 0.0, 0.0) for x in pieces]


def test_a_solver_of_ones_own_will_do(factory: Factory) -> None:
    """One that couples the blocks makes the step of a single block."""
    task, twin = Task(), Task()
    options = {"cg_rtol": 1e-13, "max_cg_steps": 400, **FIXED}
    factory(blocks.by_layer(task.model), solver=Coupled(), **FIXED).step(task.objective, task.batch)
    factory(to_the_end(blocks.single(twin.model)), **options).step(twin.objective, twin.batch)
    torch.testing.assert_close(values(task.model), values(twin.model), rtol=1e-8, atol=1e-9)


class Exact:
    """A preconditioner of one's own: the inverse itself."""

    def prepare(self, problem: Problem, matrix: BlockMatrix, dampings: Sequence[float]) -> list[Dense]:
        inverses = []
        for index, (block, damping) in enumerate(zip(problem.blocks, dampings, strict=True)):
            eye = torch.eye(block.size, dtype=torch.float64)
            own = torch.stack([matrix.product(index, index, e) for e in eye]) + damping * eye
            inverses.append(Dense(torch.linalg.inv(own)))
        return inverses


def test_a_preconditioner_of_ones_own_will_do(factory: Factory) -> None:
    """With the exact inverse, one iteration is enough."""
    task, twin = Task(), Task()
    options = {"cg_rtol": 1e-9, "max_cg_steps": 400, **FIXED}
    optimizer = factory(to_the_end(blocks.by_layer(task.model)), preconditioner=Exact(), **options)
    optimizer.step(task.objective, task.batch)
    factory(to_the_end(blocks.by_layer(twin.model)), **options).step(twin.objective, twin.batch)
    assert [block.num_steps for block in optimizer.report.blocks] == [1, 1, 1]
    torch.testing.assert_close(values(task.model), values(twin.model), rtol=1e-6, atol=1e-7)
