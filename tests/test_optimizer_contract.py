"""What a user of ``torch.optim`` may expect of ``BlockHF``, and which misuse is told how."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from blockhf import (
    Backtracking,
    BlockHF,
    Constant,
    FixedStep,
    GaussNewton,
    Hessian,
    LevenbergMarquardt,
    blocks,
)
from blockhf.blocks import Block
from blockhf.damping import Outcome
from blockhf.objective import Evaluation, Problem
from blockhf.operators import BlockMatrix, Dense
from blockhf.search import Choice, Proposal
from blockhf.solvers import Solution, Status, System
from optimizer_tasks import (
    Task,
    dense_gauss_newton,
    dense_gradient,
    dense_loss,
    equal,
    mlp,
    slices,
    snapshot,
    values,
)

FIXED: dict[str, Any] = {"damping": 0.01, "search": FixedStep()}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def groups_of(optimizer: BlockHF) -> list[str]:
    return [group["name"] for group in optimizer.param_groups]


def written(model: nn.Module) -> list[Tensor]:
    """What ``direction`` wrote, one flat vector per layer."""
    return [
        torch.cat([param.grad.reshape(-1) for param in layer.parameters()])
        for layer in model.children()
        if list(layer.parameters())
    ]


# --- construction -------------------------------------------------------------------------------------

VALID: dict[str, Callable[[nn.Module], BlockHF]] = {
    "parameters": lambda model: BlockHF.martens(model.parameters()),
    "named parameters": lambda model: BlockHF.martens(model.named_parameters()),
    "single": lambda model: BlockHF.martens(blocks.single(model)),
    "by module": lambda model: BlockHF.martens(blocks.by_module(model)),
    "groups without names": lambda model: BlockHF.martens(
        [{"params": layer.parameters()} for layer in (model[0], model[2], model[4])]
    ),
    "a tensor for a group": lambda model: BlockHF.martens(
        [{"params": model[0].weight}, {"params": model[2].weight}]
    ),
    "options at their lower bounds": lambda model: BlockHF.martens(
        blocks.single(model),
        lr=0.0,
        damping=0.0,
        max_cg_steps=1,
        cg_rtol=0.0,
        cg_progress=0.0,
        warm_start=0.0,
        slow_start=(0, 1),
        curvature_batch_size=1,
        micro_batch_size=1,
    ),
    "options at their upper bounds": lambda model: BlockHF.martens(
        blocks.single(model), warm_start=1.0, cg_rtol=0.999
    ),
    "a tensor for lr": lambda model: BlockHF.martens(blocks.single(model), lr=torch.tensor(0.5)),
    "a rule for damping": lambda model: BlockHF.martens(blocks.single(model), damping=Constant(0.1)),
    "adaptive damping with an evaluated fixed step": lambda model: BlockHF.martens(
        blocks.single(model), damping=LevenbergMarquardt(), search=FixedStep(evaluates=True)
    ),
    "paper": lambda model: BlockHF.paper(blocks.by_layer(model), slow_start=(10, 2), curvature_batch_size=4),
    "paper with another search": lambda model: BlockHF.paper(blocks.single(model), search=Backtracking()),
}


@pytest.mark.parametrize("make", VALID.values(), ids=VALID.keys())
def test_valid_constructions_make_a_step(make: Callable[[nn.Module], BlockHF]) -> None:
    task = Task()
    optimizer = make(task.model)
    assert optimizer.report is None
    optimizer.step(task.objective, task.batch)
    assert optimizer.report.accepted


def test_groups_without_names_are_numbered() -> None:
    model = mlp()
    optimizer = BlockHF.martens(
        [{"params": [model[0].weight]}, {"params": [model[2].weight], "name": "middle"}]
    )
    optimizer.add_param_group({"params": [model[4].weight]})
    assert groups_of(optimizer) == ["block0", "middle", "block2"]


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


INVALID: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "no parameters": (lambda m: BlockHF.martens([]), ValueError, "empty parameter list"),
    "a bare tensor": (lambda m: BlockHF.martens(m[0].weight), TypeError, "should be an iterable"),
    "an empty group": (
        lambda m: BlockHF.martens([{"params": [], "name": "head"}]),
        ValueError,
        "Block 'head' is empty. Give it parameters or leave it out.",
    ),
    "a set": (lambda m: BlockHF.martens([{"params": set(m.parameters())}]), TypeError, "Give a list."),
    "no tensor": (
        lambda m: BlockHF.martens([{"params": ["weight"], "name": "head"}]),
        ValueError,
        "Block 'head' holds number 0, a str and not a tensor.",
    ),
    "whole numbers": (
        lambda m: BlockHF.martens([torch.zeros(3, dtype=torch.long)]),
        ValueError,
        "is of torch.int64; only real floating-point parameters",
    ),
    "complex numbers": (
        lambda m: BlockHF.martens([torch.zeros(3, dtype=torch.complex64, requires_grad=True)]),
        ValueError,
        "is of torch.complex64; only real",
    ),
    "mixed precision in a block": (
        lambda m: BlockHF.martens([m[0].weight, nn.Parameter(torch.zeros(2, dtype=torch.float16))]),
        ValueError,
        "mixes parameters of dtype torch.float16 and torch.float32. Give each dtype a block of its own.",
    ),
    "a result of a computation": (lambda m: BlockHF.martens([m[0].weight * 2]), ValueError, "non-leaf"),
    "a frozen parameter": (
        lambda m: BlockHF.martens([frozen(m[0]).weight, m[2].weight]),
        ValueError,
        "Parameter number 0 of block 'block0' has no gradient: it is frozen. Take it out of the group",
    ),
    "a frozen parameter with a name": (
        lambda m: BlockHF.martens([{"params": list(frozen(m[0]).named_parameters()), "name": "head"}]),
        ValueError,
        "Parameter weight of block 'head' has no gradient: it is frozen.",
    ),
    "two blocks of one name": (
        lambda m: BlockHF.martens([{"params": m[i].parameters(), "name": "layer"} for i in (0, 2)]),
        ValueError,
        "Two blocks have the name 'layer'. Rename one.",
    ),
    "a number that a name has taken": (
        lambda m: BlockHF.martens(
            [{"params": m[0].parameters(), "name": "block1"}, {"params": m[2].parameters()}]
        ),
        ValueError,
        "Two blocks have the name 'block1'",
    ),
    "a parameter in two blocks": (
        lambda m: BlockHF.martens(
            [{"params": m.parameters(), "name": "all"}, {"params": [m[0].bias], "name": "bias"}]
        ),
        ValueError,
        "Parameter number 0 is in two blocks, 'all' and 'bias'. Leave it in one of them.",
    ),
    "a parameter twice in a block": (
        lambda m: BlockHF.martens([m[0].weight, m[0].weight]),
        ValueError,
        "Parameter number 1 is twice in block 'block0'. Name it once.",
    ),
    "an unknown reduction": (
        lambda m: BlockHF.martens(m.parameters(), reduction="none"),
        ValueError,
        "reduction is 'none', but must be 'mean' or 'sum'.",
    ),
    "no curvature samples": (
        lambda m: BlockHF.martens(m.parameters(), curvature_batch_size=0),
        ValueError,
        "curvature_batch_size is 0, but must be a whole number of at least 1, a share between 0 and 1, or "
        "None.",
    ),
    "more than all curvature samples": (
        lambda m: BlockHF.martens(m.parameters(), curvature_batch_size=1.2),
        ValueError,
        "curvature_batch_size is 1.2",
    ),
    "a share of a micro-batch": (
        lambda m: BlockHF.martens(m.parameters(), micro_batch_size=0.5),
        ValueError,
        "micro_batch_size is 0.5",
    ),
    "negative micro-batches": (
        lambda m: BlockHF.martens(m.parameters(), micro_batch_size=-4),
        ValueError,
        "micro_batch_size is -4, but must be a whole number of at least 1, or None.",
    ),
    "adaptive damping without the loss": (
        lambda m: BlockHF.martens(m.parameters(), damping=LevenbergMarquardt(), search=FixedStep()),
        ValueError,
        "LevenbergMarquardt needs the loss after each step, which FixedStep does not evaluate. "
        "Use FixedStep(evaluates=True) or Backtracking(), or a constant damping.",
    ),
    "paper with adaptive damping": (
        lambda m: BlockHF.paper(m.parameters(), damping=LevenbergMarquardt()),
        ValueError,
        "LevenbergMarquardt needs the loss after each step",
    ),
    "the default damping without the loss": (
        lambda m: BlockHF.martens(m.parameters(), search=FixedStep()),
        ValueError,
        "LevenbergMarquardt needs the loss after each step",
    ),
    "negative damping": (
        lambda m: BlockHF.martens(m.parameters(), damping=-1),
        ValueError,
        "damping is -1.0, but must not be negative.",
    ),
    "a word for damping": (
        lambda m: BlockHF.martens(m.parameters(), damping="high"),
        ValueError,
        "damping is 'high'",
    ),
    "a class for an object": (
        lambda m: BlockHF.martens(m.parameters(), curvature=GaussNewton),
        ValueError,
        "curvature is the class GaussNewton. Pass an object: GaussNewton().",
    ),
    "an object of another kind": (
        lambda m: BlockHF.martens(m.parameters(), search=GaussNewton()),
        ValueError,
        "search is GaussNewton(), which has no method choose().",
    ),
    "an unknown option": (lambda m: BlockHF.martens(m.parameters(), momentum=0.9), TypeError, "momentum"),
}


@pytest.mark.parametrize(("make", "error", "message"), INVALID.values(), ids=INVALID.keys())
def test_invalid_constructions_are_told(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        make(mlp())
    assert message in str(raised.value)


BAD_OPTIONS: list[tuple[str, Any, str]] = [
    *[("lr", value, "a number of at least 0") for value in (-0.1, math.nan, math.inf, "fast", None)],
    *[("damping", value, "a number of at least 0") for value in (-0.1, math.nan, math.inf, None)],
    *[
        ("max_cg_steps", value, "a whole number of at least 1")
        for value in (0, -3, 2.5, math.nan, math.inf, "many")
    ],
    *[("cg_rtol", value, "at least 0 and below 1") for value in (-1e-9, 1.0, math.nan, "small")],
    *[("cg_progress", value, "at least 0 and below 1") for value in (-1e-9, 1.0, math.nan, None)],
    *[("warm_start", value, "between 0 and 1") for value in (-0.1, 1.1, math.nan, None)],
    *[
        ("slow_start", value, "None or a pair (num_updates, max_cg_steps) of whole numbers")
        for value in (10, (10,), (10, 0), (-1, 2), (10, 2.5), (math.inf, 2), "ab", (1, 2, 3))
    ],
]
bad_options = pytest.mark.parametrize(("option", "value", "bound"), BAD_OPTIONS)


def complaint(block: str, option: str, value: Any, bound: str) -> str:
    return re.escape(f"{option} of block {block!r} is {value!r}, but must be {bound}.")


@pytest.mark.parametrize(
    ("option", "value", "bound"), [option for option in BAD_OPTIONS if option[0] != "damping"]
)
def test_a_bad_option_is_told_at_construction(option: str, value: Any, bound: str) -> None:
    with pytest.raises(ValueError, match=complaint("all", option, value, bound)):
        BlockHF.martens(blocks.single(mlp()), **{option: value})


@bad_options
def test_a_bad_option_of_a_group_is_told_at_construction(option: str, value: Any, bound: str) -> None:
    groups = blocks.by_layer(mlp())
    groups[1][option] = value
    with pytest.raises(ValueError, match=complaint("2", option, value, bound)):
        BlockHF.martens(groups)


@bad_options
def test_a_bad_edit_of_a_group_is_told_at_the_next_step(option: str, value: Any, bound: str) -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.by_layer(task.model))
    optimizer.param_groups[1][option] = value
    before = values(task.model)
    with pytest.raises(ValueError, match=complaint("2", option, value, bound)):
        optimizer.step(task.objective, task.batch)
    assert torch.equal(values(task.model), before)


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    task = Task()
    optimizer = BlockHF.martens([{"params": task.model[0].parameters()}])
    taken, negative = {"params": [task.model[0].bias]}, {"params": [task.model[2].bias], "lr": -1.0}
    for bad, message in ((taken, "is in two blocks"), (negative, "lr of block 'block1' is -1.0")):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(bad)
    assert groups_of(optimizer) == ["block0"]
    optimizer.step(task.objective, task.batch)
    assert [block.size for block in optimizer.report.blocks] == [16]


# --- options of groups --------------------------------------------------------------------------------

# For each option two values that give different directions in the second of two steps.
OPTIONS: dict[str, tuple[Any, Any]] = {
    "damping": (0.01, 1.0),
    "max_cg_steps": (2, 4),
    "cg_rtol": (1e-6, 0.3),
    "cg_progress": (0.0, 0.9),
    "warm_start": (0.0, 0.95),
    "slow_start": (None, (10, 1)),
}
each_option = pytest.mark.parametrize(("option", "choices"), OPTIONS.items(), ids=OPTIONS.keys())


def second_directions(
    edit: Callable[[BlockHF], None] = lambda _: None, *, groups: Any = None
) -> list[Tensor]:
    """Each block's direction in a second step from the same point.

    One CG iteration less than the size of the smallest block, so that no two solutions coincide.
    """
    task = Task()
    own = blocks.by_layer(task.model)
    for group, options in zip(own, groups or [{}] * 3, strict=True):
        group.update(options)
    optimizer = BlockHF.martens(own, damping=0.01, cg_progress=0.0, max_cg_steps=12, search=FixedStep())
    edit(optimizer)
    for _ in range(2):
        optimizer.direction(task.objective, task.batch)
    return written(task.model)


@each_option
def test_a_group_goes_by_its_own_options(option: str, choices: tuple[Any, Any]) -> None:
    extra = {"max_cg_steps": 3} if option in ("warm_start", "damping") else {}
    first, second = (second_directions(groups=[{**extra, option: choice}] * 3) for choice in choices)
    mixed = second_directions(groups=[{**extra, option: choices[i]} for i in (0, 1, 0)])
    assert not any(map(torch.equal, first[:2], second[:2]))
    assert equal(mixed, [first[0], second[1], first[2]])


@each_option
def test_an_edit_of_a_group_takes_effect_at_the_next_step(option: str, choices: tuple[Any, Any]) -> None:
    extra = {"max_cg_steps": 3} if option in ("warm_start", "damping") else {}

    def edit(optimizer: BlockHF) -> None:
        for group in optimizer.param_groups:
            group[option] = choices[1]

    built = second_directions(groups=[{**extra, option: choices[1]}] * 3)
    edited = second_directions(edit, groups=[{**extra, option: choices[0]}] * 3)
    assert equal(edited, built)


@pytest.mark.parametrize("lr", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_each_block_moves_by_its_own_lr(lr: Any) -> None:
    task, twin = Task(), Task()
    groups = blocks.by_layer(task.model)
    groups[0]["lr"], groups[1]["lr"] = lr, 0.0
    before = values(task.model)
    BlockHF.martens(groups, lr=1.0, **FIXED).step(task.objective, task.batch)
    BlockHF.martens(blocks.by_layer(twin.model), lr=1.0, **FIXED).step(twin.objective, twin.batch)
    moved, full = values(task.model) - before, values(twin.model) - before
    for place, share in zip(slices(groups), (0.25, 0.0, 1.0), strict=True):
        torch.testing.assert_close(moved[place], share * full[place], rtol=1e-12, atol=1e-15)
    assert full.norm() > 0


def test_a_warm_start_that_was_switched_off_does_not_come_back_to_an_old_solution() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.single(task.model), max_cg_steps=3, warm_start=0.95, **FIXED)
    (group,) = optimizer.param_groups
    products = []
    for warm_start in (0.95, 0.95, 0.0, 0.95, 0.95):
        group["warm_start"] = warm_start
        optimizer.step(task.objective, task.batch)
        products.append(optimizer.report.num_products)
    assert products == [3, 4, 3, 3, 4]


# --- schedulers ---------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_a_scheduler_sets_the_length_of_the_update(make: Callable[[BlockHF], Any]) -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.by_layer(task.model), lr=0.8, warm_start=0.0, **FIXED)
    scheduler = make(optimizer)
    rates = []
    for _ in range(4):
        optimizer.direction(task.objective, task.batch)
        directions, before = written(task.model), written_values(task.model)
        optimizer.step(task.objective, task.batch)
        rates.append(scheduler.get_last_lr())
        assert [block.coefficient for block in optimizer.report.blocks] == rates[-1]
        for rate, direction, old, new in zip(
            rates[-1], directions, before, written_values(task.model), strict=True
        ):
            torch.testing.assert_close(new, old - rate * direction, rtol=1e-12, atol=1e-14)
        scheduler.step()
    assert len({tuple(rate) for rate in rates}) == 4


def written_values(model: nn.Module) -> list[Tensor]:
    return [values(layer) for layer in model.children() if list(layer.parameters())]


# --- groups that come, freeze and thaw ----------------------------------------------------------------


def test_a_block_that_joins_in_mid_training_moves_from_then_on() -> None:
    task = Task()
    first, middle, last = blocks.by_layer(task.model)
    optimizer = BlockHF.martens([first, last], max_cg_steps=3, **FIXED)
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


def test_a_parameter_that_was_frozen_after_construction_stays_put() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.by_layer(task.model), **FIXED)
    optimizer.step(task.objective, task.batch)
    task.model[0].bias.requires_grad_(False)
    before = copy.deepcopy(task.model.state_dict())
    optimizer.step(task.objective, task.batch)
    moved = {name for name, value in task.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"0.weight", "2.weight", "2.bias", "4.weight", "4.bias"}
    assert [block.size for block in optimizer.report.blocks] == [12, 15, 8]
    assert not task.model[0].bias.requires_grad


def test_a_block_that_was_frozen_as_a_whole_is_skipped_and_comes_back_when_it_is_thawed() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.by_layer(task.model), **FIXED)
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


def test_a_model_that_is_frozen_as_a_whole_is_an_error() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.by_layer(task.model))
    task.model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"Every parameter is frozen\. Thaw some with requires_grad_"):
        optimizer.step(task.objective, task.batch)


def test_a_parameter_that_the_loss_does_not_use_stays_put() -> None:
    task = Task()
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = BlockHF.martens([unused, *task.model.parameters()])
    before = values(task.model)
    for _ in range(3):
        optimizer.step(task.objective, task.batch)
        assert optimizer.report.accepted
    assert torch.equal(unused, torch.ones(2, dtype=torch.float64))
    assert not torch.equal(values(task.model), before)


def test_a_block_that_the_outputs_do_not_use_is_an_error_that_names_it() -> None:
    task = Task()
    unused = {"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))], "name": "idle"}
    optimizer = BlockHF.martens(
        [*blocks.single(task.model), {**unused, "params": [("idle", unused["params"][0])]}]
    )
    before = snapshot(task.model, optimizer)
    with pytest.raises(ValueError, match="The outputs do not depend on block 'idle', so it has no curvature"):
        optimizer.step(task.objective, task.batch)
    assert equal(snapshot(task.model, optimizer), before)


def test_sparse_gradients_are_an_error_that_names_the_block() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    optimizer = BlockHF.martens(blocks.by_layer(model))

    def objective(tokens: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(tokens)
        return outputs, outputs.square().mean()

    with pytest.raises(
        ValueError, match=r"A gradient of block '0' is sparse\. Build the layer with sparse=False"
    ):
        optimizer.step(objective, torch.tensor([0, 1, 2]))


def test_blocks_may_differ_in_precision() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(3, 4), nn.Linear(4, 2).double()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.high(self.low(inputs.float()).double().tanh())

    task = Task()
    task.model = Mixed()
    optimizer = BlockHF.martens(blocks.by_layer(task.model))
    before = copy.deepcopy(task.model.state_dict())
    for _ in range(3):
        loss = optimizer.step(task.objective, task.batch)
        assert optimizer.report.loss_after < loss
    assert all(
        value.dtype == before[name].dtype and not torch.equal(value, before[name])
        for name, value in task.model.state_dict().items()
    )


# --- saving, loading, copying -------------------------------------------------------------------------


def through_memory(state: dict[str, Any]) -> dict[str, Any]:
    return state


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def told(optimizer: BlockHF) -> dict[str, Any]:
    """The report without its timings."""
    assert optimizer.report is not None
    report = optimizer.report.to_dict()
    return {key: value for key, value in report.items() if key not in ("phases", "seconds")}


def assert_in_step(pairs: Sequence[tuple[Task, BlockHF]], num_steps: int = 3) -> None:
    """Several optimizers of equal models do the same from here on, to the last bit."""
    for _ in range(num_steps):
        for task, optimizer in pairs:
            optimizer.step(task.objective, task.batch)
        (task, optimizer), *others = pairs
        for other_task, other in others:
            assert torch.equal(values(other_task.model), values(task.model))
            assert told(other) == told(optimizer)
            assert equal(other.state_dict(), optimizer.state_dict())


STYLES: dict[str, Callable[[nn.Module], BlockHF]] = {
    "default": lambda model: BlockHF.martens(blocks.by_layer(model), curvature_batch_size=9),
    "adaptive": lambda model: BlockHF.martens(
        blocks.by_layer(model), damping=LevenbergMarquardt(initial=3.0), max_cg_steps=4
    ),
    "paper": lambda model: BlockHF.paper(blocks.by_layer(model), max_cg_steps=5, slow_start=(4, 2)),
}
all_styles = pytest.mark.parametrize("make", STYLES.values(), ids=STYLES.keys())


@all_styles
@pytest.mark.parametrize("way", [through_memory, through_a_file])
def test_a_resumed_run_goes_on_to_the_last_bit(way: Any, make: Callable[[nn.Module], BlockHF]) -> None:
    task = Task()
    optimizer = make(task.model)
    for _ in range(3):
        optimizer.step(task.objective, task.batch)
    resumed = Task(seed=1)
    fresh = make(resumed.model)
    resumed.batch = task.batch
    checkpoint = way({"model": task.model.state_dict(), "optimizer": optimizer.state_dict()})
    resumed.model.load_state_dict(checkpoint["model"])
    fresh.load_state_dict(checkpoint["optimizer"])
    assert_in_step([(task, optimizer), (resumed, fresh)])


def test_damping_in_mid_course_is_saved() -> None:
    task = Task()
    optimizer = STYLES["adaptive"](task.model)
    optimizer.step(task.objective, task.batch)
    (damping,) = {group["damping"] for group in optimizer.param_groups}
    assert damping != 3.0, "the test needs a damping that has moved"
    fresh = STYLES["adaptive"](Task().model)
    fresh.load_state_dict(through_a_file(optimizer.state_dict()))
    assert {group["damping"] for group in fresh.param_groups} == {damping}


def test_an_optimizer_returns_to_where_it_was_saved() -> None:
    task = Task()
    optimizer = STYLES["adaptive"](task.model)
    optimizer.step(task.objective, task.batch)
    saved = snapshot(task.model, optimizer)
    ends = []
    for _ in range(2):
        for _ in range(2):
            optimizer.step(task.objective, task.batch)
        ends.append(snapshot(task.model, optimizer))
        task.model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    assert equal(ends[0], ends[1])


@all_styles
def test_copies_of_model_and_optimizer_go_on_alike_and_apart(make: Callable[[nn.Module], BlockHF]) -> None:
    task = Task()
    optimizer = make(task.model)
    for _ in range(3):
        optimizer.step(task.objective, task.batch)
    copied = copy.deepcopy((task, optimizer))
    pickled = pickle.loads(pickle.dumps((task, optimizer)))
    before = snapshot(task.model, optimizer)
    assert_in_step([copied, pickled])
    assert equal(snapshot(task.model, optimizer), before)
    assert_in_step([(task, optimizer)])
    assert equal(snapshot(task.model, optimizer), snapshot(copied[0].model, copied[1]))


COPIED = ("curvature", "damping", "search", "solver", "preconditioner", "curvature_batch_size")
COPIED += ("micro_batch_size", "reduction", "measure_memory")


def test_copies_keep_policies_settings_and_the_report() -> None:
    task = Task()
    optimizer = BlockHF.martens(
        blocks.single(task.model),
        curvature=Hessian(),
        damping=Constant(2.0),
        search=Backtracking(shrink=0.3),
        curvature_batch_size=7,
        micro_batch_size=4,
        reduction="sum",
        measure_memory=False,
    )
    optimizer.step(task.objective, task.batch)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for name in (*COPIED, "report"):
            assert getattr(other, name) == getattr(optimizer, name), name


@dataclass
class RememberedDiagonal:
    """A preconditioner with a memory: the running mean of the diagonals it has seen."""

    means: list[Tensor] = field(default_factory=list)

    def prepare(self, problem: Problem, matrix: BlockMatrix, dampings: Sequence[float]) -> list[Dense]:
        seen = []
        for index, block in enumerate(problem.blocks):
            columns = torch.eye(block.size, dtype=torch.float64)
            seen.append(torch.stack([matrix.product(index, index, e) @ e for e in columns]))
        self.means = [(a + b) / 2 for a, b in zip(self.means, seen, strict=True)] if self.means else seen
        return [Dense(torch.diag(1 / (mean + 0.1))) for mean in self.means]

    def state_dict(self) -> dict[str, Any]:
        return {"means": [mean.clone() for mean in self.means]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means = [mean.clone() for mean in state["means"]]


def test_the_memory_of_a_policy_is_saved_and_restored() -> None:
    def make(task: Task) -> BlockHF:
        return BlockHF.martens(
            blocks.by_layer(task.model), max_cg_steps=2, preconditioner=RememberedDiagonal(), damping=0.05
        )

    task, resumed, forgetful = Task(), Task(seed=1), Task(seed=1)
    optimizer = make(task)
    for _ in range(3):
        optimizer.step(task.objective, task.batch)
    state = through_a_file(optimizer.state_dict())
    pairs = []
    for other in (resumed, forgetful):
        other.batch = task.batch
        other.model.load_state_dict(task.model.state_dict())
        pairs.append((other, make(other)))
    pairs[0][1].load_state_dict(state)
    pairs[1][1].load_state_dict({**state, "policies": {}})
    pairs[1][1].step(forgetful.objective, forgetful.batch)
    assert_in_step([(task, optimizer), pairs[0]], num_steps=1)
    assert not torch.equal(values(forgetful.model), values(task.model)), "the memory should matter"
    assert_in_step([(task, optimizer), pairs[0]])


def test_policies_without_memory_leave_nothing_in_the_state() -> None:
    assert BlockHF.martens(blocks.single(mlp())).state_dict()["policies"] == {}


# --- manners of torch.optim ---------------------------------------------------------------------------


def test_step_returns_the_detached_loss_at_the_starting_point() -> None:
    task = Task()
    expected = dense_loss(task, task.batch)
    optimizer = BlockHF.martens(blocks.single(task.model))
    loss = optimizer.step(task.objective, task.batch)
    assert torch.equal(loss, expected)
    assert loss.shape == ()
    assert not loss.requires_grad
    assert optimizer.report.loss == float(loss)
    assert optimizer.report.loss_after == pytest.approx(float(dense_loss(task, task.batch)), rel=1e-14)


def test_step_neither_reads_nor_writes_grad() -> None:
    task, twin = Task(), Task()
    grads = [torch.full_like(param, torch.nan) for param in task.model.parameters()]
    for param, grad in zip(task.model.parameters(), grads, strict=True):
        param.grad = grad
    BlockHF.martens(blocks.single(task.model)).step(task.objective, task.batch)
    BlockHF.martens(blocks.single(twin.model)).step(twin.objective, twin.batch)
    assert torch.equal(values(task.model), values(twin.model))
    assert all(p.grad is grad for p, grad in zip(task.model.parameters(), grads, strict=True))
    assert all(grad.isnan().all() for grad in grads)
    assert all(param.grad is None for param in twin.model.parameters())


def test_zero_grad_clears_what_direction_wrote() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.by_layer(task.model))
    optimizer.direction(task.objective, task.batch)
    assert all(param.grad is not None for param in task.model.parameters())
    optimizer.zero_grad()
    assert all(param.grad is None for param in task.model.parameters())


@pytest.mark.parametrize("search", [Backtracking(), FixedStep(evaluates=True)], ids=str)
def test_parameters_stay_the_same_tensors_in_the_same_storage(search: Any) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 1))
    model = model.to(memory_format=torch.channels_last)
    inputs = torch.randn(4, 2, 3, 3)

    def objective(batch: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(batch)
        return outputs, (outputs - 1).square().mean()

    def places() -> list[tuple[int, int, tuple[int, ...]]]:
        return [(id(p), p.data_ptr(), p.stride()) for p in model.parameters()]

    before, start = places(), values(model)
    optimizer = BlockHF.martens(blocks.by_layer(model), search=search)
    for _ in range(2):
        optimizer.step(objective, inputs)
        assert optimizer.report.accepted
    assert places() == before
    assert not torch.equal(values(model), start)
    assert all(param.is_leaf and param.requires_grad for param in model.parameters())


def test_hooks_run_around_the_step_and_see_the_report() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.by_layer(task.model))
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append(opt.report))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(opt.report))
    losses = [float(optimizer.step(task.objective, task.batch)) for _ in range(2)]
    assert [report and report.loss for report in seen] == [None, losses[0], losses[0], losses[1]]
    assert [report and report.step for report in seen] == [None, 1, 1, 2]


@pytest.mark.parametrize("method", ["step", "direction"])
@pytest.mark.parametrize("curvature_batch_size", [None, 7])
def test_a_step_without_grad_mode_is_a_step(curvature_batch_size: int | None, method: str) -> None:
    task, twin = Task(), Task()
    optimizer, other = (
        BlockHF.martens(blocks.by_layer(each.model), curvature_batch_size=curvature_batch_size)
        for each in (task, twin)
    )
    for _ in range(2):
        getattr(other, method)(twin.objective, twin.batch)
        with torch.no_grad():
            getattr(optimizer, method)(task.objective, task.batch)
            assert not torch.is_grad_enabled()
        assert torch.equal(values(task.model), values(twin.model))


def test_state_is_shaped_like_the_parameters() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.single(task.model))
    optimizer.step(task.objective, task.batch)
    for param in task.model.parameters():
        assert optimizer.state[param]["direction"].shape == param.shape
        assert optimizer.state[param]["step"] == 1


def test_without_a_warm_start_no_solution_is_kept() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.single(task.model), warm_start=0.0)
    optimizer.step(task.objective, task.batch)
    assert all(set(state) == {"step"} for state in optimizer.state.values())


# --- batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch_size", [None, 5])
@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (lambda x, y: {"image": x, "label": y}, lambda batch: (batch["image"], batch["label"])),
        (lambda x, y: [x, {"label": y, "scale": 1.0}], lambda batch: (batch[0], batch[1]["label"])),
        (lambda x, y: (x, [y, None]), lambda batch: (batch[0], batch[1][0])),
    ],
    ids=["dict", "list of dict", "tuple of list"],
)
def test_a_batch_may_be_any_nesting(pack: Any, unpack: Any, micro_batch_size: int | None) -> None:
    task, twin = Task("cross_entropy"), Task("cross_entropy")
    options = {"curvature_batch_size": 7, "micro_batch_size": micro_batch_size}
    optimizer, other = (
        BlockHF.martens(blocks.by_layer(task.model), **options),
        BlockHF.martens(blocks.by_layer(twin.model), **options),
    )
    for _ in range(2):
        optimizer.step(lambda batch: task.objective(unpack(batch)), pack(*task.batch))
        other.step(twin.objective, twin.batch)
    assert torch.equal(values(task.model), values(twin.model))


def test_a_curvature_batch_without_a_batch_is_an_error() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.single(task.model))
    with pytest.raises(ValueError, match="A curvature batch was given without a gradient batch"):
        optimizer.step(lambda: task.objective(task.batch), curvature=task.batch)


# --- policies of one's own ----------------------------------------------------------------------------


def test_with_the_hessian_the_objective_may_return_the_loss_alone() -> None:
    task = Task("cross_entropy", model=lambda: nn.Linear(3, 2))
    optimizer = BlockHF.martens(
        blocks.single(task.model),
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


def test_with_gauss_newton_the_loss_alone_is_an_error() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.single(task.model))
    with pytest.raises(ValueError, match="nothing to take J of"):
        optimizer.step(lambda batch: task.objective(batch)[1], task.batch)


class Identity:
    """A curvature of one's own."""

    def at(self, evaluation: Evaluation, blocks: Sequence[Block]) -> BlockMatrix:
        return self

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        return vector


