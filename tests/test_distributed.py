"""A mesh of processes does what one process does."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import blockhf
import mesh_tasks
import ranks
from blockhf import blocks
from blockhf.distributed import (
    Ownership,
    assign,
    best_shape,
    estimated_costs,
    merged,
    share_out,
)
from mesh_tasks import METHODS, NUM_SAMPLES, flat, in_one_process, make

SHAPES = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1)]
OFTEN = ("paper", "martens", "default")
UNEVEN = ("paper", "martens", "no held-out samples", "few", "sum")
# Every method on one mesh of both dimensions, and a few on all; all on all is for a longer look.
CASES = [
    pytest.param(
        shape,
        uneven,
        name,
        marks=() if shape == (2, 2) or (not uneven and name in OFTEN) else pytest.mark.slow,
        id=f"{shape[0]}x{shape[1]}-{'uneven' if uneven else 'even'}-{name}",
    )
    for shape in SHAPES
    for uneven in (False, True)
    for name in (UNEVEN if uneven else METHODS)
    if not (uneven and shape == (1, 1))
]

Runs = Callable[[tuple[int, int], bool, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The results of the ranks of a mesh: all methods in one start of its processes."""
    found: dict[Any, list[dict[str, Any]]] = {}

    def get(shape: tuple[int, int], uneven: bool, name: str) -> list[dict[str, Any]]:
        often = name in OFTEN and not uneven and shape != (2, 2)
        if (shape, uneven, often) not in found:
            names = UNEVEN if uneven else OFTEN if often else list(METHODS)
            found[shape, uneven, often] = ranks.run(
                shape[0] * shape[1],
                "mesh_tasks:on_mesh",
                tmp_path_factory.mktemp("mesh"),
                shape,
                names,
                uneven,
            )
        return found[shape, uneven, often]

    return get


@pytest.mark.parametrize(("shape", "uneven", "name"), CASES)
def test_a_mesh_does_what_one_process_does(
    runs: Runs, shape: tuple[int, int], uneven: bool, name: str
) -> None:
    found = [rank[name] for rank in runs(shape, uneven, name)]
    expected = in_one_process(shape, name, uneven)
    keys = ["gradient", "directions", "parameters"]
    if uneven and name == "sum":  # without held-out samples, the curvature is that of others
        keys.remove("directions")
    for own in found:
        for key in ("loss", "losses", "dampings"):
            assert own[key] == pytest.approx(expected[key], rel=1e-6), key
        for key in keys:
            assert float((own[key] - expected[key]).norm()) < 1e-6 * float(expected[key].norm()), key
        assert torch.equal(own["parameters"], found[0]["parameters"])
        assert own["step"] == expected["step"]
        assert own["cg"] == expected["cg"]


@pytest.mark.slow
def test_compiled_products_work_on_a_mesh(tmp_path: Path) -> None:
    expected = in_one_process((2, 1), "default", False)["parameters"]
    for own in ranks.run(2, "mesh_tasks:compiled", tmp_path):
        assert float((own["compiled"]["parameters"] - expected).norm()) < 1e-6 * float(expected.norm())


def test_with_blocks_alone_nothing_is_sent_during_cg(runs: Runs) -> None:
    for own in runs((2, 1), False, "paper"):
        sent = {key: value for key, value in own["paper"]["work"].items() if key.endswith("_messages")}
        assert sent == {
            "numbers_messages": 1,  # how many samples each has, and how long each block took
            "sums_messages": 1,  # the gradient
            "samples_messages": 1,
            "directions_messages": 1,
        }
        work = own["paper"]["work"]
        num_params = sum(param.numel() for param in make()[0].parameters())
        assert work["sums_bytes"] == 8 * (num_params + 1)
        assert work["samples_bytes"] == 12 * (6 * 8 + 8)  # of 24 samples: inputs and class
        assert work["numbers_bytes"] < 100


def test_products_are_added_up_along_data(runs: Runs) -> None:
    for own in runs((1, 2), False, "paper"):
        work = own["paper"]["work"]
        # 5 iterations and the product for the start vector of each of 3 blocks; and which blocks are formed
        assert work["products_messages"] == 3 * 6 + 1
        assert "samples_messages" not in work


def test_each_rank_keeps_the_state_of_its_own_blocks(runs: Runs) -> None:
    first, second = (own["paper"]["kept"] for own in runs((2, 1), False, "paper"))
    assert sorted([*first, *second]) == ["0", "2", "4"]
    assert first
    assert second


def test_the_load_of_each_rank_is_told(runs: Runs) -> None:
    for own in runs((2, 1), False, "paper"):
        assert len(own["paper"]["loads"]) == 2
        assert all(load > 0 for load in own["paper"]["loads"])
    for own in runs((4, 1), False, "paper"):  # with three blocks
        assert sorted(load > 0 for load in own["paper"]["loads"]) == [False, True, True, True]


