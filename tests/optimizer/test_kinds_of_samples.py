"""Batches with samples of several kinds, each as long as it likes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockhf import BlockHF, Factored, NoiseScale, blocks
from blockhf.batches import batch_size, select, take
from mesh_tasks import poisson


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)).double()


def points(num_inside: int = 40) -> dict[str, Any]:
    inside = torch.linspace(0, 1, num_inside, dtype=torch.float64)[:, None]
    return {"interior": inside, "boundary": torch.tensor([[0.0], [1.0]]).double(), "weight": 10.0}


def in_one(net: nn.Module) -> Any:
    """The same residuals as one output for an objective without a batch."""

    def objective() -> tuple[tuple[Tensor, Tensor], Tensor]:
        outputs, loss = poisson(net)(points())
        return outputs, loss

    return objective


def test_the_default_solves_an_equation_with_its_boundary() -> None:
    net = network()
    optimizer = BlockHF(blocks.single(net))
    for _ in range(60):
        loss = optimizer.step(poisson(net), points())
    report = optimizer.report
    assert report is not None
    assert report.complete
    assert report.blocks[0].products == "Jacobian, 42 x 31"
    assert float(loss) < 1e-6


def test_it_is_the_run_of_the_same_objective_without_a_batch() -> None:
    losses = []
    for with_batch in (True, False):
        net = network()
        optimizer = BlockHF.least_squares(blocks.by_layer(net))
        steps = [(poisson(net), points()) if with_batch else (in_one(net),) for _ in range(6)]
        losses.append([float(optimizer.step(*step)) for step in steps])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_samples_are_drawn_from_each_kind() -> None:
    batch = {"a": torch.arange(90), "b": (torch.arange(10), ["x"] * 10), "c": 3}
    assert batch_size(batch) == 100
    drawn = select(batch, torch.tensor([0, 50, 89, 95]))
    assert [drawn["a"].tolist(), drawn["b"][0].tolist(), drawn["c"]] == [[0, 50, 89], [5], 3]
    assert len(select(batch, torch.tensor([4]))["b"][0]) == 1  # never none of a kind
    part = take(batch, 20, 60)
    assert [part["a"].tolist(), part["b"][0].tolist()] == [list(range(18, 54)), [2, 3, 4, 5]]


def test_with_noise_it_trains_too() -> None:
    net = network()
    optimizer = BlockHF(blocks.single(net), sampling=NoiseScale())
    first = float(optimizer.step(poisson(net), points(400)))
    for _ in range(10):
        last = float(optimizer.step(poisson(net), points(400)))
    assert last < first


def test_residuals_that_are_joined_are_told_apart_in_words() -> None:
    net = network()

    def objective(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        (inside, edge), _ = poisson(net)(batch)
        joined = torch.cat([inside, edge])
        return joined, joined.square().mean()

    optimizer = BlockHF.least_squares(blocks.single(net), products=Factored())
    with pytest.raises(Exception, match="Return the residuals of each kind as an output of their own"):
        optimizer.step(objective, points())


def test_micro_batches_of_several_kinds_are_parts_in_proportion() -> None:
    parameters = []
    for size in (None, 50, 21):
        net = network()
        optimizer = BlockHF(blocks.single(net), population=42, micro_batch_size=size)
        for _ in range(5):
            optimizer.step(poisson(net), points())
        assert optimizer.report is not None
        assert optimizer.report.complete
        parameters.append(torch.cat([param.detach().flatten() for param in net.parameters()]))
    torch.testing.assert_close(parameters[1], parameters[0])
    torch.testing.assert_close(parameters[2], parameters[0], rtol=1e-6, atol=1e-9)


def test_with_noise_micro_batches_of_several_kinds_take_all_samples() -> None:
    net = network()
    optimizer = BlockHF(blocks.single(net), sampling=NoiseScale(), micro_batch_size=202)
    optimizer.step(poisson(net), points(402))
    assert optimizer.report is not None
    work = optimizer.report.work
    assert (work["gradient_batch"], work["curvature_batch"], work["held_out_batch"]) == (404, 404, 0)


def test_micro_batches_too_small_for_all_kinds_are_refused() -> None:
    net = network()
    optimizer = BlockHF(blocks.single(net), micro_batch_size=10)
    with pytest.raises(ValueError, match="whose means add up only over parts of 21 samples or a multiple"):
        optimizer.step(poisson(net), points())
