"""What a step leaves alone: everything, where something fails; randomness and buffers, where nothing does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.modules.module as torch_module
from torch import Tensor, nn

from blockhf import Backtracking, BestIterate, BlockHF, FixedStep, Hessian, LevenbergMarquardt, blocks
from blockhf.operators import BlockMatrix
from blockhf.solvers import ConjugateGradient, Solution, System
from optimizer_tasks import Task, dense_loss, equal, snapshot, values

Loss = Callable[[Any], tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def noisy() -> nn.Sequential:
    """A model with all that a forward pass may touch: parameters, buffers and random numbers."""
    return nn.Sequential(
        nn.Linear(3, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Dropout(0.4),
        nn.Linear(8, 4),
        nn.Tanh(),
        nn.Linear(4, 2),
    )


# --- values that are not finite -----------------------------------------------------------------------


class Treacherous(torch.autograd.Function):
    """The identity, whose first derivative is fine and whose second is not a number."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return TreacherousBackward.apply(gradient)


class TreacherousBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Any:
        return tangent * torch.nan


def plus(value: float) -> Callable[[Task], Loss]:
    """The loss with something added to it that has no derivative."""

    def make(task: Task) -> Loss:
        def objective(batch: Any) -> tuple[Tensor, Tensor]:
            outputs, loss = task.objective(batch)
            return outputs, loss + value

        return objective

    return make


def root(task: Task) -> Loss:
    """A finite loss whose gradient is that of a square root at zero."""

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs, loss = task.objective(batch)
        return outputs, loss + (outputs - outputs.detach()).abs().sum().sqrt()

    return objective


def treacherous(task: Task) -> Loss:
    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = Treacherous.apply(task.model(batch[0]))
        return outputs, task.loss(outputs, batch[1])

    return objective


def elsewhere(value: float, radius: float = 1e-12) -> Callable[[Task], Loss]:
    """The loss jumps to ``value`` at this distance from the parameters as they are now."""

    def make(task: Task) -> Loss:
        home = values(task.model)

        def objective(batch: Any) -> tuple[Tensor, Tensor]:
            outputs, loss = task.objective(batch)
            away = (values(task.model) - home).norm() > radius
            return outputs, loss + value if away else loss

        return objective

    return make


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

WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "part": {"curvature_batch_size": 6},
    "micro-batches": {"curvature_batch_size": 10, "micro_batch_size": 6},
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


def dampings(optimizer: BlockHF) -> list[float]:
    return [group["damping"] for group in optimizer.param_groups]


def under_way(task: Task, **options: Any) -> BlockHF:
    """An optimizer of the task's model that has made two steps."""
    optimizer = BlockHF.martens(blocks.by_layer(task.model), max_cg_steps=4, **options)
    for seed in range(2):
        torch.manual_seed(seed)
        optimizer.step(task.objective, task.batch)
    assert optimizer.report is not None
    assert optimizer.report.accepted
    return optimizer


@every_way
@every_failure
@pytest.mark.parametrize("adapts", [True, False], ids=["adaptive damping", "constant damping"])
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
@pytest.mark.parametrize("search", [Backtracking(), BestIterate()], ids=["backtracking", "best iterate"])
def test_a_search_does_not_go_where_the_loss_is_not_finite(search: Any, value: float) -> None:
    task = Task(model=noisy)
    optimizer = under_way(task)
    optimizer.search = search
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
    for _ in range(3):
        old = float(angle.detach())
        optimizer.step(lambda: angle.cos().sum())
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
def test_an_exception_leaves_the_random_state_behind_the_gradient_pass(phase: str) -> None:
    task = Task(model=noisy)
    optimizer = BlockHF.martens(blocks.by_layer(task.model), curvature_batch_size=6)
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
    assert torch.equal(torch.get_rng_state(), states[0])