def test_blocks_take_their_state_along_when_they_move(tmp_path: Path) -> None:
    found = ranks.run(2, "mesh_tasks:on_the_move", tmp_path)
    for name in found[0]:
        expected = in_one_process((2, 1), name, False)
        for own in found:
            difference = own[name]["parameters"] - expected["parameters"]
            assert float(difference.norm()) < 1e-6 * float(expected["parameters"].norm()), name


def test_a_saved_state_loads_anywhere(tmp_path: Path) -> None:
    found = ranks.run(2, "mesh_tasks:states", tmp_path / "ranks", str(tmp_path / "saved"))
    assert sorted(found[0]["kept"] + found[1]["kept"]) == ["0", "2", "4"]
    assert sorted(found[0]["factored"] + found[1]["factored"]) == ["0", "2", "4"]

    dcp_to_torch_save(tmp_path / "saved", tmp_path / "saved.pt")
    loaded = torch.load(tmp_path / "saved.pt", weights_only=True)
    half = NUM_SAMPLES // 2
    for saved in (found[0]["saved"], found[1]["saved"], loaded):
        model, objective_for, batch = make()
        optimizer = mesh_tasks.default(blocks.by_layer(model), warm_start=0.5)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        held = optimizer.search.num_held_out(NUM_SAMPLES, NUM_SAMPLES) // 2
        order = [
            *range(12),
            *range(half, half + 12),
            *range(12, half - held),
            *range(half + 12, NUM_SAMPLES - held),
            *range(half - held, half),
            *range(NUM_SAMPLES - held, NUM_SAMPLES),
        ]
        arranged = tuple(tensor[order] for tensor in batch)
        for _ in range(2):
            optimizer.step(objective_for("mean"), arranged)
        difference = flat(list(model.parameters())) - found[0]["parameters"]
        assert float(difference.norm()) < 1e-6 * float(found[0]["parameters"].norm())


def test_blocks_are_frozen_and_curvature_is_given_as_in_one_process(tmp_path: Path) -> None:
    found = ranks.run(2, "mesh_tasks:frozen_and_given", tmp_path)
    model, objective_for, batch = make()
    optimizer = mesh_tasks.paper(blocks.by_layer(model))
    half = NUM_SAMPLES // 2
    order = [*range(12), *range(half, half + 12), *range(12, half), *range(half + 12, NUM_SAMPLES)]
    curvature = [*range(8), *range(half, half + 12)]
    arranged, given = (tuple(tensor[index] for tensor in batch) for index in (order, curvature))
    mesh_tasks.follow(optimizer, model, objective_for("mean"), arranged, given)
    expected = flat(list(model.parameters()))
    for own in found:
        assert float((own["parameters"] - expected).norm()) < 1e-6 * float(expected.norm())
        for index, state in optimizer.state_dict()["state"].items():
            assert own["state"][index]["step"] == state["step"]
            torch.testing.assert_close(
                own["state"][index]["direction"], state["direction"], rtol=1e-6, atol=1e-9
            )


def test_a_preconditioner_forgets_the_blocks_of_others() -> None:
    model, objective_for, batch = make()
    for name, kind in (("default", "factors"), ("signed", "averages"), ("nystrom", "sketches")):
        optimizer = METHODS[name](blocks.by_layer(model))
        optimizer.step(objective_for("mean"), batch)
        preconditioner: Any = optimizer.preconditioner
        preconditioner.forget({"0", "4"})
        assert {key.split("/")[0] for key in preconditioner.state_dict()[kind]} == {"2"}


def test_ranks_that_do_not_do_the_same_are_told_in_what(tmp_path: Path) -> None:
    found = ranks.run(2, "mesh_tasks:differences", tmp_path)
    assert found[0] == found[1]
    expected = {
        "damping": "damping of block '0' is 0.1 on rank 0 and 1.1 on rank 1",
        "solver": "solver is 'Cholesky(",
        "blocks": "the blocks is ['0', '2', '4'] on rank 0 and ['0', '2'] on rank 1",
        "shape": "the parameters of block '(root)' is [((2, 3), 'torch.float32', True)",
        "dtype": "'torch.float64', True), ((2,), 'torch.float64', True)] on rank 1",
        "gauss-seidel": "Use a mesh with block=1",
        "no batch": "pass them to step() as the batch",
        "samples": "the kind of a sample is [('torch.float64', (6,))",
        "curvature": "the kind of a sample is [('torch.float64', (6,)), ('torch.int64', ())] on rank 0 and [",
        "frozen": "the parameters of block '0' is",
        "an edit": "lr of block '0' is 0.05 on rank 0 and 0.1 on rank 1",
    }
    assert found[0].keys() == expected.keys()
    for what, words in expected.items():
        assert words in found[0][what], found[0][what]


