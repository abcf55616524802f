"""Which constructions are valid, and which are refused in which words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from blockhf import (
    Backtracking,
    BlockHF,
    Constant,
    FixedStep,
    GaussNewton,
    LevenbergMarquardt,
    blocks,
)
from optimizer_tasks import (
    FACTORIES,
    Factory,
    Task,
    mlp,
    values,
)

VALID: dict[str, Callable[[Factory, nn.Module], BlockHF]] = {
    "parameters": lambda make, model: make(model.parameters()),
    "named parameters": lambda make, model: make(model.named_parameters()),
    "single": lambda make, model: make(blocks.single(model)),
    "by module": lambda make, model: make(blocks.by_module(model)),
    "groups without names": lambda make, model: make(
        [{"params": layer.parameters()} for layer in (model[0], model[2], model[4])]
    ),
    "a tensor for a group": lambda make, model: make(
        [{"params": model[0].weight}, {"params": model[2].weight}]
    ),
    "options at their lower bounds": lambda make, model: make(
        blocks.single(model),
        lr=0.0,
        damping=0.0,
        max_cg_steps=1,
        cg_rtol=0.0,
        warm_start=0.0,
        slow_start=(0, 1),
        curvature_batch_size=1,
        micro_batch_size=1,
    ),
    "options at their upper bounds": lambda make, model: make(
        blocks.single(model), warm_start=1.0, cg_rtol=0.999
    ),
    "a tensor for lr": lambda make, model: make(blocks.single(model), lr=torch.tensor(0.5)),
    "a rule for damping": lambda make, model: make(blocks.single(model), damping=Constant(0.1)),
    "adaptive damping with an evaluated fixed step": lambda make, model: make(
        blocks.single(model), damping=LevenbergMarquardt(), search=FixedStep(evaluates=True)
    ),
    "a slow start": lambda make, model: make(
        blocks.by_layer(model), slow_start=(10, 2), curvature_batch_size=8
    ),
    "another search": lambda make, model: make(blocks.single(model), search=Backtracking()),
    "a share of the samples for curvature": lambda make, model: make(
        blocks.by_layer(model), curvature_batch_size=0.5
    ),
    "a population": lambda make, model: make(blocks.by_layer(model), population=16),
}


# Which parameters there are is not the factories' business; which options is.
ALIKE = ("named parameters", "by module", "groups without names", "a tensor for a group", "a tensor for lr")


@pytest.mark.parametrize(
    ("factory", "make"),
    [
        pytest.param(factory, make, id=f"{name}-{kind}")
        for name, factory in FACTORIES.items()
        for kind, make in VALID.items()
        if name == "default" or kind not in ALIKE
    ],
)
def test_valid_constructions_make_a_step(
    factory: Factory, make: Callable[[Factory, nn.Module], BlockHF]
) -> None:
    task = Task()
    optimizer = make(factory, task.model)
    assert optimizer.report is None
    optimizer.step(task.objective, task.batch)
    assert optimizer.report.accepted


def test_progress_is_an_option_of_every_factory(factory: Factory) -> None:
    optimizer = factory(mlp().parameters(), cg_progress=0.25)
    assert [group["cg_progress"] for group in optimizer.param_groups] == [0.25]


def test_groups_without_names_are_numbered(factory: Factory) -> None:
    model = mlp()
    optimizer = factory([{"params": [model[0].weight]}, {"params": [model[2].weight], "name": "middle"}])
    optimizer.add_param_group({"params": [model[4].weight]})
    assert [group["name"] for group in optimizer.param_groups] == ["block0", "middle", "block2"]


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


INVALID: dict[str, tuple[Callable[[Factory, Any], Any], type[Exception], str]] = {
    "no parameters": (lambda make, m: make([]), ValueError, "empty parameter list"),
    "a bare tensor": (lambda make, m: make(m[0].weight), TypeError, "should be an iterable"),
    "an empty group": (
        lambda make, m: make([{"params": [], "name": "head"}]),
        ValueError,
        "Block 'head' is empty. Give it parameters or leave it out.",
    ),
    "a set": (lambda make, m: make([{"params": set(m.parameters())}]), TypeError, "Give a list."),
    "no tensor": (
        lambda make, m: make([{"params": ["weight"], "name": "head"}]),
        ValueError,
        "Block 'head' holds number 0, a str and not a tensor.",
    ),
    "whole numbers": (
        lambda make, m: make([torch.zeros(3, dtype=torch.long)]),
        ValueError,
        "is of torch.int64; only real floating-point parameters",
    ),
    "complex numbers": (
        lambda make, m: make([torch.zeros(3, dtype=torch.complex64, requires_grad=True)]),
        ValueError,
        "is of torch.complex64; only real",
    ),
    "mixed precision in a block": (
        lambda make, m: make([m[0].weight, nn.Parameter(torch.zeros(2, dtype=torch.float16))]),
        ValueError,
        "mixes parameters of dtype torch.float16 and torch.float32. Give each dtype a block of its own.",
    ),
    "a result of a computation": (lambda make, m: make([m[0].weight * 2]), ValueError, "non-leaf"),
    "a frozen parameter": (
        lambda make, m: make([frozen(m[0]).weight, m[2].weight]),
        ValueError,
        "Parameter number 0 of block 'block0' has no gradient: it is frozen. Take it out of the group",
    ),
    "a frozen parameter with a name": (
        lambda make, m: make([{"params": list(frozen(m[0]).named_parameters()), "name": "head"}]),
        ValueError,
        "Parameter weight of block 'head' has no gradient: it is frozen.",
    ),
    "two blocks of one name": (
        lambda make, m: make([{"params": m[i].parameters(), "name": "layer"} for i in (0, 2)]),
        ValueError,
        "Two blocks have the name 'layer'. Rename one.",
    ),
    "a number that a name has taken": (
        lambda make, m: make(
            [{"params": m[0].parameters(), "name": "block1"}, {"params": m[2].parameters()}]
        ),
        ValueError,
        "Two blocks have the name 'block1'",
    ),
    "a parameter in two blocks": (
        lambda make, m: make(
            [{"params": m.parameters(), "name": "all"}, {"params": [m[0].bias], "name": "bias"}]
        ),
        ValueError,
        "Parameter number 0 is in two blocks, 'all' and 'bias'. Leave it in one of them.",
    ),
    "a parameter twice in a block": (
        lambda make, m: make([m[0].weight, m[0].weight]),
        ValueError,
        "Parameter number 1 is twice in block 'block0'. Name it once.",
    ),
    "an unknown reduction": (
        lambda make, m: make(m.parameters(), reduction="none"),
        ValueError,
        "reduction is 'none', but must be 'mean', 'sum', or a function from a batch",
    ),
    "no curvature samples": (
        lambda make, m: make(m.parameters(), curvature_batch_size=0),
        ValueError,
        "curvature_batch_size is 0, but must be a whole number of at least 1, a share between 0 and 1, or "
        "None.",
    ),
    "more than all curvature samples": (
        lambda make, m: make(m.parameters(), curvature_batch_size=1.2),
        ValueError,
        "curvature_batch_size is 1.2",
    ),
    "a share of a micro-batch": (
        lambda make, m: make(m.parameters(), micro_batch_size=0.5),
        ValueError,
        "micro_batch_size is 0.5",
    ),
    "negative micro-batches": (
        lambda make, m: make(m.parameters(), micro_batch_size=-4),
        ValueError,
        "micro_batch_size is -4, but must be a whole number of at least 1, or None.",
    ),
    "adaptive damping without the loss": (
        lambda make, m: make(m.parameters(), damping=LevenbergMarquardt(), search=FixedStep()),
        ValueError,
        "LevenbergMarquardt needs the loss after each step, which FixedStep does not evaluate. "
        "Use FixedStep(evaluates=True) or Backtracking(), or a constant damping.",
    ),
    "negative damping": (
        lambda make, m: make(m.parameters(), damping=-1),
        ValueError,
        "damping is -1.0, but must not be negative.",
    ),
    "a word for damping": (
        lambda make, m: make(m.parameters(), damping="high"),
        ValueError,
        "damping is 'high'",
    ),
    "a class for an object": (
        lambda make, m: make(m.parameters(), curvature=GaussNewton),
        ValueError,
        "curvature is the class GaussNewton. Pass an object: GaussNewton().",
    ),
    "an object of another kind": (
        lambda make, m: make(m.parameters(), search=GaussNewton()),
        ValueError,
        "search is GaussNewton(), which is no Search. Derive it from Search.",
    ),
    "an unknown option": (lambda make, m: make(m.parameters(), momentum=0.9), TypeError, "momentum"),
}


@pytest.mark.parametrize(("make", "error", "message"), INVALID.values(), ids=INVALID.keys())
def test_invalid_constructions_are_told(
    factory: Factory, make: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        make(factory, mlp())
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("make", "options", "rule"),
    [
        (BlockHF, {"search": FixedStep()}, "ByCoefficient"),
        (BlockHF.paper, {"damping": LevenbergMarquardt()}, "LevenbergMarquardt"),
        (BlockHF.martens, {"search": FixedStep()}, "LevenbergMarquardt"),
    ],
    ids=["default", "paper", "martens"],
)
def test_damping_and_search_of_a_factory_have_to_fit(make: Factory, options: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=f"{rule} needs the loss after each step, which FixedStep does not"):
        make(mlp().parameters(), **options)


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


def bad_options(*left_out: str) -> pytest.MarkDecorator:
    """All bad values for the default; for the other factories, which share its checks, one of each option."""
    one_of_each = {option: (option, value, bound) for option, value, bound in reversed(BAD_OPTIONS)}
    return pytest.mark.parametrize(
        ("factory", "option", "value", "bound"),
        [
            pytest.param(factory, option, value, bound, id=f"{name}-{option}-{value}")
            for name, factory in FACTORIES.items()
            for option, value, bound in (BAD_OPTIONS if name == "default" else one_of_each.values())
            if option not in left_out
        ],
    )


def complaint(block: str, option: str, value: Any, bound: str) -> str:
    return re.escape(f"{option} of block {block!r} is {value!r}, but must be {bound}.")


@bad_options("damping")
def test_a_bad_option_is_told_at_construction(factory: Factory, option: str, value: Any, bound: str) -> None:
    with pytest.raises(ValueError, match=complaint("all", option, value, bound)):
        factory(blocks.single(mlp()), **{option: value})


@bad_options()
def test_a_bad_option_of_a_group_is_told_at_construction(
    factory: Factory, option: str, value: Any, bound: str
) -> None:
    groups = blocks.by_layer(mlp())
    groups[1][option] = value
    with pytest.raises(ValueError, match=complaint("2", option, value, bound)):
        factory(groups)


@bad_options()
def test_a_bad_edit_of_a_group_is_told_at_the_next_step(
    factory: Factory, option: str, value: Any, bound: str
) -> None:
    task = Task()
    optimizer = factory(blocks.by_layer(task.model))
    optimizer.param_groups[1][option] = value
    before = values(task.model)
    with pytest.raises(ValueError, match=complaint("2", option, value, bound)):
        optimizer.step(task.objective, task.batch)
    assert torch.equal(values(task.model), before)


def test_a_refused_group_leaves_the_optimizer_as_it_was(factory: Factory) -> None:
    task = Task()
    optimizer = factory([{"params": task.model[0].parameters()}])
    taken, negative = {"params": [task.model[0].bias]}, {"params": [task.model[2].bias], "lr": -1.0}
    for bad, message in ((taken, "is in two blocks"), (negative, "lr of block 'block1' is -1.0")):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(bad)
    assert [group["name"] for group in optimizer.param_groups] == ["block0"]
    optimizer.step(task.objective, task.batch)
    assert [block.size for block in optimizer.report.blocks] == [16]
