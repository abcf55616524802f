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

import mesh_tasks
import ranks
from blockhf import blocks
from children import starts_processes
from mesh_tasks import METHODS, NUM_SAMPLES, flat, in_one_process, make

SHAPES = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1)]
OFTEN = ("paper", "martens", "default", "complete", "again", "least squares")
UNEVEN = ("paper", "martens", "default", "complete", "no held-out samples", "few", "sum", "weighted")
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

pytestmark = starts_processes

Runs = Callable[[tuple[int, int], bool, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The results of the ranks of a mesh; meshes of as many ranks share a start of the processes."""
    found: dict[Any, list[dict[str, Any]]] = {}

    def get(shape: tuple[int, int], uneven: bool, name: str) -> list[dict[str, Any]]:
        if (shape, uneven, name) not in found:
            num_ranks = shape[0] * shape[1]
            tasks = [
                ("on_mesh", each, names, is_uneven)
                for each in SHAPES
                for is_uneven in (False, True)
                if each[0] * each[1] == num_ranks
                and (names := at_once(each, is_uneven, often=name in at_once(shape, uneven, often=True)))
            ]
            started = ranks.run(num_ranks, "mesh_tasks:several", tmp_path_factory.mktemp("mesh"), *tasks)
            for place, (_, each, names, is_uneven) in enumerate(tasks):
                for method in names:
                    found[each, is_uneven, method] = [own[place] for own in started]
        return found[shape, uneven, name]

    return get


def at_once(shape: tuple[int, int], uneven: bool, *, often: bool) -> list[str]:
    """The methods of a mesh that are always run, or those that are run for a longer look alone."""
    return [
        case.values[2] for case in CASES if case.values[:2] == (shape, uneven) and often == (not case.marks)
    ]


@pytest.mark.parametrize(("shape", "uneven", "name"), CASES)
def test_a_mesh_does_what_one_process_does(
    runs: Runs, shape: tuple[int, int], uneven: bool, name: str
) -> None:
    found = [rank[name] for rank in runs(shape, uneven, name)]
    expected = in_one_process(shape, name, uneven)
    for own in found:
        for key in ("loss", "losses", "dampings"):
            assert own[key] == pytest.approx(expected[key], rel=1e-6), key
        for key in ("gradient", "directions", "parameters"):
            assert float((own[key] - expected[key]).norm()) < 1e-6 * float(expected[key].norm()), key
        assert torch.equal(own["parameters"], found[0]["parameters"])
        assert own["step"] == expected["step"]
        assert own["cg"] == expected["cg"]


Pair = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """What two ranks found in the tasks with a test of their own."""
    folder = tmp_path_factory.mktemp("pair")
    names = ("states", "frozen_and_given", "added", "differences", "noisy", "decayed")
    names += ("kinds", "kinds_out_of_proportion", "walking")
    tasks = [(name, str(folder / "saved")) if name == "states" else (name,) for name in names]
    started = ranks.run(2, "mesh_tasks:several", folder, *tasks)
    return lambda name: [own[names.index(name)] for own in started]


def test_weight_decay_on_a_mesh_is_that_of_the_dense_solve(pair: Pair) -> None:
    model, objective_for, batch = make()
    outputs, loss = objective_for("mean")(batch)
    params = list(model.parameters())
    g = flat(torch.autograd.grad(loss, params, retain_graph=True))
    rows = [flat(torch.autograd.grad(own, params, retain_graph=True)) for own in outputs.flatten()]
    J, probabilities = torch.stack(rows).view(*outputs.shape, -1), outputs.softmax(1).detach()
    H = torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None, :]
    G = torch.einsum("nij,nik,nkl->jl", J, H, J) / NUM_SAMPLES
    expected, start = [], 0
    for number, group in enumerate(blocks.by_layer(model)):
        own = slice(start, start + sum(param.numel() for _, param in group["params"]))
        eye = torch.eye(own.stop - own.start, dtype=G.dtype)
        w = flat([param for _, param in group["params"]])
        damped = G[own, own] + (0.1 * number + 1e-3) * eye
        expected.append(torch.linalg.solve(damped, -(g[own] + 0.1 * number * w)))
        start = own.stop
    for found in pair("decayed"):
        assert len(found) == 10
        for way, directions in found.items():
            for own, right in zip(directions.split([len(each) for each in expected]), expected, strict=True):
                assert float((own - right).norm()) <= 1e-10 * float(right.norm()), way


def test_samples_of_several_kinds_are_solved_exactly_as_in_one_process(pair: Pair) -> None:
    expected = mesh_tasks.kinds_of_samples()
    assert expected["losses"][-1] < 0.2 * expected["losses"][0]
    assert expected["notes"] == ["Jacobian, 54 x 20", "Jacobian, 54 x 11"]
    for found, num_rows in zip(pair("kinds"), (18, 36), strict=True):
        for own in found:
            assert own["notes"] == [f"Jacobian, {num_rows} x 20", f"Jacobian, {num_rows} x 11"]
            assert own["losses"] == pytest.approx(expected["losses"], rel=1e-6)
            assert float((own["parameters"] - expected["parameters"]).norm()) < 1e-6
    for words in pair("kinds_out_of_proportion"):
        assert "proportions of the kinds of samples is [4, 1] on rank 0 and [9, 2] on rank 1" in words


@pytest.mark.slow
def test_compiled_products_work_on_a_mesh(tmp_path: Path) -> None:
    expected = in_one_process((2, 1), "default", False)["parameters"]
    for own in ranks.run(2, "mesh_tasks:compiled", tmp_path):
        assert float((own["compiled"]["parameters"] - expected).norm()) < 1e-6 * float(expected.norm())


def test_with_blocks_alone_nothing_is_sent_during_cg(runs: Runs) -> None:
    found = runs((2, 1), False, "paper")
    sizes = {
        group["name"]: sum(p.numel() for _, p in group["params"]) for group in blocks.by_layer(make()[0])
    }
    for own in found:
        sent = {key: value for key, value in own["paper"]["work"].items() if key.endswith("_messages")}
        assert sent == {
            "numbers_messages": 1,  # how many samples each has
            "sums_messages": 1,  # the gradient
            "samples_messages": 2,  # inputs and classes
            "directions_messages": 2,  # how they were found, and the vectors
        }
        work = own["paper"]["work"]
        num_params = sum(param.numel() for param in make()[0].parameters())
        assert work["sums_bytes"] == 8 * (num_params + 1)
        assert work["samples_bytes"] == 12 * (6 * 8 + 8)  # of 24 samples: inputs and class
        assert work["numbers_bytes"] == 8 * 3
        assert work["directions_bytes"] == 3 * 7 * 8 + 8 * max(
            sum(sizes[name] for name in rank["paper"]["kept"]) for rank in found
        )


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


def test_a_saved_state_loads_anywhere(pair: Pair, tmp_path: Path) -> None:
    found = pair("states")
    assert sorted(found[0]["kept"] + found[1]["kept"]) == ["0", "2", "4"]
    assert sorted(found[0]["factored"] + found[1]["factored"]) == ["0", "2", "4"]
    for own in found:
        assert own["loaded"] == own["factored"]
        assert torch.equal(own["continued"], own["parameters"])

    dcp_to_torch_save(found[0]["folder"], tmp_path / "saved.pt")
    loaded = torch.load(tmp_path / "saved.pt", weights_only=True)
    for saved in (found[0]["saved"], found[1]["saved"], loaded):
        model, objective_for, batch = make()
        optimizer = mesh_tasks.default(blocks.by_layer(model), warm_start=0.5)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for _ in range(2):
            optimizer.step(objective_for("mean"), batch)
        difference = flat(list(model.parameters())) - found[0]["parameters"]
        assert float(difference.norm()) < 1e-6 * float(found[0]["parameters"].norm())


def test_blocks_are_frozen_and_curvature_is_given_as_in_one_process(pair: Pair) -> None:
    found = pair("frozen_and_given")
    model, objective_for, batch = make()
    optimizer = mesh_tasks.paper(blocks.by_layer(model))
    half = NUM_SAMPLES // 2
    given = tuple(tensor[[*range(8), *range(half, half + 12)]] for tensor in batch)
    mesh_tasks.follow(optimizer, model, objective_for("mean"), batch, given)
    expected = flat(list(model.parameters()))
    for own in found:
        assert float((own["parameters"] - expected).norm()) < 1e-6 * float(expected.norm())
        for index, state in optimizer.state_dict()["state"].items():
            assert own["state"][index]["step"] == state["step"]
            torch.testing.assert_close(
                own["state"][index]["direction"], state["direction"], rtol=1e-6, atol=1e-9
            )


@pytest.mark.parametrize("num_frozen", [0, 1, 2])
def test_a_block_may_come_later_while_others_are_frozen(pair: Pair, num_frozen: int) -> None:
    found = [own[num_frozen] for own in pair("added")]
    model, objective_for, batch = make()
    expected = mesh_tasks.grow(model, num_frozen, objective_for("mean"), batch)
    assert sorted(found[0]["owned"] + found[1]["owned"]) == ["0", "2", "4"]
    for own in found:
        assert own["owned"]
        difference = own["parameters"] - expected["parameters"]
        assert float(difference.norm()) < 1e-6 * float(expected["parameters"].norm())
        for index, state in expected["state"].items():
            assert own["state"][index]["step"] == state["step"]
            torch.testing.assert_close(
                own["state"][index]["direction"], state["direction"], rtol=1e-6, atol=1e-9
            )


def test_ranks_that_do_not_do_the_same_are_told_in_what(pair: Pair) -> None:
    found = pair("differences")
    assert found[0] == found[1]
    expected = {
        "damping": "damping of block '0' is 0.1 on rank 0 and 1.1 on rank 1",
        "solver": "solver is 'Cholesky(",
        "blocks": "the blocks is ['0', '2', '4'] on rank 0 and ['0', '2'] on rank 1",
        "shape": "the parameters of block '(root)' is [((2, 3), 'torch.float32', True)",
        "dtype": "'torch.float64', True), ((2,), 'torch.float64', True)] on rank 1",
        "no batch": "pass them to step() as the batch",
        "samples": "the kind of a sample is [('torch.float64', (6,))",
        "curvature": "the kind of a sample is [('torch.float64', (6,)), ('torch.int64', ())] on rank 0 and [",
        "frozen": "the parameters of block '0' is",
        "an edit": "lr of block '0' is 0.05 on rank 0 and 0.1 on rank 1",
    }
    assert found[0].keys() == expected.keys()
    for what, words in expected.items():
        assert words in found[0][what], found[0][what]


def test_ranks_agree_on_the_number_of_samples(pair: Pair) -> None:
    first, second = pair("noisy")
    assert first["sizes"] == second["sizes"]
    assert len(set(first["sizes"])) > 1
    assert torch.equal(first["parameters"], second["parameters"])
    assert "solved by rank" in first["report"]


@pytest.mark.parametrize(("rotation", "rtol"), [(0.0, 1e-4), (1.0, 1e-9)])
def test_ranks_walk_as_one_process_does(pair: Pair, rotation: float, rtol: float) -> None:
    """In double precision: sums come in another order, and rotations make rounding large."""
    first, second = (own[rotation] for own in pair("walking"))
    alone = mesh_tasks.walk(rotation=rotation)
    assert first["reasons"] == second["reasons"] == alone["reasons"]
    assert all("small steps" in reason for reason in alone["reasons"])
    assert torch.equal(first["parameters"], second["parameters"])
    assert first["losses"] == pytest.approx(alone["losses"], rel=rtol)
    if rotation == 0:
        torch.testing.assert_close(first["parameters"], alone["parameters"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("where", "shape"),
    [("gradient", (2, 1)), ("cg", (2, 1)), ("gather", (2, 1)), ("cg", (1, 3))],
)
def test_a_killed_rank_is_missed_at_once(tmp_path: Path, where: str, shape: tuple[int, int]) -> None:
    num_ranks = shape[0] * shape[1]
    processes = ranks.start(num_ranks, "mesh_tasks:killed", tmp_path, where, shape)
    processes[1].wait()
    start = time.monotonic()
    codes = ranks.finish(processes)
    assert time.monotonic() - start < 120  # the mesh itself would wait for 600
    assert codes == [-signal.SIGKILL if rank == 1 else 1 for rank in range(num_ranks)]
    for rank in set(range(num_ranks)) - {1}:
        assert "RankError" in ranks.log(tmp_path, rank)
        assert "waited in vain for another rank" in ranks.log(tmp_path, rank)
