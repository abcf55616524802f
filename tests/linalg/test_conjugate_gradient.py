"""Conjugate gradients: against a dense solve, into each exit, and what it costs."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blockhf.linalg import Dense, LinearOperator, Solution, Status, conjugate_gradient
from matrices import diag, spd, vector

NAN, INF = math.nan, math.inf


@dataclass
class Failing:
    """Multiplies by a matrix, but its product number ``at`` has ``value`` for one entry."""

    matrix: Tensor
    at: int
    value: float
    entry: int = 0
    done: int = 0

    def __matmul__(self, v: Tensor) -> Tensor:
        self.done += 1
        product = self.matrix @ v
        if self.done == self.at:
            product[self.entry] = self.value
        return product


@dataclass
class Counted:
    """Counts the products with an operator."""

    operator: LinearOperator
    num_products: int = 0

    def __matmul__(self, v: Tensor) -> Tensor:
        self.num_products += 1
        return self.operator @ v


@dataclass
class Watched:
    """Keeps all vectors and products."""

    operator: LinearOperator
    vectors: list[Tensor] = field(default_factory=list)
    products: list[Tensor] = field(default_factory=list)

    def __matmul__(self, v: Tensor) -> Tensor:
        self.vectors.append(v.clone())
        self.products.append(self.operator @ v)
        return self.products[-1]


# --- against a dense solve ---------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(size=st.integers(1, 12), seed=st.integers(0, 1000), warm=st.booleans(), jacobi=st.booleans())
def test_the_solution_is_that_of_a_dense_solve(size: int, seed: int, warm: bool, jacobi: bool) -> None:
    A, b = spd(size, seed), vector(size, seed + 1)
    solution = conjugate_gradient(
        Dense(A),
        b,
        vector(size, seed + 2) if warm else None,
        preconditioner=Dense(torch.diag(1 / A.diag())) if jacobi else None,
        rtol=1e-12,
        max_steps=10 * size,
    )
    assert solution.status is Status.CONVERGED
    torch.testing.assert_close(solution.x, torch.linalg.solve(A, b))


def test_a_matrix_of_n_rows_takes_n_steps() -> None:
    solution = conjugate_gradient(Dense(spd(6)), vector(6), rtol=1e-10, max_steps=100)
    assert (solution.status, solution.num_steps) == (Status.CONVERGED, 6)


def test_as_many_steps_as_there_are_distinct_eigenvalues() -> None:
    solution = conjugate_gradient(Dense(diag(1, 1, 3, 3, 3)), vector(5), rtol=1e-10, max_steps=100)
    assert (solution.status, solution.num_steps) == (Status.CONVERGED, 2)


# --- exits -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exit:
    """A tiny system that ends in one certain way."""

    name: str
    A: Callable[[], LinearOperator]
    b: Tensor
    status: Status
    num_steps: int
    options: dict[str, Any] = field(default_factory=dict)
    start: Tensor | None = None
    M: Callable[[], LinearOperator | None] = lambda: None

    def solve(self, A: LinearOperator | None = None, **options: Any) -> Solution:
        options = {"max_steps": 20, **self.options, **options}
        return conjugate_gradient(A or self.A(), self.b, self.start, preconditioner=self.M(), **options)


def dense(matrix: Tensor) -> Callable[[], LinearOperator]:
    return lambda: Dense(matrix)


ONES = torch.ones(3, dtype=torch.float64)
PLAIN = diag(1, 2, 3)
SINGLE = {"dtype": torch.float32}

EXITS = [
    Exit("b is zero", dense(PLAIN), 0 * ONES, Status.CONVERGED, 0),
    Exit(
        "the start is the solution",
        dense(PLAIN),
        ONES,
        Status.CONVERGED,
        0,
        {"rtol": 1e-12},
        torch.tensor([1, 1 / 2, 1 / 3], dtype=torch.float64),
    ),
    Exit("n steps", dense(PLAIN), ONES, Status.CONVERGED, 3, {"rtol": 1e-10}),
    Exit("n steps and no more", dense(PLAIN), ONES, Status.CONVERGED, 3, {"rtol": 1e-10, "max_steps": 3}),
    Exit("nothing is left", dense(2 * torch.eye(3).double()), ONES, Status.CONVERGED, 1),
    Exit("progress ends", dense(diag(*range(1, 61))), torch.ones(60, dtype=torch.float64), Status.STALLED, 16,
         {"progress": 0.01, "max_steps": 60}),
    Exit("steps are used up", dense(PLAIN), ONES, Status.STEP_LIMIT, 2, {"max_steps": 2}),
    Exit("no step is allowed", dense(PLAIN), ONES, Status.STEP_LIMIT, 0, {"max_steps": 0}),
    Exit("indefinite at once", dense(diag(1, -5, 1)), ONES, Status.NONPOSITIVE_CURVATURE, 0),
    Exit("indefinite later", dense(diag(3, 2, -1)), ONES, Status.NONPOSITIVE_CURVATURE, 1),
    Exit("zero", dense(0 * PLAIN), ONES, Status.NONPOSITIVE_CURVATURE, 0),
    Exit("singular", dense(diag(1, 0)), ONES[:2], Status.NONPOSITIVE_CURVATURE, 1),
    Exit("the preconditioner is not positive", dense(PLAIN), ONES, Status.NONPOSITIVE_CURVATURE, 0,
         M=dense(-PLAIN)),
    *(
        Exit(f"{value} in product {at}", lambda at=at, value=value: Failing(PLAIN, at, value), ONES,
             Status.NON_FINITE, at - 1)
        for at in (1, 2, 3)
        for value in (NAN, INF, -INF)
    ),
    Exit("NaN in the last product", lambda: Failing(PLAIN, 3, NAN), ONES, Status.NON_FINITE, 2,
         {"max_steps": 3}),
    Exit("NaN from the start", lambda: Failing(PLAIN, 1, NAN), ONES, Status.NON_FINITE, 0, start=2 * ONES),
    Exit("NaN in b", dense(PLAIN), torch.tensor([1, NAN, 1]).double(), Status.NON_FINITE, 0),
    Exit("infinity in b", dense(PLAIN), torch.tensor([1, INF, 1]).double(), Status.NON_FINITE, 0,
         {"rtol": 1e-6}),
    Exit("NaN in the start", dense(PLAIN), ONES, Status.NON_FINITE, 0,
         start=torch.tensor([1, NAN, 1]).double()),
    Exit("the square of b overflows", dense(diag(1, 2, **SINGLE)), torch.full((2,), 1e25), Status.NON_FINITE,
         0, {"rtol": 1e-6}),
    Exit("the step overflows", dense(diag(1e-30, 1e-30, **SINGLE)), torch.full((2,), 1e10),
         Status.NON_FINITE, 0, {"rtol": 1e-6}),
    Exit("the step's length overflows", dense(diag(1e-44, 1e-44, **SINGLE)), torch.ones(2),
         Status.NON_FINITE, 0, {"rtol": 1e-6}),
    Exit("the residual overflows", dense(torch.tensor([[1.0, 3e38], [3e38, 1.0]])),
         torch.tensor([1.0, 1e-38]), Status.NON_FINITE, 0),
    Exit("the residual overflows later", lambda: Failing(diag(1, 2, 3, **SINGLE), 2, 3e38, entry=2),
         torch.tensor([1.0, 1.0, 0.0]), Status.NON_FINITE, 1),
    Exit("NaN from the preconditioner", dense(PLAIN), ONES, Status.NON_FINITE, 0,
         M=dense(diag(NAN, 1, 1))),
    *(
        Exit(f"NaN from use {use} of the preconditioner", dense(PLAIN), ONES, Status.NON_FINITE, use - 2,
             M=lambda use=use: Failing(PLAIN, use, NAN))
        for use in (2, 3)
    ),
]  # fmt: skip

each_exit = pytest.mark.parametrize("case", EXITS, ids=lambda case: case.name)


@each_exit
def test_each_exit_has_its_status_and_a_finite_solution(case: Exit) -> None:
    solution = case.solve()
    assert (solution.status, solution.num_steps) == (case.status, case.num_steps)
    assert solution.x.isfinite().all()


def test_each_status_has_a_case() -> None:
    found_elsewhere = {Status.NO_INFLUENCE}  # before there is a system to solve
    assert {case.status for case in EXITS} == set(Status) - found_elsewhere


@each_exit
@pytest.mark.parametrize("check_every", [2, 7, 50])
def test_looking_less_often_changes_nothing_in_the_solution(case: Exit, check_every: int) -> None:
    often, seldom = case.solve(check_every=1), case.solve(check_every=check_every)
    assert torch.equal(often.x, seldom.x)
    assert seldom.status is often.status
    assert seldom.num_steps == often.num_steps
    assert (repr(seldom.residual), repr(seldom.model)) == (repr(often.residual), repr(often.model))


@pytest.mark.parametrize(
    "case",
    [case for case in EXITS if case.start is None and case.b.isfinite().all()],
    ids=lambda case: case.name,
)
def test_a_step_that_failed_leaves_the_last_good_iterate(case: Exit) -> None:
    solution = case.solve()
    until_then = case.solve(max_steps=case.num_steps)
    assert torch.equal(solution.x, until_then.x)
    assert solution.model == until_then.model


@pytest.mark.parametrize("case", [case for case in EXITS if case.status is not Status.NON_FINITE],
                         ids=lambda case: case.name)  # fmt: skip
def test_residual_and_model_are_those_of_the_solution(case: Exit) -> None:
    solution = case.solve()
    A, b, x = case.A(), case.b, solution.x
    assert solution.model == pytest.approx(float(x @ (A @ x) / 2 - b @ x), rel=1e-10, abs=1e-12)
    if b.norm() > 0:
        assert solution.residual == pytest.approx(float((b - A @ x).norm() / b.norm()), rel=1e-6, abs=1e-12)


def test_a_failed_product_reports_the_residual_of_the_last_good_iterate() -> None:
    solution = conjugate_gradient(Failing(PLAIN, 3, NAN), ONES, max_steps=9)
    explicit = (ONES - PLAIN @ solution.x).norm() / ONES.norm()
    assert solution.num_steps == 2
    assert solution.residual == pytest.approx(float(explicit))


def test_an_overflowing_solution_is_zero_with_the_residual_of_zero() -> None:
    solution = conjugate_gradient(Dense(1e-30 * torch.eye(2)), torch.full((2,), 1e10), rtol=1e-6, max_steps=5)
    assert solution.x.tolist() == [0, 0]
    assert (solution.residual, solution.model, solution.num_steps) == (1.0, 0.0, 0)


def test_no_number_is_made_up_for_a_right_hand_side_that_has_none() -> None:
    solution = conjugate_gradient(Dense(PLAIN), torch.tensor([1, NAN, 1]).double(), max_steps=5)
    assert math.isnan(solution.residual)


def test_a_status_reads_as_words() -> None:
    assert str(Status.NONPOSITIVE_CURVATURE) == "nonpositive curvature"
    assert "damping" in Status.NONPOSITIVE_CURVATURE.value


# --- Martens' rule -----------------------------------------------------------------------------------


def stop_by_martens(models: list[float], eps: float, width: Callable[[int], int]) -> int:
    """The iteration after which to stop, from the model's values after 0, 1, 2, … of them."""
    for i, value in enumerate(models):
        k = width(i)
        if i > k and value < 0 and (value - models[i - k]) / value < k * eps:
            return i
    return len(models) - 1