def test_ranks_agree_on_the_number_of_samples(tmp_path: Path) -> None:
    first, second = ranks.run(2, "mesh_tasks:noisy", tmp_path)
    assert first["sizes"] == second["sizes"]
    assert len(set(first["sizes"])) > 1
    assert torch.equal(first["parameters"], second["parameters"])
    assert "solved by rank" in first["report"]
    assert "solved in" in first["report"]


@pytest.mark.parametrize(
    ("where", "shape"),
    [("gradient", (2, 1)), ("cg", (2, 1)), ("gather", (2, 1)), ("cg", (1, 3))],
)
def test_a_killed_rank_is_missed_at_once(tmp_path: Path, where: str, shape: tuple[int, int]) -> None:
    num_ranks = shape[0] * shape[1]
    processes = ranks.start(num_ranks, "mesh_tasks:killed", tmp_path, where, shape)
    processes[1].wait(120)
    start = time.monotonic()
    codes = ranks.finish(processes, timeout=60)
    assert time.monotonic() - start < 30
    assert codes == [-signal.SIGKILL if rank == 1 else 1 for rank in range(num_ranks)]
    for rank in set(range(num_ranks)) - {1}:
        assert "RankError" in ranks.log(tmp_path, rank)
        assert "waited in vain for another rank" in ranks.log(tmp_path, rank)


# Placement


def test_the_dearest_blocks_are_placed_first() -> None:
    assert assign([1.0, 5.0, 3.0, 2.0], 2).owners == (0, 0, 1, 1)
    assert assign([2.0], 3).loads == (2.0, 0.0, 0.0)
    placed = assign([7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 3)
    assert placed.time == 10.0
    assert sum(placed.loads) == 28.0


def test_early_blocks_cost_more_as_their_tangents_are_longer() -> None:
    costs = estimated_costs([10, 10, 10])
    assert costs == [80.0, 60.0, 40.0]


def test_a_block_dearer_than_all_others_is_shared_along_data() -> None:
    assert best_shape([8.0, 1.0, 1.0], 4) == (1, 4)
    assert best_shape([4.0, 2.0, 2.0], 4) == (2, 2)
    assert best_shape([1.0] * 4, 4) == (4, 1)


@pytest.mark.parametrize("sizes", [[5], [3, 0, 4], [100, 1, 1], [7, 7, 7, 7]])
def test_samples_are_shared_out_in_proportion(sizes: list[int]) -> None:
    for number in range(sum(sizes) + 3):
        shares = share_out(number, sizes)
        assert sum(shares) == min(number, sum(sizes))
        for share, size in zip(shares, sizes, strict=True):
            assert 0 <= share <= size
            assert abs(share - min(number, sum(sizes)) * size / sum(sizes)) < 1 + 1e-9


def test_a_bad_first_guess_mends_itself() -> None:
    ownership = Ownership(2)
    sizes = {"a": 100, "b": 10, "c": 10}
    ownership.begin(sizes)
    assert ownership.owners == {"a": 0, "b": 1, "c": 1}
    slow = {"a": 0.1, "b": 1.0, "c": 1.1}  # a small block may be dear, e.g. a convolution
    moved = []
    for _ in range(10):
        moved.append(ownership.is_due(sizes, slow))
        if moved[-1]:
            ownership.move()
    assert moved.count(True) == 1
    assert moved.index(True) >= 2
    assert ownership.owners["b"] != ownership.owners["c"]


def test_small_gains_move_nothing() -> None:
    ownership = Ownership(2)
    sizes = {"a": 10, "b": 10}
    ownership.begin(sizes)
    assert not any(ownership.is_due(sizes, {"a": 1.0, "b": 0.5}) for _ in range(20))


def test_new_blocks_are_placed() -> None:
    ownership = Ownership(2)
    ownership.begin({"a": 10})
    assert ownership.is_due({"a": 10, "b": 10}, {})
    ownership.move()
    assert set(ownership.owners.values()) == {0, 1}


def test_states_are_merged_and_cut() -> None:
    states = [{"n": 1, "own": {"a/0": 1}, "list": [1]}, {"n": 1, "own": {"b/0": 2}, "list": [1]}]
    whole = merged(states)
    assert whole == {"n": 1, "own": {"a/0": 1, "b/0": 2}, "list": [1]}
    steps = merged([{"steps": 0}, {"steps": 3}])  # a rank whose blocks were formed has made none
    assert steps == {"steps": 3}


def test_a_mesh_must_have_as_many_ranks_as_there_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="block=3 times data=1 is not the number of processes, 4"):
        blockhf.mesh(3)
    with pytest.raises(ValueError, match="--nproc-per-node 6"):
        blockhf.mesh(block=2, data=3)
