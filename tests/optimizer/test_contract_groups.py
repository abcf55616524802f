"""Options of parameter groups, schedulers, and groups that come, freeze and thaw."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from blockhf import (
    BlockHF,
    blocks,
)
from optimizer_tasks import (
    FACTORIES,
    FIXED,
    Factory,
    Task,
    by_layer,
    dense_loss,
    equal,
    slices,
    snapshot,
    values,
    written,
)

# --- options of groups ---------------------------------------------------------------------------------

# For each option two values that give different directions in the second of two steps.
OPTIONS: dict[str, tuple[Any, Any]] = {
    "damping": (0.01, 1.0),
    "max_cg_steps": (2, 4),
    "cg_rtol": (1e-6, 0.3),
    "cg_progress": (0.0, 0.9),
    "warm_start": (0.0, 0.95),
    "slow_start": (None, (10, 1)),
}
# Those that a factory has a value of its own for, and all of them where it is the constructor itself.
OF_FACTORY = {"default": OPTIONS, "paper": ("cg_rtol", "warm_start"), "martens": ("damping", "cg_progress")}
each_option = pytest.mark.parametrize(
    ("factory", "option"),
    [
        pytest.param(FACTORIES[name], option, id=f"{name}-{option}")
        for name, options in OF_FACTORY.items()
        for option in options
    ],
)


def second_directions(
    factory: Factory, edit: Callable[[BlockHF], None] = lambda _: None, *, groups: Any = None
) -> list[Tensor]:
    """Each block's direction in a second step from the same point.

    One CG iteration less than the size of the smallest block, so that no two solutions coincide.
    """
    task = Task()
    own = blocks.by_layer(task.model)
    for group, options in zip(own, groups or [{}] * 3, strict=True):
        group.update({"cg_progress": 0.0, **options})
    optimizer = factory(own, max_cg_steps=12, **FIXED)
    edit(optimizer)
    for _ in range(2):
        optimizer.direction(task.objective, task.batch)
    return written(task.model)


def with_option(option: str, *choices: Any) -> list[dict[str, Any]]:
    extra = {"max_cg_steps": 3} if option in ("warm_start", "damping") else {}
    return [{**extra, option: choice} for choice in choices]


@cache
def alike(factory: Factory, option: str, choice: Any) -> list[Tensor]:
    """The directions where all groups have an option in common."""
    return second_directions(factory, groups=with_option(option, choice, choice, choice))


@each_option
def test_a_group_goes_by_its_own_options(factory: Factory, option: str) -> None:
    one, other = OPTIONS[option]
    first, second = alike(factory, option, one), alike(factory, option, other)
    mixed = second_directions(factory, groups=with_option(option, one, other, one))
    assert not any(map(torch.equal, first[:2], second[:2]))
    assert equal(mixed, [first[0], second[1], first[2]])


@each_option
def test_an_edit_of_a_group_takes_effect_at_the_next_step(factory: Factory, option: str) -> None:
    one, other = OPTIONS[option]

    def edit(optimizer: BlockHF) -> None:
        for group in optimizer.param_groups:
            group[option] = other

    edited = second_directions(factory, edit, groups=with_option(option, one, one, one))
    assert equal(edited, alike(factory, option, other))


@pytest.mark.parametrize("lr", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_each_block_moves_by_its_own_lr(factory: Factory, lr: Any) -> None:
    task, twin = Task(), Task()
    groups = blocks.by_layer(task.model)
    groups[0]["lr"], groups[1]["lr"] = lr, 0.0
    before = values(task.model)
    factory(groups, lr=1.0, max_cg_steps=3, **FIXED).step(task.objective, task.batch)
    factory(blocks.by_layer(twin.model), lr=1.0, max_cg_steps=3, **FIXED).step(twin.objective, twin.batch)
    moved, full = values(task.model) - before, values(twin.model) - before
    for place, share in zip(slices(groups), (0.25, 0.0, 1.0), strict=True):
        torch.testing.assert_close(moved[place], share * full[place], rtol=1e-12, atol=1e-15)
    assert full.norm() > 0


def test_a_warm_start_that_was_switched_off_does_not_come_back_to_an_old_solution(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.single(task.model), max_cg_steps=3, warm_start=0.95, **FIXED)
    (group,) = optimizer.param_groups
    products = []
    for warm_start in (0.95, 0.95, 0.0, 0.95, 0.95):
        group["warm_start"] = warm_start
        optimizer.step(task.objective, task.batch)
        products.append(optimizer.report.num_products)
    assert products == [3, 4, 3, 3, 4]


# --- schedulers ----------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[BlockHF], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.7**epoch),
    "LambdaLR per block": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, [lambda epoch, base=base: base**epoch for base in (0.5, 0.8, 1.0)]
    ),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[2],
    ),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.5, total_steps=6, cycle_momentum=False
    ),
}


@pytest.mark.parametrize(
    ("factory", "make"),
    [
        pytest.param(factory, make, id=f"{name}-{kind}")
        for name, factory in FACTORIES.items()
        for kind, make in SCHEDULERS.items()
        if name == "default" or kind == "LambdaLR per block"
    ],
)
def test_a_scheduler_sets_the_length_of_the_update(factory: Factory, make: Callable[[BlockHF], Any]) -> None:
    task = Task()
    optimizer = factory(blocks.by_layer(task.model), lr=0.8, max_cg_steps=2, warm_start=0.0, **FIXED)
    scheduler = make(optimizer)
    rates = []
    for _ in range(4):
        # Of copies, as what a preconditioner learns from the samples would count twice.
        copied, other = copy.deepcopy((task, optimizer))
        other.direction(copied.objective, copied.batch)
        directions, before = written(copied.model), by_layer(task.model)
        optimizer.step(task.objective, task.batch)
        rates.append(scheduler.get_last_lr())
        assert [block.coefficient for block in optimizer.report.blocks] == rates[-1]
        for rate, direction, old, new in zip(
            rates[-1], directions, before, by_layer(task.model), strict=True
        ):
            torch.testing.assert_close(new, old - rate * direction, rtol=1e-12, atol=1e-14)
        scheduler.step()
    assert len({tuple(rate) for rate in rates}) == 4


# --- groups that come, freeze and thaw -----------------------------------------------------------------


def test_a_block_that_joins_in_mid_training_moves_from_then_on(factory: Factory) -> None:
    task = Task()
    first, middle, last = blocks.by_layer(task.model)
    optimizer = factory([first, last], max_cg_steps=3, warm_start=0.95, **FIXED)
    for _ in range(2):
        before = values(task.model[2])
        optimizer.step(task.objective, task.batch)
        assert torch.equal(values(task.model[2]), before)
    optimizer.add_param_group({**middle, "max_cg_steps": 2})
    optimizer.step(task.objective, task.batch)
    assert not torch.equal(values(task.model[2]), before)
    assert [(block.name, block.num_products) for block in optimizer.report.blocks] == [
        ("0", 4),
        ("4", 4),
        ("2", 2),
    ], "the old blocks start warm, the new one cold"
    assert optimizer.report.step == 3


def test_a_parameter_that_was_frozen_after_construction_stays_put(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.by_layer(task.model), max_cg_steps=3, **FIXED)
    optimizer.step(task.objective, task.batch)
    task.model[0].bias.requires_grad_(False)
    before = copy.deepcopy(task.model.state_dict())
    optimizer.step(task.objective, task.batch)
    moved = {name for name, value in task.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"0.weight", "2.weight", "2.bias", "4.weight", "4.bias"}
    assert [block.size for block in optimizer.report.blocks] == [12, 15, 8]
    assert not task.model[0].bias.requires_grad


def test_a_block_that_was_frozen_as_a_whole_is_skipped_and_comes_back_when_it_is_thawed(
    factory: Factory,
) -> None:
    task = Task()
    optimizer = factory(blocks.by_layer(task.model), max_cg_steps=3, **FIXED)
    optimizer.step(task.objective, task.batch)
    task.model[2].requires_grad_(False)
    before = values(task.model[2])
    optimizer.step(task.objective, task.batch)
    assert [block.name for block in optimizer.report.blocks] == ["0", "4"]
    assert torch.equal(values(task.model[2]), before)
    task.model[2].requires_grad_(True)
    optimizer.step(task.objective, task.batch)
    assert [block.name for block in optimizer.report.blocks] == ["0", "2", "4"]
    assert not torch.equal(values(task.model[2]), before)


def test_a_model_that_is_frozen_as_a_whole_is_an_error(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.by_layer(task.model))
    task.model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"Every parameter is frozen\. Thaw some with requires_grad_"):
        optimizer.step(task.objective, task.batch)


def test_a_parameter_that_the_loss_does_not_use_stays_put(factory: Factory) -> None:
    task = Task()
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = factory([unused, *task.model.parameters()], max_cg_steps=3)
    before = values(task.model)
    for _ in range(3):
        optimizer.step(task.objective, task.batch)
        assert optimizer.report.accepted
    assert torch.equal(unused, torch.ones(2, dtype=torch.float64))
    assert not torch.equal(values(task.model), before)


def test_a_block_that_the_outputs_do_not_use_stays_put_and_the_others_step(factory: Factory) -> None:
    task, twin = Task(), Task()
    idle = nn.Parameter(torch.ones(2, dtype=torch.float64))
    groups = [*blocks.single(task.model), {"params": [("idle", idle)], "name": "idle"}]
    optimizer, other = factory(groups, damping=0.1), factory(blocks.single(twin.model), damping=0.1)
    for _ in range(2):
        optimizer.step(task.objective, task.batch)
        other.step(twin.objective, twin.batch)
        assert optimizer.report.accepted
        assert optimizer.report.blocks[1].status == "no influence"
        assert optimizer.report.blocks[1].num_products == 0
    assert torch.equal(idle, torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(values(task.model), values(twin.model), rtol=1e-8, atol=1e-9)


def test_outputs_that_use_no_block_are_an_error(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.single(task.model))
    before = snapshot(task.model, optimizer)
    others = torch.ones(16, 2, dtype=torch.float64, requires_grad=True)

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        return others, task.objective(batch)[1] + others.square().mean()

    with pytest.raises(ValueError, match="The outputs depend on no parameter of the optimizer"):
        optimizer.step(objective, task.batch)
    assert equal(snapshot(task.model, optimizer), before)


def test_sparse_gradients_are_an_error_that_names_the_block(factory: Factory) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    optimizer = factory(blocks.by_layer(model))

    def objective(tokens: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(tokens)
        return outputs, outputs.square().mean()

    with pytest.raises(
        ValueError, match=r"A gradient of block '0' is sparse\. Build the layer with sparse=False"
    ):
        optimizer.step(objective, torch.tensor([0, 1, 2]))


def test_blocks_may_differ_in_precision(factory: Factory) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(3, 4), nn.Linear(4, 2).double()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.high(self.low(inputs.float()).double().tanh())

    task = Task()
    task.model = Mixed()
    optimizer = factory(blocks.by_layer(task.model), max_cg_steps=5)
    before = copy.deepcopy(task.model.state_dict())
    first = dense_loss(task, task.batch)
    for _ in range(3):
        optimizer.step(task.objective, task.batch)
        assert optimizer.report.accepted
    assert dense_loss(task, task.batch) < first
    assert all(
        value.dtype == before[name].dtype and not torch.equal(value, before[name])
        for name, value in task.model.state_dict().items()
    )
