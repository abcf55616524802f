"""Policies of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from blockhf import (
    BlockOperator,
    Choice,
    Curvature,
    DampingRule,
    Dense,
    Evaluation,
    FixedStep,
    Hessian,
    Outcome,
    PolicyState,
    Preconditioner,
    Samples,
    Search,
    Situation,
    Solution,
    Solver,
    State,
    Status,
    System,
    blocks,
)
from blockhf.blocks import Block
from optimizer_tasks import (
    FIXED,
    Factory,
    Task,
    dense_gauss_newton,
    dense_gradient,
    dense_loss,
    values,
)


def test_with_the_hessian_the_objective_may_return_the_loss_alone(factory: Factory) -> None:
    task = Task("cross_entropy", model=lambda: nn.Linear(3, 2))
    optimizer = factory(
        blocks.single(task.model),
        lr=1.0,
        curvature=Hessian(),
        max_cg_steps=100,
        cg_rtol=1e-13,
        cg_progress=0.0,
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


class Ones(BlockOperator):
    """The identity."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._sizes = [block.size for block in blocks]

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        return vector


class Flat(Curvature):
    """A curvature of one's own."""

    def at(self, evaluation: Evaluation, blocks: Sequence[Block]) -> BlockOperator:
        return Ones(blocks)


def test_a_curvature_of_ones_own_will_do(factory: Factory) -> None:
    """With the identity for curvature, the method is gradient descent."""
    task = Task()
    before, gradient = values(task.model), dense_gradient(task, task.batch)
    factory(
        blocks.by_layer(task.model), curvature=Flat(), lr=0.5, max_cg_steps=50, cg_rtol=1e-14, **FIXED
    ).step(task.objective, task.batch)
    torch.testing.assert_close(values(task.model), before - 0.5 * gradient / 1.01, rtol=1e-12, atol=1e-14)


@dataclass(frozen=True)
class Countdown(DampingRule):
    """A damping rule of one's own."""

    initial: float = 8.0

    @property
    def needs_ratio(self) -> bool:
        return False

    def update(self, damping: float, outcome: Outcome, state: State) -> float:
        assert outcome.accepted
        return damping / 2


def test_a_damping_rule_of_ones_own_will_do(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.by_layer(task.model), damping=Countdown(), max_cg_steps=3, search=FixedStep())
    used = []
    for _ in range(3):
        optimizer.step(task.objective, task.batch)
        used.append({block.damping for block in optimizer.report.blocks})
    assert used == [{8.0}, {4.0}, {2.0}]


class Cautious(Search):
    """A search of one's own: the gradient step of each block."""

    def choose(self, situation: Situation, state: PolicyState) -> Choice:
        update = [-0.01 * proposal.gradient for proposal in situation.proposals]
        return Choice(update, "a gradient step", loss=float(situation.point.loss_at(update)))


def test_a_search_of_ones_own_will_do(factory: Factory) -> None:
    task = Task()
    before, gradient = values(task.model), dense_gradient(task, task.batch)
    optimizer = factory(blocks.by_layer(task.model), search=Cautious(), max_cg_steps=3)
    optimizer.step(task.objective, task.batch)
    torch.testing.assert_close(values(task.model), before - 0.01 * gradient, rtol=1e-12, atol=1e-14)
    assert optimizer.report.reason == "a gradient step"
    assert optimizer.report.loss_after == float(dense_loss(task, task.batch))


def columns(operator: BlockOperator, index: int) -> Tensor:
    """A diagonal block, product by product."""
    eye = torch.eye(operator.sizes[index], dtype=torch.float64)
    return torch.stack([operator.product(index, index, column) for column in eye], dim=1)


class Direct(Solver):
    """A solver of one's own: dense elimination."""

    def solve(self, system: System, state: State) -> Solution:
        matrix = columns(system.operator, system.index)
        matrix += system.damping * torch.eye(len(matrix), dtype=matrix.dtype)
        x = torch.linalg.solve(matrix, system.rhs)
        return Solution(x, Status.CONVERGED, 1, 0, 0.0, -0.5 * float(x @ system.rhs))


CONVERGED = {"cg_progress": 0.0, "max_cg_steps": 400, **FIXED}


def test_a_solver_of_ones_own_will_do(factory: Factory) -> None:
    """One that eliminates makes the step of converged conjugate gradients."""
    task, twin = Task(), Task()
    optimizer = factory(blocks.by_layer(task.model), solver=Direct(), **FIXED)
    optimizer.step(task.objective, task.batch)
    sizes = [block.size for block in optimizer.report.blocks]
    assert [block.num_products for block in optimizer.report.blocks] == sizes, "whoever makes them"
    factory(blocks.by_layer(twin.model), cg_rtol=1e-13, **CONVERGED).step(twin.objective, twin.batch)
    torch.testing.assert_close(values(task.model), values(twin.model), rtol=1e-8, atol=1e-9)


class Exact(Preconditioner):
    """A preconditioner of one's own: the inverse itself."""

    def prepare(
        self,
        samples: Samples,
        curvature: Curvature,
        operator: BlockOperator,
        dampings: Sequence[float],
        state: PolicyState,
    ) -> list[Dense]:
        return [
            Dense(torch.linalg.inv(columns(operator, index) + damping * torch.eye(block.size).double()))
            for index, (block, damping) in enumerate(zip(samples.blocks, dampings, strict=True))
        ]


def test_a_preconditioner_of_ones_own_will_do(factory: Factory) -> None:
    """With the exact inverse, one iteration is enough."""
    task, twin = Task(), Task()
    options = {"cg_rtol": 1e-9, **CONVERGED}
    optimizer = factory(blocks.by_layer(task.model), preconditioner=Exact(), **options)
    optimizer.step(task.objective, task.batch)
    factory(blocks.by_layer(twin.model), **options).step(twin.objective, twin.batch)
    assert [block.num_steps for block in optimizer.report.blocks] == [1, 1, 1]
    torch.testing.assert_close(values(task.model), values(twin.model), rtol=1e-6, atol=1e-7)
