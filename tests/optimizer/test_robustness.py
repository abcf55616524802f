"""What a step leaves alone where something fails: everything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.modules.module as torch_module
from failures import WAYS, Loss, Treacherous, elsewhere, every_way, noisy, plus, root, treacherous
from torch import Tensor, nn

from blockhf import (
    Backtracking,
    BlockHF,
    FixedStep,
    Hessian,
    LevenbergMarquardt,
    blocks,
)
from optimizer_tasks import Task, dense_loss, equal, snapshot, values

# --- values that are not finite -----------------------------------------------------------------------


FAILURES: dict[str, tuple[Callable[[Task], Loss], str, bool]] = {
    # What goes wrong, what the report says, and whether more damping could help.
    "loss is nan": (plus(torch.nan), "the loss is not finite", False),
    "loss is infinite": (plus(torch.inf), "the loss is not finite", False),
    "gradient is nan": (root, "the gradient is not finite", False),
    "curvature is nan": (treacherous, "the curvature is not finite", True),
    "candidate is nan": (elsewhere(torch.nan), "the loss after the step is not finite", True),
    "candidate is infinite": (elsewhere(torch.inf), "the loss after the step is not finite", True),
    "candidate is minus infinite": (elsewhere(-torch.inf), "the loss after the step is not finite", True),
}
every_failure = pytest.mark.parametrize(("fail", "reason", "damps"), FAILURES.values(), ids=FAILURES.keys())


def dampings(optimizer: BlockHF) -> list[float]:
    return [group["damping"] for group in optimizer.param_groups]


def under_way(task: Task, **options: Any) -> BlockHF:
    """An optimizer of the task's model that has made two steps."""
    optimizer = BlockHF.martens(blocks.by_layer(task.model), max_cg_steps=2, **options)
    for seed in range(2):
        torch.manual_seed(seed)
        optimizer.step(task.objective, task.batch)
    assert optimizer.report is not None
    assert optimizer.report.accepted
    return optimizer


@every_failure
@pytest.mark.parametrize(
    ("adapts", "way"),
    [
        *(pytest.param(True, way, id=f"adaptive damping, {name}") for name, way in WAYS.items()),
        pytest.param(False, WAYS["part"], id="constant damping, part"),
    ],
)
def test_a_step_that_meets_a_non_finite_value_is_as_if_it_had_not_been(
    adapts: bool, fail: Callable[[Task], Loss], reason: str, damps: bool, way: dict[str, Any]
) -> None:
    task, twin = Task(model=noisy), Task(model=noisy)
    damping = LevenbergMarquardt() if adapts else 0.1
    options = {"lr": 0.1, "damping": damping, "search": FixedStep(evaluates=True), **way}
    optimizer, other = under_way(task, **options), under_way(twin, **options)
    before, old = snapshot(task.model, optimizer), dampings(optimizer)

    optimizer.step(fail(task), task.batch)
    report = optimizer.report
    assert (report.accepted, report.reason) == (False, reason)
    assert report.step == 3
    assert (report.loss_after, report.predicted, report.ratio) == (None, None, None)
    assert dampings(optimizer) == ([value / (2 / 3) for value in old] if adapts and damps else old)
    for group, saved in zip(before["optimizer"]["param_groups"], dampings(optimizer), strict=True):
        group["damping"] = saved
    assert equal(snapshot(task.model, optimizer), before), "all but the damping is as it was"

    # The next good batch proceeds as it would have without the bad one.
    for group, saved in zip(other.param_groups, dampings(optimizer), strict=True):
        group["damping"] = saved
    for each, own in ((optimizer, task), (other, twin)):
        torch.manual_seed(2)
        each.step(own.objective, own.batch)
        assert each.report.accepted
    assert equal(snapshot(task.model, optimizer), snapshot(twin.model, other))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_search_does_not_go_where_the_loss_is_not_finite(value: float) -> None:
    task = Task(model=noisy)
    optimizer = under_way(task)
    before, old = snapshot(task.model, optimizer), dampings(optimizer)
    optimizer.step(elsewhere(value)(task), task.batch)
    assert not optimizer.report.accepted
    assert equal(snapshot(task.model, optimizer)["model"], before["model"])
    assert equal(snapshot(task.model, optimizer)["optimizer"]["state"], before["optimizer"]["state"])
    assert all(new > damping for new, damping in zip(dampings(optimizer), old, strict=True))


def test_backtracking_stays_on_this_side_of_where_the_loss_is_not_finite() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.by_layer(task.model))
    optimizer.direction(task.objective, task.batch)
    length = torch.cat([param.grad.reshape(-1) for param in task.model.parameters()]).norm()
    before = values(task.model)
    fresh = BlockHF.martens(blocks.by_layer(task.model))
    fresh.step(elsewhere(torch.nan, radius=0.3 * float(length))(task), task.batch)
    assert fresh.report.accepted
    assert fresh.report.reason == "shrunk to 0.25"
    torch.testing.assert_close((values(task.model) - before).norm(), 0.25 * length, rtol=1e-9, atol=0)


