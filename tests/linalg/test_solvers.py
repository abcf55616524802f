"""Solvers of a block's system: each against a dense solve, and what each asks for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from blockhf.linalg import (
    BlockOperator,
    Cholesky,
    ConjugateGradient,
    CountedProducts,
    Dense,
    DenseBlocks,
    Precondition,
    Solver,
    Status,
    System,
)
from matrices import diag, spd, vector


def alone(matrix: Tensor) -> BlockOperator:
    """A matrix of one block, which is not stored for all that one can see."""

    class Hidden(DenseBlocks):
        def dense(self, block: int) -> Tensor | None:
            return None

    return Hidden({0: matrix})


def system(
    size: int, *, seed: int = 0, stored: bool = False, condition: float = 100.0, **more: Any
) -> System:
    matrix = spd(size, condition=condition)
    return System(DenseBlocks({0: matrix}) if stored else alone(matrix), 0, vector(size), **more)


def exact(own: System) -> Tensor:
    damping = own.damping * torch.eye(len(own.rhs), dtype=torch.float64)
    assert isinstance(own.operator, DenseBlocks)
    return torch.linalg.solve(own.operator.stored[0] + damping, own.rhs)


def test_conjugate_gradients_solve_each_system_with_its_own_options() -> None:
    systems = [
        system(9, rtol=1e-9, max_steps=90),
        system(5, start=vector(5, 2), max_steps=2),
        system(7, preconditioner=Dense(torch.linalg.inv(spd(7))), rtol=1e-6),
        system(80, condition=1e5, progress=0.05, max_steps=80),
        system(6, rtol=1e-9, damping=2.0),
    ]
    solver = ConjugateGradient(check_every=3)
    solutions = [solver.solve(each, {}) for each in systems]
    assert [str(solution.status) for solution in solutions] == [
        "converged",
        "step limit",
        "converged",
        "stalled",
        "converged",
    ]
    assert solutions[1].num_products == 3
    assert solutions[2].num_steps == 1
    assert solutions[0].num_products % 3 == 0
    for each, solution in zip(systems[::2], solutions[::2], strict=True):
        torch.testing.assert_close(solution.x, exact(each), rtol=1e-4, atol=1e-6)


# --- the exact solution ------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_a_stored_block_is_factorized_without_a_product(damping: float) -> None:
    own = system(8, stored=True, damping=damping)
    counted = CountedProducts(own.operator)
    solution = Cholesky().solve(System(counted, 0, own.rhs, damping), {})
    torch.testing.assert_close(solution.x, exact(own))
    assert (solution.status, solution.num_steps, solution.num_products) == (Status.CONVERGED, 0, 0)
    assert counted.num_products == [0]
    assert solution.residual < 1e-12
    assert solution.model == pytest.approx(-0.5 * float(own.rhs @ solution.x))


def test_a_right_hand_side_of_zero_has_no_residual() -> None:
    solution = Cholesky().solve(System(DenseBlocks({0: spd(3)}), 0, torch.zeros(3).double()), {})
    assert (solution.residual, solution.model) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("operator", "status"),
    [
        pytest.param(alone(spd(3)), Status.CONVERGED, id="not stored"),
        pytest.param(DenseBlocks({0: diag(1, -5, 1)}), Status.NONPOSITIVE_CURVATURE, id="indefinite"),
        pytest.param(DenseBlocks({0: diag(1, math.nan, 1)}), Status.NON_FINITE, id="not finite"),
    ],
)
def test_what_cannot_be_factorized_is_left_to_the_other_solver(
    operator: BlockOperator, status: Status
) -> None:
    own = System(operator, 0, torch.ones(3, dtype=torch.float64), rtol=1e-9)
    solution, other = Cholesky().solve(own, {}), ConjugateGradient().solve(own, {})
    assert solution.status is other.status is status
    assert torch.equal(solution.x, other.x)


def test_an_exact_solution_of_a_small_block_is_worth_what_the_solver_says() -> None:
    sizes = ((1000, 5), (1001, 5), (1000, 200))
    assert [Cholesky().product_budget(*each) for each in sizes] == [10, 5, 200]
    assert Cholesky(worth=7, small=20).product_budget(20, 5) == 7
    assert ConjugateGradient().product_budget(20, 5) == 5
    assert Precondition().product_budget(20, 5) == 0


# --- the preconditioner alone ------------------------------------------------------------------------


def test_the_preconditioner_alone_takes_no_product() -> None:
    inverse, counted = Dense(spd(4, seed=3)), CountedProducts(alone(spd(4)))
    solution = Precondition().solve(System(counted, 0, vector(4), preconditioner=inverse), {})
    torch.testing.assert_close(solution.x, inverse.matrix @ vector(4))
    assert (solution.num_products, solution.num_steps, solution.status) == (0, 0, Status.STEP_LIMIT)
    assert counted.num_products == [0]
    assert solution.model == pytest.approx(-0.5 * float(solution.x @ vector(4)))


def test_a_preconditioner_that_is_not_finite_moves_nothing() -> None:
    broken = Dense(torch.full((4, 4), math.nan, dtype=torch.float64))
    solution = Precondition().solve(system(4, preconditioner=broken), {})
    assert solution.status is Status.NON_FINITE
    assert not bool(solution.x.any())


def test_a_preconditioner_alone_has_to_be_there() -> None:
    with pytest.raises(ValueError, match=r"^Precondition\(\) needs an inverse of each block\."):
        Precondition().solve(system(4), {})


# --- systems -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", [ConjugateGradient(), Cholesky(), Precondition()], ids=repr)
def test_a_solver_leaves_its_system_alone(solver: Solver) -> None:
    own = system(5, stored=True, start=vector(5, 3), preconditioner=Dense(spd(5)))
    kept = [own.rhs.clone(), vector(5, 3), spd(5)]
    solver.solve(own, {})
    assert own.start is not None
    assert isinstance(own.operator, DenseBlocks)
    assert all(map(torch.equal, [own.rhs, own.start, own.operator.stored[0]], kept))


def test_a_system_has_the_damped_matrix_as_products_and_where_stored_itself() -> None:
    own, v = system(6, stored=True, damping=0.7), vector(6, 4)
    dense = own.dense()
    assert dense is not None
    torch.testing.assert_close(own.matrix @ v, dense @ v)
    torch.testing.assert_close(dense, spd(6) + 0.7 * torch.eye(6, dtype=torch.float64))
    assert system(6, damping=0.7).dense() is None