def martens_width(i: int) -> int:
    return max(10, i // 10)


def slow_system() -> tuple[Dense, Tensor]:
    return Dense(torch.diag(torch.linspace(0.05, 10, 300, dtype=torch.float64) ** 1.5)), vector(300)


@functools.cache
def free_run(start: float) -> list[float]:
    """The model's values after 0, 1, 2, … iterations that nothing stops, from the solver's own products."""
    A, b = slow_system()
    x = torch.full_like(b, start)
    watched = Watched(A)
    conjugate_gradient(watched, b, x, max_steps=300)
    r, model = b - watched.products[0], float(x @ watched.products[0] / 2 - b @ x)
    models = [model]
    for p, Ap in zip(watched.vectors[1:], watched.products[1:], strict=True):
        alpha = (r @ p) / (p @ Ap)
        model -= 0.5 * float(alpha * (r @ p))
        models.append(model)
        r = r - alpha * Ap
    return models


@pytest.mark.parametrize("start", [None, 5.0], ids=["from zero", "from a point above zero"])
@pytest.mark.parametrize("eps", [0.2, 0.05, 0.01, 1e-3, 1e-5, 1e-7, 1e-9])
def test_progress_stops_where_martens_rule_does(eps: float, start: float | None) -> None:
    A, b = slow_system()
    x = torch.full_like(b, start or 0.0)
    models = free_run(start or 0.0)
    expected = stop_by_martens(models, eps, martens_width)

    solution = conjugate_gradient(A, b, x, max_steps=300, progress=eps)
    assert solution.status is Status.STALLED
    assert solution.num_steps == expected
    assert (eps < 1e-4) == (expected > 120)
    if expected > 120:  # late enough to tell i / 10 from 10
        assert expected != stop_by_martens(models, eps, lambda i: 10)


def test_progress_waits_while_the_model_is_above_zero() -> None:
    A, b = Dense(spd(200, condition=1e6)), vector(200)
    x = torch.full((200,), 1e3, dtype=torch.float64)
    solution = conjugate_gradient(A, b, x, max_steps=40, progress=0.099)
    assert solution.model > 0  # and so it was before, as the model falls at every step
    assert solution.status is Status.STEP_LIMIT


# --- cost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("warm", [False, True], ids=["from zero", "warm"])
def test_a_product_per_step_and_one_for_a_start(steps: int, warm: bool) -> None:
    A = Counted(Dense(spd(20)))
    solution = conjugate_gradient(A, vector(20), vector(20, 2) if warm else None, max_steps=steps)
    assert solution.num_products == A.num_products == steps + warm


@each_exit
def test_the_products_are_counted_right_in_every_exit(case: Exit) -> None:
    A = Counted(case.A())
    solution = case.solve(A)
    assert solution.num_products == A.num_products


def test_looking_less_often_wastes_less_than_one_interval_of_products() -> None:
    A, b = Dense(spd(10)), vector(10)
    exact = conjugate_gradient(A, b, rtol=1e-9, max_steps=100).num_products
    for check_every in (2, 7, 100):
        wasteful = conjugate_gradient(A, b, rtol=1e-9, max_steps=100, check_every=check_every)
        assert exact <= wasteful.num_products < exact + check_every


class Syncs(TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    WAITING = frozenset({"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item"})

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.removeprefix("aten::") in self.WAITING
        return func(*args, **(kwargs or {}))


def count_syncs(steps: int, check_every: int, **options: Any) -> int:
    A, b = Dense(spd(40, condition=1e8)), vector(40)
    with Syncs() as syncs:
        solution = conjugate_gradient(A, b, max_steps=steps, check_every=check_every, **options)
    assert solution.num_steps == steps
    return syncs.count


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"progress": 1e-30, "rtol": 1e-30},
        {"preconditioner": Dense(torch.eye(40).double())},
    ],
    ids=["plain", "with stopping rules", "with a preconditioner"],
)
def test_the_loop_waits_for_a_number_only_where_it_looks(options: dict[str, Any]) -> None:
    few, many = (count_syncs(steps, 5, **options) for steps in (10, 35))
    assert many - few == (35 - 10) / 5
    assert few <= 10 / 5 + 6
    assert count_syncs(35, 1, **options) - count_syncs(10, 1, **options) == 25  # the counter does count


