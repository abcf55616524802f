"""What a step leaves alone where nothing fails: random numbers and buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from failures import WAYS, elsewhere, every_way, noisy, root, treacherous
from torch import Tensor, nn

from blockhf import (
    Backtracking,
    BlockHF,
    ConjugateGradient,
    FixedStep,
    Solution,
    Solver,
    State,
    System,
    blocks,
)
from optimizer_tasks import Task, dense_loss, equal, values

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
        blocks.by_layer(task.model),
        lr=0.0,
        damping=0.1,
        max_cg_steps=2,
        search=FixedStep(evaluates=True),
        **way,
    )
    for _ in range(3):
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
        if not seen:  # the checks of the first step: two parts, both of them together, a product each block
            assert equal(rest[:2], parts[:2])
            rest, num_products = rest[3:], num_products + 2
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


class Probing(Solver):
    """A solver that asks for the same product before and after it solves."""

    def __init__(self) -> None:
        self.products: list[Tensor] = []

    def solve(self, system: System, state: State) -> Solution:
        before = system.matrix @ system.rhs
        solution = ConjugateGradient().solve(system, state)
        torch.randn(5)
        self.products += [before, system.matrix @ system.rhs]
        return solution


@every_way
def test_a_product_is_the_same_whenever_it_is_asked_for(way: dict[str, Any]) -> None:
    task, solver = Task(model=noisy), Probing()
    optimizer = BlockHF.martens(blocks.by_layer(task.model), solver=solver, max_cg_steps=3, **way)
    for _ in range(2):
        optimizer.step(task.objective, task.batch)
    before, after = solver.products[::2], solver.products[1::2]
    assert equal(before, after)
    num_blocks = len(optimizer.param_groups)
    assert len(before) == 2 * num_blocks
    assert not any(map(torch.equal, before[:num_blocks], before[num_blocks:]))


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
    [FixedStep(evaluates=True), Backtracking()],
    ids=lambda search: type(search).__name__,
)
def test_running_statistics_are_those_of_the_new_parameters_on_the_curvature_s_samples(
    search: Any, way: dict[str, Any]
) -> None:
    task = Task(model=noisy)
    optimizer = BlockHF.martens(blocks.by_layer(task.model), lr=0.3, max_cg_steps=3, search=search, **way)
    size = way.get("micro_batch_size", 16)
    for step in range(3):
        optimizer.step(task.objective, task.batch)
        assert optimizer.report.accepted
        (inputs, _), twin = task.drawn(way.get("curvature_batch_size", 16), step), task.copy()
        norm = twin.model[1]
        for number, part in enumerate(torch.split(inputs, size), start=1):
            norm.momentum = 1 / number
            twin.model(part)
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(task.model[1].get_buffer(name), norm.get_buffer(name))
        assert task.model[1].momentum == 0.1
        # Batches are counted as in a plain pass over the gradient's samples.
        assert int(task.model[1].num_batches_tracked) == (step + 1) * len(torch.split(task.batch[0], size))


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
