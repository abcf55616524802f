"""The extensions in ``examples/extend``: trained, resumed, copied, shared and on a mesh, as any policy."""

from __future__ import annotations

import ast
import copy
import doctest
import importlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import blockhf
import ranks
from blockhf import Block, BlockHF, ConjugateGradient, DoubleBackward, Traced, blocks
from extension_tasks import (
    EXTENSIONS,
    FOLDER,
    NUM_STEPS,
    Mixed,
    Nystrom,
    RecycledDescent,
    optimizer_for,
    task,
    trained,
)
from optimizer_tasks import Task, equal, through_a_file, values

FILES = sorted(FOLDER.glob("*.py"))
every_extension = pytest.mark.parametrize("name", EXTENSIONS)
# Where an extension keeps something, and what.
STATES = {
    "search": ("shared", {"length"}),
    "damping": ("blocks", {"average"}),
    "preconditioner": ("blocks", {"vectors", "values"}),
    "solver": ("blocks", {"last"}),
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_imports_public_names_alone(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not any(name.name.startswith("blockhf") for name in node.names)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("blockhf"):
            assert node.module == "blockhf"
            assert {name.name for name in node.names} <= set(blockhf.__all__)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_examples_in_a_file_hold(file: Path) -> None:
    found = doctest.testmod(importlib.import_module(file.stem))
    assert found.attempted > 0
    assert found.failed == 0


@cache
def alone(name: str) -> dict[str, Any]:
    return trained(EXTENSIONS[name]())


@every_extension
def test_it_trains(name: str) -> None:
    losses = alone(name)["losses"]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(("name", "place", "keys"), [(name, *kept) for name, kept in STATES.items()])
def test_what_it_learns_is_in_the_optimizers_state(name: str, place: str, keys: set[str]) -> None:
    state = alone(name)["policies"][name][place]
    if place == "shared":
        assert set(state) == keys
    else:
        assert {block: set(own) for block, own in state.items()} == dict.fromkeys(("0", "2", "4"), keys)


@every_extension
def test_a_resumed_run_goes_on_to_the_last_bit(name: str) -> None:
    own, resumed = task(), task()
    optimizer = optimizer_for(own, EXTENSIONS[name]())
    for _ in range(3):
        optimizer.step(own.objective, own.batch)
    saved = through_a_file({"model": own.model.state_dict(), "optimizer": optimizer.state_dict()})
    other = optimizer_for(resumed, EXTENSIONS[name]())
    resumed.model.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    for _ in range(2):
        optimizer.step(own.objective, own.batch)
        other.step(resumed.objective, resumed.batch)
        assert torch.equal(values(own.model), values(resumed.model))
        assert equal(optimizer.state_dict(), other.state_dict())
    assert torch.equal(values(own.model), alone(name)["parameters"])


@pytest.mark.parametrize("name", STATES)
def test_without_its_state_a_run_goes_elsewhere(name: str) -> None:
    """Else the test above could not tell whether the state is saved."""
    own = task()
    optimizer = optimizer_for(own, EXTENSIONS[name]())
    for step in range(NUM_STEPS):
        if step == 1:
            optimizer.policy_state[name] = blockhf.PolicyState()
        optimizer.step(own.objective, own.batch)
    assert not torch.equal(values(own.model), alone(name)["parameters"])


@every_extension
def test_a_copy_goes_on_alike_and_apart(name: str) -> None:
    own = task()
    optimizer = optimizer_for(own, EXTENSIONS[name]())
    for _ in range(3):
        optimizer.step(own.objective, own.batch)
    before = copy.deepcopy(optimizer.state_dict())
    twin, other = copy.deepcopy((own, optimizer))
    for _ in range(2):
        other.step(twin.objective, twin.batch)
    assert equal(optimizer.state_dict(), before)
    assert torch.equal(values(twin.model), alone(name)["parameters"])


@every_extension
def test_one_object_in_two_optimizers_does_not_mix_them(name: str) -> None:
    options = EXTENSIONS[name]()
    one, other = task(), Task("cross_entropy", num_samples=24, seed=1)
    pairs = [(each, optimizer_for(each, options)) for each in (one, other)]
    for _ in range(NUM_STEPS):
        for each, optimizer in pairs:
            optimizer.step(each.objective, each.batch)
    assert torch.equal(values(one.model), alone(name)["parameters"])
    assert not torch.equal(values(other.model), values(one.model))


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["2 x 1", "1 x 2"])
def test_a_mesh_does_what_one_process_does(shape: tuple[int, int], tmp_path: Path) -> None:
    found = ranks.run(2, "extension_tasks:on_mesh", tmp_path, shape)
    for name in EXTENSIONS:
        expected = alone(name)
        for own in (rank[name] for rank in found):
            assert own["losses"] == pytest.approx(expected["losses"], rel=1e-9), name
            assert own["dampings"] == pytest.approx(expected["dampings"], rel=1e-9), name
            torch.testing.assert_close(own["parameters"], expected["parameters"], rtol=1e-7, atol=1e-9)
            assert torch.equal(own["parameters"], found[0][name]["parameters"]), name
            if name in STATES:
                assert_close(own["policies"][name], expected["policies"][name])
    kept = [rank["solver"]["kept"] for rank in found]
    if shape == (2, 1):  # each keeps the state of its own blocks
        assert sorted(kept[0] + kept[1]) == ["0", "2", "4"]
    else:
        assert kept == [["0", "2", "4"]] * 2


def assert_close(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key])
    elif isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    else:
        assert one == pytest.approx(other, rel=1e-6)