@every_way
@pytest.mark.parametrize("fail", [None, plus(torch.nan), treacherous, elsewhere(torch.nan)])
def test_a_step_gives_back_what_it_borrowed(fail: Any, way: dict[str, Any]) -> None:
    task = Task(model=noisy)
    optimizer = under_way(task, **way)
    around = ambience(task.model)
    optimizer.step(fail(task) if fail else task.objective, task.batch)
    assert optimizer.report.accepted == (fail is None)
    assert ambience(task.model) == around


# --- random numbers -----------------------------------------------------------------------------------


def dropped() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2))


class Attention(nn.Module):
    """Attention has several kernels, of which only one can be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(3, 32), nn.Linear(4, 12), nn.Linear(32, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.embed(inputs).view(-1, 8, 4)
        query, key, value = self.mix(tokens).view(-1, 8, 3, 1, 4).permute(2, 0, 3, 1, 4)
        return self.head(F.scaled_dot_product_attention(query, key, value).flatten(1))


@pytest.mark.parametrize("model", [dropped, Attention])
@pytest.mark.parametrize("way", [*WAYS.values(), {"micro_batch_size": 1}], ids=[*WAYS, "single samples"])
def test_the_losses_before_and_after_can_be_compared_to_the_last_bit(way: dict[str, Any], model: Any) -> None:
    task = Task(model=model)
    optimizer = BlockHF.martens(
        blocks.by_layer(task.model), lr=0.0, damping=0.1, search=FixedStep(evaluates=True), **way
    )
    for _ in range(5):
        batch = (torch.randn_like(task.batch[0]), task.batch[1])
        loss = optimizer.step(task.objective, batch)
        assert optimizer.report.loss_after == float(loss)


def test_the_masks_of_different_steps_differ() -> None:
    task = Task(model=dropped)
    optimizer = BlockHF.martens(blocks.by_layer(task.model), lr=0.0, damping=0.1, search=FixedStep())
    assert len({float(optimizer.step(task.objective, task.batch)) for _ in range(3)}) == 3


class Masks:
    """The masks that a layer drew, in the order of its calls."""

    def __init__(self, layer: nn.Module) -> None:
        self.seen: list[Tensor] = []
        layer.register_forward_hook(lambda module, args, output: self.seen.append(output != 0))


def test_every_pass_of_a_step_draws_the_same_masks() -> None:
    """Gradient, curvature and search alike, and each part its own."""
    task = Task(model=dropped)
    masks = Masks(task.model[1])
    optimizer = BlockHF.martens(
        blocks.by_layer(task.model), max_cg_steps=2, micro_batch_size=4, curvature_batch_size=8
    )
    seen = []
    for _ in range(2):
        masks.seen.clear()
        optimizer.step(task.objective, task.batch)
        parts, rest = masks.seen[:4], masks.seen[4:]
        num_products, num_tries = optimizer.report.num_products, optimizer.report.work["num_evaluations"]
        assert equal(rest, parts[:2] * num_products + parts * num_tries)
        seen += [tuple(part.flatten().tolist()) for part in parts]
    assert len(set(seen)) == 8, "parts and steps differ in their masks"


def test_curvature_on_a_part_of_the_batch_keeps_one_mask_for_all_products() -> None:
    task = Task(model=dropped)
    masks = Masks(task.model[1])
    optimizer = BlockHF.martens(blocks.by_layer(task.model), curvature_batch_size=6, max_cg_steps=3)
    optimizer.step(task.objective, task.batch)
    assert [len(mask) for mask in masks.seen[:2]] == [16, 6]
    assert equal(masks.seen[2:], masks.seen[:1] * optimizer.report.work["num_evaluations"])


class Probing:
    """A solver that asks for the same product before and after it solves."""

    def __init__(self) -> None:
        self.products: list[Tensor] = []

    def solve(self, systems: Sequence[System], matrix: BlockMatrix) -> list[Solution]:
        self.products.append(systems[0].operator @ systems[0].rhs)
        solutions = ConjugateGradient().solve(systems, matrix)
        torch.randn(5)
        self.products.append(systems[0].operator @ systems[0].rhs)
        return solutions


@every_way
def test_a_product_is_the_same_whenever_it_is_asked_for(way: dict[str, Any]) -> None:
    task, solver = Task(model=noisy), Probing()
    optimizer = BlockHF.martens(blocks.by_layer(task.model), solver=solver, max_cg_steps=3, **way)
    for _ in range(2):
        optimizer.step(task.objective, task.batch)
    before, after, before_next, after_next = solver.products
    assert torch.equal(before, after)
    assert torch.equal(before_next, after_next)
    assert not torch.equal(before, before_next)


@pytest.mark.parametrize("fail", [None, root, treacherous, elsewhere(torch.nan)])
@every_way
def test_the_random_state_after_a_step_is_that_after_a_gradient_pass(way: dict[str, Any], fail: Any) -> None:
    task = Task(model=noisy)
    optimizer = BlockHF.martens(blocks.by_layer(task.model), max_cg_steps=3, **way)
    twin = task.copy()
    for seed in range(2):
        torch.manual_seed(seed)
        for part in torch.split(twin.batch[0], way.get("micro_batch_size", 16)):
            twin.model(part)
        expected = torch.get_rng_state()
        torch.manual_seed(seed)
        optimizer.step(fail(task) if fail else task.objective, task.batch)
        assert torch.equal(torch.get_rng_state(), expected)


def test_the_gradient_pass_draws_as_a_plain_pass_would() -> None:
    task = Task(model=noisy)
    twin = task.copy()
    optimizer = BlockHF.martens(blocks.by_layer(task.model), curvature_batch_size=6)
    torch.manual_seed(5)
    loss = optimizer.step(task.objective, task.batch)
    torch.manual_seed(5)
    assert torch.equal(loss, dense_loss(twin, twin.batch))


# --- buffers ------------------------------------------------------------------------------------------


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(dict(model.named_buffers()))


@every_way
@pytest.mark.parametrize(
    "search",
    [FixedStep(evaluates=True), Backtracking(), BestIterate()],
    ids=lambda search: type(search).__name__,
)
def test_running_statistics_move_once_a_step_and_as_in_a_plain_pass(search: Any, way: dict[str, Any]) -> None:
    task = Task(model=noisy)
    optimizer = BlockHF.martens(blocks.by_layer(task.model), lr=0.3, max_cg_steps=3, search=search, **way)
    for step in range(1, 4):
        twin = task.copy()
        parts = torch.split(twin.batch[0], way.get("micro_batch_size", 16))
        torch.manual_seed(step)
        for part in parts:
            twin.model(part)
        torch.manual_seed(step)
        optimizer.step(task.objective, task.batch)
        assert optimizer.report.accepted
        assert equal(statistics(task.model), statistics(twin.model))
        assert int(task.model[1].num_batches_tracked) == step * len(parts)


def test_directions_move_the_running_statistics_once() -> None:
    task = Task(model=noisy)
    twin = task.copy()
    torch.manual_seed(0)
    twin.model(twin.batch[0])
    torch.manual_seed(0)
    BlockHF.martens(blocks.by_layer(task.model), curvature_batch_size=6).direction(task.objective, task.batch)
    assert equal(statistics(task.model), statistics(twin.model))
    assert not equal(statistics(task.model), statistics(Task(model=noisy).model))


def test_in_eval_mode_nothing_moves_but_the_parameters() -> None:
    task = Task(model=noisy)
    task.model.eval()
    before, start = statistics(task.model), values(task.model)
    optimizer = BlockHF.martens(blocks.by_layer(task.model), curvature_batch_size=6)
    optimizer.step(task.objective, task.batch)
    assert optimizer.report.accepted
    assert equal(statistics(task.model), before)
    assert not torch.equal(values(task.model), start)