def test_a_curvature_of_ones_own_will_do() -> None:
    """With the identity for curvature, the method is gradient descent."""
    task = Task()
    before, gradient = values(task.model), dense_gradient(task, task.batch)
    BlockHF.martens(blocks.by_layer(task.model), curvature=Identity(), lr=0.5, **FIXED).step(
        task.objective, task.batch
    )
    torch.testing.assert_close(values(task.model), before - 0.5 * gradient / 1.01, rtol=1e-12, atol=1e-14)


class Countdown:
    """A damping rule of one's own."""

    initial, needs_ratio = 8.0, False

    def update(self, damping: float, outcome: Outcome) -> float:
        assert outcome.accepted
        return damping / 2


def test_a_damping_rule_of_ones_own_will_do() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.by_layer(task.model), damping=Countdown(), search=FixedStep())
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


def test_a_search_of_ones_own_will_do() -> None:
    task = Task()
    before, gradient = values(task.model), dense_gradient(task, task.batch)
    optimizer = BlockHF.martens(blocks.by_layer(task.model), search=Cautious())
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


def test_a_solver_of_ones_own_will_do() -> None:
    """One that couples the blocks makes the step of a single block."""
    task, twin = Task(), Task()
    options = {"cg_rtol": 1e-13, "cg_progress": 0.0, "max_cg_steps": 400, **FIXED}
    BlockHF.martens(blocks.by_layer(task.model), solver=Coupled(), **FIXED).step(task.objective, task.batch)
    BlockHF.martens(blocks.single(twin.model), **options).step(twin.objective, twin.batch)
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


def test_a_preconditioner_of_ones_own_will_do() -> None:
    """With the exact inverse, one iteration is enough."""
    task, twin = Task(), Task()
    options = {"cg_rtol": 1e-9, "cg_progress": 0.0, "max_cg_steps": 400, **FIXED}
    optimizer = BlockHF.martens(blocks.by_layer(task.model), preconditioner=Exact(), **options)
    optimizer.step(task.objective, task.batch)
    BlockHF.martens(blocks.by_layer(twin.model), **options).step(twin.objective, twin.batch)
    assert [block.num_steps for block in optimizer.report.blocks] == [1, 1, 1]
    torch.testing.assert_close(values(task.model), values(twin.model), rtol=1e-6, atol=1e-7)
