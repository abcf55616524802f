"""Saving, loading and copying: what goes on to the last bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from blockhf import (
    Backtracking,
    BlockHF,
    Constant,
    Hessian,
    LevenbergMarquardt,
    blocks,
)
from blockhf.objective import Problem
from blockhf.operators import BlockMatrix, Dense
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
    """The report without its timings."""
    assert optimizer.report is not None
    report = optimizer.report.to_dict()
    return {key: value for key, value in report.items() if key not in ("phases", "seconds")}


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


def same(a: Any, b: Any) -> bool:
    """Whether two policies or settings are equal, those without an equality of their own by all they hold."""
    if type(a).__eq__ is not object.__eq__:
        return equal(a, b)
    return type(a) is type(b) and vars(a).keys() == vars(b).keys() and all(map(same, *map(values_of, (a, b))))


def values_of(policy: Any) -> list[Any]:
    return [vars(policy)[name] for name in sorted(vars(policy))]


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
            assert same(getattr(other, name), getattr(optimizer, name)), name


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


def test_the_memory_of_a_policy_is_saved_and_restored(factory: Factory) -> None:
    def make(task: Task) -> BlockHF:
        return factory(
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


@pytest.mark.parametrize("factory", [BlockHF.paper, BlockHF.martens], ids=["paper", "martens"])
def test_policies_without_memory_leave_nothing_in_the_state(factory: Factory) -> None:
    assert factory(blocks.single(mlp())).state_dict()["policies"] == {}