# --- start, preconditioner ---------------------------------------------------------------------------


def test_the_start_is_left_alone_and_a_better_one_saves_steps() -> None:
    A, b = spd(30), vector(30)
    near = torch.linalg.solve(A, b) + 1e-9 * vector(30, 5)
    kept = near.clone()
    cold = conjugate_gradient(Dense(A), b, rtol=1e-8, max_steps=200)
    warm = conjugate_gradient(Dense(A), b, near, rtol=1e-8, max_steps=200)
    assert torch.equal(near, kept)
    assert warm.num_steps < cold.num_steps / 2
    torch.testing.assert_close(warm.x, cold.x, rtol=1e-5, atol=1e-7)


def test_the_right_hand_side_is_left_alone() -> None:
    b = vector(8)
    kept = b.clone()
    conjugate_gradient(Dense(spd(8)), b, max_steps=5)
    assert torch.equal(b, kept)


def test_the_exact_inverse_converges_in_one_step() -> None:
    A, b = spd(15, condition=1e4), vector(15)
    inverse = Dense(torch.linalg.inv(A))
    solution = conjugate_gradient(Dense(A), b, preconditioner=inverse, rtol=1e-9, max_steps=50)
    assert (solution.status, solution.num_steps) == (Status.CONVERGED, 1)