# --- that they do what they say -----------------------------------------------------------------------


def test_mixed_curvature_is_the_sum_of_both_in_every_way_to_products() -> None:
    own = task()
    matrices = []
    for curvature, products in (
        (blockhf.GaussNewton(), DoubleBackward()),
        (blockhf.EmpiricalFisher(), DoubleBackward()),
        (Mixed(0.5), DoubleBackward()),
        (Mixed(0.5), Traced()),
    ):
        groups = [Block(g["name"], tuple(p for _, p in g["params"])) for g in blocks.by_layer(own.model)]
        samples = blockhf.Samples(own.objective, own.batch, groups)
        operator = products.linearize(curvature, samples, [1, 1, 1], blockhf.PolicyState())
        eye = torch.eye(groups[0].size, dtype=torch.float64)
        matrices.append((operator.products(0, 0, eye), operator.products(2, 0, eye)))
    newton, fisher, mixed, traced = matrices
    for one, other, double, recorded in zip(newton, fisher, mixed, traced, strict=True):
        torch.testing.assert_close(double, one + 0.5 * other, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(recorded, double, rtol=1e-10, atol=1e-12)


def test_nystrom_of_full_rank_needs_one_iteration() -> None:
    own = task()
    options = {"cg_rtol": 1e-6, "max_cg_steps": 50, "damping": 0.1}
    optimizer = optimizer_for(own, {"preconditioner": Nystrom(rank=100), **options})
    optimizer.step(own.objective, own.batch)
    assert optimizer.report is not None
    assert [block.num_steps for block in optimizer.report.blocks] == [1, 1, 1]
    for block in optimizer.report.blocks:
        assert block.num_products == block.size + 1, "those of the sketch are counted"


def test_recycled_descent_without_a_past_is_the_method_of_conjugate_gradients() -> None:
    ends = []
    for solver in (RecycledDescent(), ConjugateGradient()):
        own = task()
        optimizer_for(own, {"solver": solver, "cg_progress": 0.0}).step(own.objective, own.batch)
        ends.append(values(own.model))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)


def test_a_default_optimizer_takes_them_all_together() -> None:
    own = task()
    options: dict[str, Any] = {}
    for name in ("curvature, traced", "search", "damping", "preconditioner", "solver"):
        options |= EXTENSIONS[name]()
    optimizer = BlockHF(blocks.by_layer(own.model), **options)
    losses = [float(optimizer.step(own.objective, own.batch)) for _ in range(NUM_STEPS)]
    assert losses[-1] < 0.9 * losses[0]
