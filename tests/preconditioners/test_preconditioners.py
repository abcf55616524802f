"""The laws of approximate inverses, what they save conjugate gradients, and their state."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from blockhf import (
    BlockHF,
    Diagonal,
    Hessian,
    Kronecker,
    LinearOperator,
    NoWalk,
    PolicyState,
    Precondition,
    Preconditioner,
    Solution,
    State,
    System,
    blocks,
    conjugate_gradient,
)
from blockhf.linalg import Damped, DiagonalBlock
from optimizer_tasks import Task, equal, through_a_file, values
from preconditioner_tasks import X2, point_of, prepared, randn

MAKERS: dict[str, Callable[[], Preconditioner]] = {
    "kronecker": Kronecker,
    "kronecker, diagonal factors": lambda: Kronecker(max_size=2),
    "diagonal": Diagonal,
    "diagonal, two draws": lambda: Diagonal(exponent=0.75, num_draws=2),
}
all_makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.LayerNorm(6), nn.Linear(6, 3)
        ).double()


@all_makers
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_an_inverse_is_linear_symmetric_and_positive_definite(
    make: Callable[[], Any], damping: float
) -> None:
    point = point_of(network(), randn(50, 4))
    inverse = prepared(make(), point, damping)
    size = point.blocks[0].size
    dense = torch.stack([inverse @ column for column in torch.eye(size, dtype=torch.float64)])
    vector = randn(size, seed=9)
    torch.testing.assert_close(inverse @ vector, dense @ vector)
    torch.testing.assert_close(dense, dense.T)
    assert float(torch.linalg.eigvalsh(dense)[0]) > 0


@all_makers
def test_with_a_preconditioner_cg_finds_the_same_in_fewer_iterations(make: Callable[[], Any]) -> None:
    scales = torch.logspace(-2, 1, 20, dtype=torch.float64)
    inputs, targets = randn(300, 20, seed=2) @ randn(20, 20, seed=8) * scales, torch.arange(300) % 5
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(20, 5).double()
    point, state = point_of(model, inputs, lambda outputs: F.cross_entropy(outputs, targets)), PolicyState()
    rhs = point.gradient()[1][0]
    for _ in range(10):  # averages over the steps
        inverse = prepared(make(), point, 1e-7, state)
    with point.linearize() as matrix:
        operator = Damped(DiagonalBlock(matrix, 0), 1e-7)

        def solve(inverse: LinearOperator | None, rtol: float) -> Solution:
            return conjugate_gradient(operator, rhs, preconditioner=inverse, rtol=rtol, max_steps=5000)

        exact = solve(None, 1e-11).x
        found = solve(inverse, 1e-11).x
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-5 * float(exact.norm()))
        assert solve(inverse, 1e-3).num_steps < 0.6 * solve(None, 1e-3).num_steps


def test_for_a_linear_layer_with_squared_error_the_kronecker_inverse_is_all_but_exact() -> None:
    inputs = randn(4000, 10) * torch.logspace(-1, 1, 10, dtype=torch.float64)
    point, state = point_of(nn.Linear(10, 2).double(), inputs), PolicyState()
    for _ in range(10):
        inverse = prepared(Kronecker(), point, 1e-8, state)
    rhs = randn(22, seed=1)
    with point.linearize() as matrix:
        operator = Damped(DiagonalBlock(matrix, 0), 1e-8)
        plain = conjugate_gradient(operator, rhs, rtol=1e-2, max_steps=500)
        helped = conjugate_gradient(operator, rhs, preconditioner=inverse, rtol=1e-2, max_steps=500)
    assert plain.num_steps > 10
    assert helped.num_steps <= 3


@all_makers
def test_a_saved_state_goes_on_to_the_last_bit(make: Callable[[], Preconditioner]) -> None:
    point, one = point_of(network(), randn(50, 4)), PolicyState()
    prepared(make(), point, state=one)
    other = PolicyState.from_dict(through_a_file(one.to_dict()))
    vector = randn(point.blocks[0].size)
    first, second = (prepared(make(), point, state=state) @ vector for state in (one, other))
    assert torch.equal(first, second)
    assert equal(one.to_dict(), other.to_dict())


@all_makers
def test_what_is_forgotten_of_a_block_is_learned_anew(make: Callable[[], Preconditioner]) -> None:
    model, state = network(), PolicyState()
    for seed in (0, 1):
        prepared(make(), point_of(model, randn(50, 4, seed=seed)), state=state)
    (name,) = state.blocks
    state.blocks.pop(name)
    state.shared["num_steps"] -= 1  # so that the same random numbers are drawn
    last = prepared(make(), point_of(model, randn(50, 4, seed=1)), state=state)
    fresh = PolicyState(shared={"num_steps": 1})
    expected = prepared(make(), point_of(model, randn(50, 4, seed=1)), state=fresh)
    vector = randn(point_of(model, X2).blocks[0].size)
    assert torch.equal(last @ vector, expected @ vector)


@all_makers
def test_one_preconditioner_serves_two_models(make: Callable[[], Preconditioner]) -> None:
    found = []
    shared = make()
    for preconditioners in ((shared, shared), (make(), make())):
        tasks = [Task(num_samples=40, seed=seed) for seed in range(2)]
        pairs = [
            (task, BlockHF(blocks.by_layer(task.model), preconditioner=own))
            for task, own in zip(tasks, preconditioners, strict=True)
        ]
        for _ in range(3):
            for task, optimizer in pairs:
                optimizer.step(task.objective, task.batch)
        found.append([values(task.model) for task in tasks])
    assert equal(*found)


@pytest.mark.parametrize("num_steps", [1, 6])
def test_parameters_that_are_frozen_or_thawed_get_factors_of_their_own(num_steps: int) -> None:
    task = Task(num_samples=40)
    optimizer = BlockHF(blocks.single(task.model))

    def steps() -> None:
        for _ in range(num_steps):
            optimizer.step(task.objective, task.batch)

    steps()
    task.model[0].requires_grad_(False)
    steps()
    task.model[0].requires_grad_(True)
    before = task.model[0].bias.detach().clone()
    steps()
    assert bool(values(task.model).isfinite().all())
    assert not torch.equal(task.model[0].bias, before)


@pytest.mark.parametrize("preconditioner", [Kronecker, Diagonal])
def test_with_the_hessian_the_loss_alone_will_do(preconditioner: Any) -> None:
    task = Task(num_samples=40)
    optimizer = BlockHF(blocks.by_layer(task.model), curvature=Hessian(), preconditioner=preconditioner())
    losses = [float(optimizer.step(lambda batch: task.objective(batch)[1], task.batch)) for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Kronecker(decay=1.0), "decay is 1.0, but must be at least 0 and below 1."),
        (lambda: Kronecker(every=0), "every and max_size are 0 and 8192, but must be at least 1."),
        (lambda: Kronecker(max_size=0), "every and max_size are 1 and 0, but must be at least 1."),
        (lambda: Diagonal(exponent=0.0), "exponent is 0.0, but must be above 0 and at most 1."),
        (lambda: Diagonal(decay=-0.1), "decay is -0.1, but must be at least 0 and below 1."),
        (lambda: Diagonal(num_draws=0), "num_draws is 0, but must be at least 1."),
    ],
)
def test_an_invalid_preconditioner_is_refused_with_value_and_bound(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        make()


@pytest.mark.parametrize("make", [Kronecker, lambda: Kronecker(every=5), Diagonal])
def test_state_is_taken_over_by_parameters_of_another_type(make: Callable[[], Any]) -> None:
    single, double = Task(num_samples=200), Task(num_samples=200)
    single.model.float()
    single.batch = tuple(tensor.float() for tensor in single.batch)
    saved = BlockHF(blocks.by_layer(single.model), preconditioner=make())
    saved.step(single.objective, single.batch)
    loaded = BlockHF(blocks.by_layer(double.model), preconditioner=make())
    loaded.load_state_dict(saved.state_dict())
    before = values(double.model)
    loaded.step(double.objective, double.batch)
    assert loaded.report is not None
    assert loaded.report.accepted
    assert values(double.model).dtype == before.dtype == torch.float64


class Scalars(TorchDispatchMode):
    """Counts how often the host asks for a number."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_an_inverse_never_waits_for_the_device() -> None:
    task = Task(model=lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)))
    applied: list[int] = []

    class Asked(Precondition):
        def solve(self, system: System, state: State) -> Solution:
            assert system.preconditioner is not None
            with Scalars() as scalars:
                _ = system.preconditioner @ system.rhs
            applied.append(scalars.count)
            return super().solve(system, state)

    BlockHF(blocks.single(task.model), solver=Asked()).step(task.objective, task.batch)
    assert applied == [0]