def test_jacobi_saves_steps_on_an_ill_conditioned_diagonal_and_keeps_the_solution() -> None:
    scales = torch.logspace(0, 3, 30, dtype=torch.float64)
    A, b = scales[:, None] * spd(30, condition=10) * scales, vector(30)
    jacobi = Dense(torch.diag(1 / A.diag()))
    plain = conjugate_gradient(Dense(A), b, rtol=1e-8, max_steps=2000)
    fast = conjugate_gradient(Dense(A), b, preconditioner=jacobi, rtol=1e-8, max_steps=2000)
    assert plain.status is fast.status is Status.CONVERGED
    assert fast.num_steps < plain.num_steps / 3
    torch.testing.assert_close(fast.x, torch.linalg.solve(A, b), rtol=1e-5, atol=1e-9)


def test_a_preconditioned_model_and_residual_are_those_of_the_original_system() -> None:
    A, b = spd(12), vector(12)
    M = Dense(spd(12, seed=9, condition=5))
    solution = conjugate_gradient(Dense(A), b, vector(12, 7), preconditioner=M, max_steps=4)
    x = solution.x
    assert solution.model == pytest.approx(float(x @ A @ x / 2 - b @ x))
    assert solution.residual == pytest.approx(float((b - A @ x).norm() / b.norm()))


@pytest.mark.parametrize("preconditioned", [False, True])
def test_the_model_falls_at_every_step(preconditioned: bool) -> None:
    A, b = spd(50, condition=1e3), vector(50)
    M = Dense(spd(50, seed=4, condition=3)) if preconditioned else None
    models = [conjugate_gradient(Dense(A), b, preconditioner=M, max_steps=n).model for n in range(41)]
    assert all(later < earlier for earlier, later in itertools.pairwise(models))


@pytest.mark.parametrize(
    ("device", "check_every", "first", "expected"),
    [
        ("cpu", None, 100, list(range(50))),
        ("cpu", 20, 100, [0, 20, 40]),
        ("cuda", None, 10, [10, 20, 40]),
        ("cuda", None, 100, []),
        ("cuda", 20, 100, [0, 20, 40]),
    ],
)
def test_the_host_rarely_looks_at_a_device(
    device: str, check_every: int | None, first: int, expected: list[int]
) -> None:
    module = importlib.import_module("blockhf.linalg.conjugate_gradient")  # a function has the same name
    looks = module._Looks(torch.device(device), check_every, first=first)
    assert [step for step in range(50) if looks.after(step)] == expected
