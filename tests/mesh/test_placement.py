"""Who solves which block: decisions without processes."""

from __future__ import annotations

import pytest

import blockhf
from blockhf import blocks
from blockhf.meshes import assign, best_shape, estimated_costs, merged
from blockhf_lab import bench, calibration


def test_the_dearest_blocks_are_placed_first() -> None:
    assert assign([1.0, 5.0, 3.0, 2.0], 2).owners == (0, 0, 1, 1)
    assert assign([2.0], 3).loads == (2.0, 0.0, 0.0)
    placed = assign([7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 3)
    assert placed.time == 10.0
    assert sum(placed.loads) == 28.0


def test_early_blocks_cost_more_as_their_tangents_are_longer() -> None:
    costs = estimated_costs([10, 10, 10])
    assert costs == [80.0, 60.0, 40.0]


def test_tangents_begin_behind_the_first_tensor_of_a_block() -> None:
    # Of single layers: the change of the parameters, the gradient by them, and both ways through the rest.
    assert estimated_costs([10, 10, 10], [10, 10, 10]) == [60.0, 40.0, 20.0]
    case = bench.network("autoencoder", 1)
    layers = blocks.by_layer(case.model)
    sizes = [[param.numel() for _, param in layer["params"]] for layer in layers]
    estimated = estimated_costs([sum(own) for own in sizes], [own[0] for own in sizes])
    counted = [part.product for part in calibration.describe(case, layers)[0].blocks]
    assert estimated == pytest.approx(counted, rel=0.01)
    assert assign(estimated, 2).owners == assign(counted, 2).owners


def test_a_block_dearer_than_all_others_is_shared_along_data() -> None:
    assert best_shape([8.0, 1.0, 1.0], 4) == (1, 4)
    assert best_shape([4.0, 2.0, 2.0], 4) == (2, 2)
    assert best_shape([1.0] * 4, 4) == (4, 1)


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
