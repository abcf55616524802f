"""``BlockHF`` against the same method written out with dense matrices, in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockhf import (
    AllSamples,
    Backtracking,
    BlockHF,
    ConjugateGradient,
    FixedStep,
    Identity,
    LevenbergMarquardt,
    blocks,
)
from optimizer_tasks import (
    Task,
    dense_gauss_newton,
    dense_gradient,
    dense_loss,
    equal,
    mlp,
    move_,
    slices,
    snapshot,
    values,
)

Partition = Callable[[nn.Module], list[dict[str, Any]]]

PARTITIONS: dict[str, Partition] = {
    "single": blocks.single,
    "by_layer": blocks.by_layer,
    "by_size": lambda model: blocks.by_size(model, 4),
    "by_pattern": lambda model: blocks.by_pattern(model, {"first": r"^0\.", "rest": ""}),
}
CONVERGED: dict[str, Any] = {"cg_rtol": 1e-13, "cg_progress": 0.0, "max_cg_steps": 400, "warm_start": 0.0}
FULL_STEP: dict[str, Any] = {"search": FixedStep(), **CONVERGED}

all_partitions = pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS.keys())
both_losses = pytest.mark.parametrize("loss", ["mse", "cross_entropy"])


def eye_like(matrix: Tensor) -> Tensor:
    return torch.eye(len(matrix), dtype=matrix.dtype)


def dense_direction(task: Task, places: list[slice], damping: float, curvature_batch: Any) -> Tensor:
    """For each block ``(G_b + damping I) d = -g`` by a dense solve, all in one vector."""
    gradient = dense_gradient(task, task.batch)
    matrix = dense_gauss_newton(task, curvature_batch)
    matrix = matrix + damping * eye_like(matrix)
    return torch.cat([torch.linalg.solve(matrix[place, place], -gradient[place]) for place in places])


# --- dense counterparts -------------------------------------------------------------------------------


@both_losses
@all_partitions
def test_a_converged_step_is_the_dense_solve_of_each_diagonal_block(partition: Partition, loss: str) -> None:
    task = Task(loss)
    groups = partition(task.model)
    expected = values(task.model) + dense_direction(task, slices(groups), 0.01, task.drawn(9))
    optimizer = BlockHF.martens(groups, damping=0.01, curvature_batch_size=9, **FULL_STEP)
    optimizer.step(task.objective, task.batch)
    torch.testing.assert_close(values(task.model), expected, rtol=1e-8, atol=1e-9)
    assert {block.status for block in optimizer.report.blocks} == {"converged"}


def test_the_partition_matters() -> None:
    """Else the test above could not tell blocks from their union."""
    ends = []
    for partition in (blocks.single, blocks.by_layer):
        task = Task()
        BlockHF.martens(partition(task.model), damping=0.01, **FULL_STEP).step(task.objective, task.batch)
        ends.append(values(task.model))
    assert (ends[0] - ends[1]).norm() > 0.1 * ends[0].norm()


@pytest.mark.parametrize(("loss", "initial"), [("mse", 0.1), ("cross_entropy", 0.02)])
def test_one_block_is_hessian_free_optimization_written_out_densely(loss: str, initial: float) -> None:
    """Levenberg-Marquardt damping and backtracking as in Martens (2010), with a dense solve for CG."""
    task, twin = Task(loss), Task(loss)
    rule = LevenbergMarquardt(initial=initial)
    optimizer = BlockHF.martens(
        blocks.single(task.model), lr=2.0, damping=rule, search=Backtracking(sufficient=1e-2), **CONVERGED
    )
    damping, scales, dampings = initial, [], []
    for _ in range(6):
        before, gradient = dense_loss(twin, twin.batch), dense_gradient(twin, twin.batch)
        matrix = dense_gauss_newton(twin, twin.batch)
        update = -2.0 * torch.linalg.solve(matrix + damping * eye_like(matrix), gradient)
        scales.append(2.0)
        while True:
            move_(twin.model, update)
            after = dense_loss(twin, twin.batch)
            if after <= before + 1e-2 * gradient @ update:
                break
            move_(twin.model, -update)
            update, scales[-1] = update / 2, scales[-1] / 2
        ratio = (after - before) / (gradient @ update + update @ matrix @ update / 2)
        damping = damping * 2 / 3 if ratio > 0.75 else damping * 3 / 2 if ratio < 0.25 else damping

        assert optimizer.step(task.objective, task.batch) == pytest.approx(float(before), rel=1e-10)
        torch.testing.assert_close(values(task.model), values(twin.model), rtol=1e-7, atol=1e-8)
        assert optimizer.report.loss_after == pytest.approx(float(after), rel=1e-9)
        assert optimizer.report.ratio == pytest.approx(float(ratio), rel=1e-5)
        assert optimizer.param_groups[0]["damping"] == pytest.approx(damping, rel=1e-12)
        assert optimizer.report.blocks[0].coefficient == scales[-1]
        dampings.append(damping)
    assert len(set(scales)) > 1, "the steps should differ in length"
    assert len(set(dampings)) > 1, "the damping should move"


def test_an_exact_quadratic_is_solved_in_one_step() -> None:
    task = Task(model=lambda: nn.Linear(3, 2), num_samples=20)
    inputs, targets = task.batch
    design = torch.cat([inputs, torch.ones(20, 1, dtype=torch.float64)], 1)
    solution = torch.linalg.lstsq(design, targets).solution
    optimizer = BlockHF.martens(blocks.single(task.model), lr=1.0, damping=0.0, **FULL_STEP)
    optimizer.step(task.objective, task.batch)
    torch.testing.assert_close(task.model.weight.detach(), solution[:3].T, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(task.model.bias.detach(), solution[3], rtol=1e-9, atol=1e-10)


def test_on_an_exact_quadratic_the_model_foretells_the_loss() -> None:
    task = Task(model=lambda: nn.Linear(3, 2))
    optimizer = BlockHF.martens(
        blocks.single(task.model), damping=0.1, search=FixedStep(evaluates=True), **CONVERGED
    )
    optimizer.step(task.objective, task.batch)
    assert optimizer.report.ratio == pytest.approx(1.0, abs=1e-9)


@all_partitions
def test_heavy_damping_is_a_scaled_gradient(partition: Partition) -> None:
    task = Task()
    before, gradient = values(task.model), dense_gradient(task, task.batch)
    BlockHF.martens(partition(task.model), damping=1e7, **FULL_STEP).step(task.objective, task.batch)
    torch.testing.assert_close(1e7 * (values(task.model) - before), -gradient, rtol=1e-6, atol=1e-7)


# --- the paper ----------------------------------------------------------------------------------------


def textbook_cg(matrix: Tensor, rhs: Tensor, x: Tensor, num_steps: int, rtol: float) -> Tensor:
    residual = rhs - matrix @ x
    direction = residual.clone()
    for _ in range(num_steps):
        if residual.norm() <= rtol * rhs.norm():
            break
        length = (residual @ residual) / (direction @ matrix @ direction)
        x = x + length * direction
        smaller = residual - length * matrix @ direction
        direction = smaller + (smaller @ smaller) / (residual @ residual) * direction
        residual = smaller
    return x


@pytest.mark.parametrize("rtol", [0.0, 0.05])
@both_losses
@all_partitions
def test_paper_is_algorithm_1_as_it_stands(partition: Partition, loss: str, rtol: float) -> None:
    task, twin = Task(loss), Task(loss)
    groups = partition(task.model)
    optimizer = BlockHF.paper(groups, damping=0.02, max_cg_steps=6, cg_rtol=rtol, curvature_batch_size=9)
    places = slices(groups)
    last = torch.zeros_like(values(twin.model))
    for step in range(5):
        # 1. The gradient on S_g. 2. The curvature on S_c, drawn from it.
        gradient, matrix = dense_gradient(twin, twin.batch), dense_gauss_newton(twin, twin.drawn(9, step))
        matrix = matrix + 0.02 * eye_like(matrix)
        # 3. CG on each block, from 0.95 times the last solution.
        last = torch.cat(
            [
                textbook_cg(matrix[place, place], -gradient[place], 0.95 * last[place], 6, rtol)
                for place in places
            ]
        )
        # 4. The update.
        move_(twin.model, 0.1 * last)

        optimizer.step(task.objective, task.batch)
        torch.testing.assert_close(values(task.model), values(twin.model), rtol=1e-10, atol=1e-10)


def test_the_settings_of_paper_are_those_of_the_paper() -> None:
    optimizer = BlockHF.paper(blocks.single(mlp()))
    (group,) = optimizer.param_groups
    options = {name: group[name] for name in ("lr", "damping", "max_cg_steps", "warm_start", "cg_progress")}
    assert options == {"lr": 0.1, "damping": 0.0, "max_cg_steps": 30, "warm_start": 0.95, "cg_progress": 0.0}
    assert optimizer.search == FixedStep()
    assert optimizer.solver == ConjugateGradient()
    assert optimizer.preconditioner == Identity()
    assert optimizer.sampling == AllSamples()
    assert optimizer.curvature_batch_size is None


@all_partitions
def test_slow_start_holds_cg_to_2_iterations_in_the_first_10_updates(partition: Partition) -> None:
    task = Task()
    optimizer = BlockHF.paper(partition(task.model), damping=1e-3, max_cg_steps=4, slow_start=(10, 2))
    for update in range(1, 14):
        optimizer.step(task.objective, task.batch)
        expected = 2 if update <= 10 else 4
        assert [block.num_steps for block in optimizer.report.blocks] == [expected] * len(
            optimizer.param_groups
        )


def test_slow_start_does_not_count_rejected_steps() -> None:
    task = Task()
    optimizer = BlockHF.paper(blocks.single(task.model), damping=1e-3, max_cg_steps=4, slow_start=(1, 2))
    optimizer.step(lambda batch: (None, task.objective(batch)[1] * torch.nan), task.batch)
    assert not optimizer.report.accepted
    optimizer.step(task.objective, task.batch)
    assert optimizer.report.blocks[0].num_steps == 2
    optimizer.step(task.objective, task.batch)
    assert optimizer.report.blocks[0].num_steps == 4


def test_slow_start_never_asks_for_more_iterations_than_max_cg_steps() -> None:
    task = Task()
    optimizer = BlockHF.paper(blocks.single(task.model), damping=1e-3, max_cg_steps=3, slow_start=(10, 5))
    optimizer.step(task.objective, task.batch)
    assert optimizer.report.blocks[0].num_steps == 3


# --- one batch, told in different ways ----------------------------------------------------------------


def run(
    task: Task, *, num_steps: int = 2, curvature_batch: Any = None, **options: Any
) -> tuple[Tensor, list[float]]:
    """The parameters and the reported losses after a few steps with a fixed number of CG iterations."""
    settings = {"cg_rtol": 0.0, "cg_progress": 0.0, "max_cg_steps": 5, **options}
    optimizer = BlockHF.martens(blocks.by_layer(task.model), reduction=task.reduction, **settings)
    losses: list[float] = []
    for step in range(num_steps):
        given = curvature_batch(step) if callable(curvature_batch) else curvature_batch
        losses.append(float(optimizer.step(task.objective, task.batch, given)))
        losses.append(float(optimizer.report.loss_after or 0.0))
    return values(task.model), losses


@pytest.mark.parametrize(
    ("micro_batch_size", "curvature_batch_size"),
    [(1, 7), (5, None), (5, 7), (5, 12), (8, None), (8, 12), (16, None), (16, 7), (99, None), (99, 12)],
    ids=lambda size: str(size),
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_micro_batches_change_nothing(
    reduction: str, micro_batch_size: int, curvature_batch_size: int | None
) -> None:
    whole = run(Task(reduction=reduction), curvature_batch_size=curvature_batch_size)
    parts = run(
        Task(reduction=reduction),
        curvature_batch_size=curvature_batch_size,
        micro_batch_size=micro_batch_size,
    )
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-9, atol=1e-10)
    assert parts[1] == pytest.approx(whole[1], rel=1e-9)


@pytest.mark.parametrize("micro_batch_size", [None, 4], ids=lambda size: f"micro={size}")
@pytest.mark.parametrize("curvature_batch_size", [None, 7], ids=lambda size: f"curvature={size}")
def test_a_sum_with_n_times_the_damping_steps_like_a_mean(
    curvature_batch_size: int | None, micro_batch_size: int | None
) -> None:
    options = {"curvature_batch_size": curvature_batch_size, "micro_batch_size": micro_batch_size}
    mean = run(Task("cross_entropy"), damping=0.01, **options)
    total = run(Task("cross_entropy", reduction="sum"), damping=16 * 0.01, **options)
    torch.testing.assert_close(total[0], mean[0], rtol=1e-9, atol=1e-10)
    assert total[1] == pytest.approx([16 * loss for loss in mean[1]], rel=1e-9)


@pytest.mark.parametrize("micro_batch_size", [None, 4], ids=lambda size: f"micro={size}")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("num_samples", [7, 16])
def test_an_explicit_curvature_batch_is_as_good_as_one_that_is_drawn(
    num_samples: int, reduction: str, micro_batch_size: int | None
) -> None:
    implicit, explicit = Task(reduction=reduction), Task(reduction=reduction)
    drawn = run(implicit, curvature_batch_size=num_samples, micro_batch_size=micro_batch_size)
    given = run(
        explicit,
        curvature_batch=lambda step: explicit.drawn(num_samples, step),
        micro_batch_size=micro_batch_size,
    )
    assert equal(given, drawn)


def test_another_seed_draws_other_curvature_samples() -> None:
    other = Task()
    ends = [run(Task(), curvature_batch_size=7, seed=seed)[0] for seed in (0, 0, 5)]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])
    given = run(other, curvature_batch=lambda step: other.drawn(7, step, seed=5))
    assert torch.equal(given[0], ends[2])


def test_an_explicit_curvature_batch_goes_before_the_curvature_batch_size() -> None:
    given, other = Task(), Task()
    both = run(given, curvature_batch=lambda step: given.drawn(7, step), curvature_batch_size=3)
    assert equal(both, run(other, curvature_batch_size=7))


def test_the_curvature_batch_matters() -> None:
    """Else none of the tests above could fail."""
    assert (run(Task(), curvature_batch_size=7)[0] - run(Task())[0]).norm() > 1e-3


@pytest.mark.parametrize("size", [None, 16, 1000])
def test_a_curvature_batch_of_the_whole_batch_is_the_whole_batch(size: int | None) -> None:
    whole, sized = Task(), Task()
    assert equal(run(sized, curvature_batch_size=size), run(whole, curvature_batch=whole.batch))


def test_a_closure_steps_like_the_objective_on_its_batch() -> None:
    task, twin = Task("cross_entropy"), Task("cross_entropy")
    with_batch = BlockHF.martens(blocks.by_layer(task.model))
    with_closure = BlockHF.martens(blocks.by_layer(twin.model), curvature_batch_size=3, micro_batch_size=2)
    for _ in range(3):
        expected = with_batch.step(task.objective, task.batch)
        actual = with_closure.step(lambda: twin.objective(twin.batch))
        assert torch.equal(actual, expected)
        assert torch.equal(values(twin.model), values(task.model))


# --- directions for another optimizer -----------------------------------------------------------------


@all_partitions
def test_direction_writes_the_negated_solution_and_leaves_the_parameters_alone(partition: Partition) -> None:
    task = Task()
    groups = partition(task.model)
    optimizer = BlockHF.martens(groups, lr=0.3, damping=0.01, **FULL_STEP)
    before = values(task.model)
    loss = optimizer.direction(task.objective, task.batch)
    written = torch.cat([param.grad.reshape(-1) for param in task.model.parameters()])
    expected = -dense_direction(task, slices(groups), 0.01, task.batch)
    torch.testing.assert_close(written, expected, rtol=1e-8, atol=1e-9)
    assert torch.equal(values(task.model), before)
    assert torch.equal(loss, dense_loss(task, task.batch))


@pytest.mark.parametrize("warm_start", [0.0, 0.95])
def test_sgd_that_follows_direction_is_the_fixed_step(warm_start: float) -> None:
    task, twin = Task(), Task()
    options = {"damping": 0.01, "max_cg_steps": 4, "warm_start": warm_start, "search": FixedStep()}
    stepping = BlockHF.martens(blocks.by_layer(task.model), **options)
    pointing = BlockHF.martens(blocks.by_layer(twin.model), **options)
    follower = torch.optim.SGD(twin.model.parameters(), lr=1.0)
    for _ in range(4):
        stepping.step(task.objective, task.batch)
        pointing.direction(twin.objective, twin.batch)
        follower.step()
        assert torch.equal(values(twin.model), values(task.model))
        assert [block.num_steps for block in pointing.report.blocks] == [
            block.num_steps for block in stepping.report.blocks
        ]


def test_direction_of_a_non_finite_gradient_leaves_nothing_to_follow() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.by_layer(task.model))
    follower = torch.optim.SGD(task.model.parameters(), lr=1.0)
    optimizer.direction(task.objective, task.batch)
    before = snapshot(task.model, optimizer)
    optimizer.direction(lambda batch: (None, task.objective(batch)[1] * torch.nan), task.batch)
    assert all(param.grad is None for param in task.model.parameters())
    follower.step()
    assert equal(snapshot(task.model, optimizer), before)
    assert not optimizer.report.accepted
