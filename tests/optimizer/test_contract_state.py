"""Saving, loading and copying: what goes on to the last bit."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from blockhf import (
    Backtracking,
    BlockHF,
    BlockOperator,
    Constant,
    Curvature,
    Dense,
    Hessian,
    LevenbergMarquardt,
    PolicyState,
    Preconditioner,
    Samples,
    blocks,
)
from blockhf.options import PLAN, POLICIES
from optimizer_tasks import (
    FACTORIES,
    Factory,
    Task,
    equal,
    mlp,
    snapshot,
    through_a_file,
    values,
)


def told(optimizer: BlockHF) -> dict[str, Any]:
    """The report without its timings, and without the checks that an optimizer makes once."""
    assert optimizer.report is not None
    report = optimizer.report.to_dict()
    report["work"] = {key: value for key, value in report["work"].items() if key != "checks_flops"}
    return {key: value for key, value in report.items() if key not in ("phases", "seconds", "hints")}


def assert_in_step(pairs: Sequence[tuple[Task, BlockHF]], num_steps: int = 2) -> None:
    """Several optimizers of equal models do the same from here on, to the last bit."""
    for _ in range(num_steps):
        for task, optimizer in pairs:
            optimizer.step(task.objective, task.batch)
        (task, optimizer), *others = pairs
        for other_task, other in others:
            assert torch.equal(values(other_task.model), values(task.model))
            assert told(other) == told(optimizer)
            assert equal(other.state_dict(), optimizer.state_dict())


EMPTY: dict[str, Any] = {"shared": {}, "blocks": {}}
ADAPTIVE: dict[str, Any] = {
    "damping": LevenbergMarquardt(initial=3.0),
    "max_cg_steps": 4,
    "search": Backtracking(),
}
# Samples are held out by default where there are 128 of them.
STYLES: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({"curvature_batch_size": 9, "max_cg_steps": 3}, 16),
    "adaptive": (ADAPTIVE, 16),
    "slow start": ({"max_cg_steps": 3, "slow_start": (3, 1), "warm_start": 0.5}, 16),
    "many samples": ({"max_cg_steps": 2}, 160),
}
OF_FACTORY = {"default": STYLES, "paper": ("slow start", "many samples"), "martens": ("plain", "adaptive")}
all_styles = pytest.mark.parametrize(
    ("factory", "options", "num_samples"),
    [
        pytest.param(FACTORIES[name], *STYLES[style], id=f"{name}-{style}")
        for name, styles in OF_FACTORY.items()
        for style in styles
    ],
)


@all_styles
def test_a_resumed_run_goes_on_to_the_last_bit(
    factory: Factory, options: dict[str, Any], num_samples: int
) -> None:
    task = Task(num_samples=num_samples)
    optimizer = factory(blocks.by_layer(task.model), **options)
    for _ in range(2):
        optimizer.step(task.objective, task.batch)
    saved = {"model": task.model.state_dict(), "optimizer": optimizer.state_dict()}
    pairs = []
    for checkpoint in (saved, through_a_file(saved)):
        resumed = Task(seed=1)
        resumed.batch = task.batch
        fresh = factory(blocks.by_layer(resumed.model), **options)
        resumed.model.load_state_dict(checkpoint["model"])
        fresh.load_state_dict(checkpoint["optimizer"])
        pairs.append((resumed, fresh))
    assert_in_step([(task, optimizer), *pairs])


def test_damping_in_mid_course_is_saved(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.by_layer(task.model), **ADAPTIVE)
    optimizer.step(task.objective, task.batch)
    (damping,) = {group["damping"] for group in optimizer.param_groups}
    assert damping != 3.0, "the test needs a damping that has moved"
    fresh = factory(blocks.by_layer(Task().model), **ADAPTIVE)
    fresh.load_state_dict(through_a_file(optimizer.state_dict()))
    assert {group["damping"] for group in fresh.param_groups} == {damping}


def test_an_optimizer_returns_to_where_it_was_saved(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.by_layer(task.model), max_cg_steps=3)
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
def test_copies_of_model_and_optimizer_go_on_alike_and_apart(
    factory: Factory, options: dict[str, Any], num_samples: int
) -> None:
    task = Task(num_samples=num_samples)
    optimizer = factory(blocks.by_layer(task.model), **options)
    for _ in range(2):
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


def test_copies_keep_policies_settings_and_the_report(factory: Factory) -> None:
    task = Task()
    optimizer = factory(
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
            assert equal(getattr(other, name), getattr(optimizer, name)), name


@dataclass(frozen=True)
class RememberedDiagonal(Preconditioner):
    """A preconditioner with a memory: the running mean of the diagonals it has seen."""

    def prepare(
        self,
        samples: Samples,
        curvature: Curvature,
        operator: BlockOperator,
        dampings: Sequence[float],
        state: PolicyState,
    ) -> list[Dense]:
        inverses = []
        for index, block in enumerate(samples.blocks):
            eye = torch.eye(block.size, dtype=torch.float64)
            mean = torch.stack([operator.product(index, index, column) @ column for column in eye])
            if "mean" in (known := state.of(block.name)):
                mean = (known["mean"] + mean) / 2
            known["mean"] = mean
            inverses.append(Dense(torch.diag(1 / (mean + 0.1))))
        return inverses


def test_the_memory_of_a_policy_is_saved_and_restored(factory: Factory) -> None:
    def make(task: Task) -> BlockHF:
        return factory(
            blocks.by_layer(task.model), max_cg_steps=2, preconditioner=RememberedDiagonal(), damping=0.05
        )

    task, resumed, forgetful = Task(), Task(seed=1), Task(seed=1)
    optimizer = make(task)
    for _ in range(2):
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


def test_policies_without_memory_leave_nothing_in_the_state(factory: Factory) -> None:
    optimizer = factory(blocks.single(mlp()))
    assert optimizer.state_dict()["policies"] == dict.fromkeys((*POLICIES, PLAN), EMPTY)


def test_a_state_that_is_not_saved_is_forgotten() -> None:
    """Of two runs one after the other, the second knows nothing of the first."""
    task = Task()
    optimizer = BlockHF(blocks.by_layer(task.model), preconditioner=RememberedDiagonal())
    saved = optimizer.state_dict()
    optimizer.step(task.objective, task.batch)
    assert optimizer.state_dict()["policies"]["preconditioner"] != EMPTY
    optimizer.load_state_dict({**saved, "policies": {}})
    assert optimizer.state_dict()["policies"] == dict.fromkeys((*POLICIES, PLAN), EMPTY)


# What version 0.1 wrote: each policy in its own form, and only those that had something to say.
OLD: dict[str, dict[str, Any]] = {
    "sampling": {"size": 600},
    "search": {"last": {"0": torch.zeros(3)}, "damping": 0.1},
    "preconditioner": {"num_steps": 3, "factors": {}},
    "of no policy": {"shared": {}, "blocks": {}},
}


@pytest.mark.parametrize("name", OLD)
def test_a_state_in_the_form_of_version_0_1_is_refused_in_words(name: str) -> None:
    task = Task()
    optimizer = BlockHF(blocks.by_layer(task.model))
    optimizer.step(task.objective, task.batch)
    before = snapshot(task.model, optimizer)
    old = {**optimizer.state_dict(), "policies": {name: OLD[name]}}
    message = (
        f"The state of {name!r} was saved by blockhf 0.1, which kept it in another form. Start the run anew, "
        "or finish it with that version."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.load_state_dict(through_a_file(old))
    assert equal(snapshot(task.model, optimizer), before), "what is refused changes nothing"