def test_the_report_of_a_failed_curvature_says_which_block_failed() -> None:
    """Only the last layer lies behind the treacherous function, as seen from the loss."""
    task = Task()
    first, second = task.model[:3], task.model[3:]

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = second(Treacherous.apply(first(batch[0])))
        return outputs, task.loss(outputs, batch[1])

    optimizer = BlockHF.martens(blocks.by_layer(task.model), damping=0.1, search=FixedStep())
    optimizer.step(objective, task.batch)
    assert [(block.name, block.status) for block in optimizer.report.blocks if block.name != "4"] == [
        ("0", "non finite"),
        ("2", "non finite"),
    ]
    assert optimizer.report.blocks[2].status != "non finite"
    assert [block.coefficient for block in optimizer.report.blocks] == [0.0, 0.0, 0.0]


def test_where_no_block_has_positive_curvature_damping_rises_until_one_has() -> None:
    """At the top of a cosine the Hessian is -1: nothing to do until the damping is above 1."""
    angle = nn.Parameter(torch.full((1,), 0.01, dtype=torch.float64))
    rule = LevenbergMarquardt(initial=0.4, factor=0.5)
    optimizer = BlockHF.martens([angle], curvature=Hessian(), damping=rule)
    seen = []

    def objective() -> Tensor:
        return angle.cos().sum()

    for step in range(3):
        old = float(angle.detach())
        warns = pytest.warns(UserWarning, match="The curvature along the gradient is negative")
        with contextlib.nullcontext() if step else warns:
            optimizer.step(objective)
        assert len(optimizer.report.warnings) == (0 if step else 1), "said once"
        seen.append((optimizer.report.accepted, optimizer.report.blocks[0].damping))
        moved = float(angle.detach()) != old
        assert moved == optimizer.report.accepted
        if not moved:
            assert optimizer.report.reason == "no block has a direction of positive curvature"
    assert seen == [(False, 0.4), (False, 0.8), (True, 1.6)]


def test_training_goes_on_between_bad_batches() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.by_layer(task.model), search=FixedStep(evaluates=True), lr=0.5)
    first = float(dense_loss(task, task.batch))
    verdicts = []
    for fail, _, _ in FAILURES.values():
        optimizer.step(fail(task), task.batch)
        verdicts.append(optimizer.report.accepted)
        optimizer.step(task.objective, task.batch)
        verdicts.append(optimizer.report.accepted)
    assert verdicts == [False, True] * len(FAILURES)
    assert float(dense_loss(task, task.batch)) < 0.8 * first
    assert optimizer.report.step == len(FAILURES)


# --- exceptions ---------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def ambience(model: nn.Module) -> dict[str, Any]:
    """What a step borrows and has to give back."""
    return {
        "requires_grad": [param.requires_grad for param in model.parameters()],
        "grads": [param.grad for param in model.parameters()],
        "places": [param.data_ptr() for param in model.parameters()],
        "buffers": [id(buffer) for buffer in model.buffers()],
        "hooks": len(torch_module._global_forward_pre_hooks),
        "grad mode": torch.is_grad_enabled(),
        "kernels": (torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()),
        "training": [module.training for module in model.modules()],
    }


# In which call of the objective, and in which phase that is.
PHASES = {"gradient": 1, "curvature": 2, "search": 3, "second try": 4}


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("phase", PHASES)
def test_an_exception_in_the_objective_leaves_everything_untouched(
    phase: str, error: type[BaseException]
) -> None:
    task, twin = Task(model=noisy), Task(model=noisy)
    options = {"curvature_batch_size": 6, "lr": 1.0, "search": Backtracking(sufficient=0.0)}
    optimizer, other = under_way(task, **options), under_way(twin, **options)
    before, around = snapshot(task.model, optimizer), ambience(task.model)
    home, calls = values(task.model), 0

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        outputs, loss = task.objective(batch)
        calls += 1
        if calls == PHASES[phase]:
            raise error
        return outputs, loss + 100.0 if (values(task.model) != home).any() else loss  # so that tries fail

    with pytest.raises(error):
        optimizer.step(objective, task.batch)
    assert calls == PHASES[phase]
    assert equal(snapshot(task.model, optimizer), before)
    assert ambience(task.model) == around

    for each, own in ((optimizer, task), (other, twin)):
        torch.manual_seed(2)
        each.step(own.objective, own.batch)
    assert equal(snapshot(task.model, optimizer), snapshot(twin.model, other))


@pytest.mark.parametrize("phase", ["curvature", "search"])
def test_an_exception_leaves_the_random_state_as_it_was_before_the_step(phase: str) -> None:
    task = Task(model=noisy)
    optimizer = BlockHF.martens(blocks.by_layer(task.model), curvature_batch_size=6)
    before = torch.get_rng_state()
    states = []

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        result = task.objective(batch)
        states.append(torch.get_rng_state())
        if len(states) == PHASES[phase]:
            torch.randn(7)
            raise Boom
        return result

    with pytest.raises(Boom):
        optimizer.step(objective, task.batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(states[0], before)


@every_way
@pytest.mark.parametrize("fail", [None, plus(torch.nan), treacherous, elsewhere(torch.nan)])
def test_a_step_gives_back_what_it_borrowed(fail: Any, way: dict[str, Any]) -> None:
    task = Task(model=noisy)
    optimizer = under_way(task, **way)
    around = ambience(task.model)
    optimizer.step(fail(task) if fail else task.objective, task.batch)
    assert optimizer.report.accepted == (fail is None)
    assert ambience(task.model) == around
