"""Policies are frozen settings, the same in every process; what they learn is kept elsewhere."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributions import Categorical

import blockhf
from blockhf import BlockHF, Cholesky, ConjugateGradient, MonteCarloFisher, NoiseScale, Subspace, blocks
from blockhf.policy import Policy, PolicyState
from optimizer_tasks import FACTORIES, Task, equal, through_a_file, values

for _module in pkgutil.walk_packages(blockhf.__path__, "blockhf."):
    if not _module.name.endswith("__main__"):
        importlib.import_module(_module.name)


def kinds(base: type[Policy] = Policy) -> Iterator[type[Policy]]:
    """All policies of the library that one can make."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith("blockhf."):
            if not inspect.isabstract(kind):
                yield kind
            yield from kinds(kind)


ARGUMENTS: dict[type[Policy], dict[str, Any]] = {MonteCarloFisher: {"distribution": Categorical}}
KINDS = sorted(set(kinds()), key=lambda kind: kind.__name__)


def make(kind: type[Policy]) -> Any:
    return kind(**ARGUMENTS.get(kind, {}))


each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def test_the_kinds_are_found() -> None:
    names = {kind.__name__ for kind in KINDS}
    assert {"GaussNewton", "Auto", "Cholesky", "Kronecker", "Subspace", "NoiseScale", "Constant"} <= names
    assert len(KINDS) >= 20


@each_kind
def test_a_policy_is_frozen_and_compares_by_its_settings(kind: type[Policy]) -> None:
    policy = make(kind)
    assert dataclasses.is_dataclass(policy)
    assert policy == make(kind)
    assert hash(policy) == hash(make(kind))
    assert all(policy != make(other) for other in KINDS if other is not kind)
    for field in dataclasses.fields(policy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, field.name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.learned = 1
    assert {field.name for field in dataclasses.fields(policy)} == set(vars(policy))


@each_kind
def test_a_policy_survives_pickling(kind: type[Policy]) -> None:
    policy = make(kind)
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy
    assert again.describe() == policy.describe()


@each_kind
def test_a_description_names_the_kind_and_every_setting_and_no_address(kind: type[Policy]) -> None:
    text = make(kind).describe()
    assert text.startswith(kind.__name__ + "(")
    assert all(f"{field.name}=" in text for field in dataclasses.fields(kind))  # type: ignore[arg-type]
    assert "0x" not in text
    assert " at " not in text


def test_descriptions_tell_settings_apart_also_those_of_a_policy_within() -> None:
    assert Subspace().describe() != Subspace(momentum=False).describe()
    inside = Cholesky(other=ConjugateGradient(check_every=3)).describe()
    assert inside == "Cholesky(other=ConjugateGradient(check_every=3), worth=10, small=1000, rescales=False)"


def test_a_description_is_the_same_in_every_process() -> None:
    script = "import test_policy as t; print('\\n'.join(t.make(kind).describe() for kind in t.KINDS))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "123", "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [make(kind).describe() for kind in KINDS]


# --- state -------------------------------------------------------------------------------------------


def filled() -> PolicyState:
    state = PolicyState({"damping": 0.5, "sizes": [1, 2], "name": "x"}, {"a": {"last": torch.arange(3.0)}})
    state.of("b")["rows"] = [torch.ones(2), {"deep": torch.zeros(1)}]
    state.cache["trace"] = object()
    return state


def test_a_state_survives_a_file_all_but_its_cache() -> None:
    state = filled()
    again = PolicyState.from_dict(through_a_file(state.to_dict()))
    assert equal(again.to_dict(), state.to_dict())
    assert equal(again.shared, state.shared)
    assert equal(again.blocks, state.blocks)
    assert again.cache == {}


def test_what_is_saved_and_what_is_loaded_are_copies() -> None:
    state = filled()
    saved = state.to_dict()
    loaded = PolicyState.from_dict(saved)
    state.blocks["a"]["last"].zero_()
    state.blocks["b"]["rows"][0].zero_()
    state.shared["sizes"].append(3)
    assert saved["blocks"]["a"]["last"].tolist() == [0, 1, 2]
    assert saved["blocks"]["b"]["rows"][0].tolist() == [1, 1]
    assert saved["shared"]["sizes"] == [1, 2]
    saved["blocks"]["a"]["last"].fill_(9)
    assert loaded.blocks["a"]["last"].tolist() == [0, 1, 2]


def test_a_block_s_state_is_empty_at_first_and_its_own() -> None:
    state = PolicyState()
    assert state.of("a") == {}
    state.of("a")["x"] = 1
    assert (state.of("a"), state.of("b")) == ({"x": 1}, {})


POLICIES = ("curvature", "products", "damping", "search", "solver", "preconditioner", "sampling")


@pytest.mark.parametrize("factory", FACTORIES)
def test_one_policy_object_given_to_two_optimizers_does_not_mix_their_states(factory: str) -> None:
    """Two runs that share all policies, in turns, against each of them alone."""

    def tasks() -> list[Task]:
        return [Task("cross_entropy", num_samples=200, seed=seed) for seed in (0, 1)]

    together, apart = tasks(), tasks()
    # What is passed holds for batches that come again too, so it is passed to all.
    options = {"sampling": NoiseScale()} if factory == "default" else {}
    first = FACTORIES[factory](blocks.by_layer(together[0].model), **options)
    shared = {name: vars(first)[name] for name in POLICIES}
    before = {name: policy.describe() for name, policy in shared.items()}
    optimizers = [first, BlockHF(_groups(first, together[1]), **shared)]
    assert all(vars(optimizers[1])[name] is policy for name, policy in shared.items())
    alone = [FACTORIES[factory](blocks.by_layer(task.model), **options) for task in apart]
    for _ in range(3):
        for optimizer, task in zip(optimizers, together, strict=True):
            optimizer.step(task.objective, task.batch)
    for optimizer, task in zip(alone, apart, strict=True):
        for _ in range(3):
            optimizer.step(task.objective, task.batch)
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(values(one.model), values(other.model))
    for optimizer, other_optimizer in zip(optimizers, alone, strict=True):
        assert equal(optimizer.state_dict()["policies"], other_optimizer.state_dict()["policies"])
    assert {name: policy.describe() for name, policy in shared.items()} == before


def _groups(optimizer: BlockHF, task: Task) -> list[dict[str, Any]]:
    """The blocks of a task, with the options of another optimizer's groups."""
    options = {name: optimizer.defaults[name] for name in optimizer.defaults if name != "damping"}
    return [{**options, **group} for group in blocks.by_layer(task.model)]