@pytest.mark.parametrize("preconditioner", [Kronecker(), Diagonal(num_draws=2)])
def test_micro_batches_draw_what_the_whole_batch_draws(preconditioner: Preconditioner) -> None:
    found, kept = [], []
    for micro_batch_size in (None, 30):
        task = Task(num_samples=300)
        optimizer = BlockHF(
            blocks.by_layer(task.model),
            preconditioner=preconditioner,
            micro_batch_size=micro_batch_size,
            walk=NoWalk(),
        )
        optimizer.step(task.objective, task.batch)
        found.append(values(task.model))
        kept.append(optimizer.state_dict()["policies"]["preconditioner"]["blocks"])
    assert len(kept[0]) == 3
    torch.testing.assert_close(kept[1], kept[0], rtol=1e-9, atol=1e-12)
    # With a bad preconditioner CG makes 1e-7 out of rounding; other draws would make a tenth.
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_cg_steps", [5, 50])
def test_kfac_forms_no_block_though_that_would_be_cheap(
    max_cg_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockhf.curvature.auto._NODE", 0)
    task = Task(num_samples=300)
    optimizer = BlockHF(blocks.by_layer(task.model), solver=Precondition(), max_cg_steps=max_cg_steps)
    optimizer.step(task.objective, task.batch)
    assert optimizer.report is not None
    assert optimizer.report.accepted
    assert [block.products for block in optimizer.report.blocks] == ["no products"] * 3
    assert "product_flops" not in optimizer.report.work
