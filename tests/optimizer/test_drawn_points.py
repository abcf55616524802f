"""Points that a function draws anew for each step, as many as the optimizer asks for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockhf import BlockHF, blocks
from blockhf.points import FIRST, MOST_NUMBERS, learn


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1)).double()


def points(number: int) -> Tensor:
    return torch.rand(number, 2, dtype=torch.float64)


def fit(model: nn.Module) -> Any:
    def objective(batch: Tensor) -> tuple[Tensor, Tensor]:
        residuals = model(batch)[:, 0] - torch.sin(3 * batch[:, 0]) * batch[:, 1]
        return residuals, residuals.square().mean() / 2

    return objective


def test_an_integral_is_minimized_with_new_points_at_each_step() -> None:
    model, asked = network(), []

    def noted(number: int) -> Tensor:
        asked.append(number)
        return points(number)

    optimizer = BlockHF(blocks.single(model))
    for _ in range(30):
        optimizer.step(fit(model), noted)
    report = optimizer.report
    assert report is not None
    assert "drawn" in report.complete
    assert len(asked) == 30
    assert report.work["gradient_batch"] == asked[-1] >= FIRST
    with torch.no_grad():
        assert float(fit(model)(points(5000))[1]) < 1e-6


def test_more_points_are_asked_for_where_new_ones_are_fitted_worse() -> None:
    memory = {"num_points": FIRST, "last_loss_after": 1.0}
    learn(memory, 3.0, 0.5, 100)
    grown = memory["num_points"]
    assert grown > FIRST
    learn(memory, 0.5, 0.4, 100)
    assert FIRST < memory["num_points"] < grown
    learn(memory, 100.0, 0.4, MOST_NUMBERS // FIRST)
    assert memory["num_points"] == FIRST  # the Jacobian has to fit into memory


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    models = [network(), network()]
    optimizers = [BlockHF(blocks.single(model)) for model in models]
    for _ in range(4):
        optimizers[0].step(fit(models[0]), points)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    losses = []
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(1)
        losses.append([float(optimizer.step(fit(model), points)) for _ in range(3)])
    assert losses[0] == losses[1]


def test_an_exception_puts_the_random_numbers_back() -> None:
    model = network()
    optimizer = BlockHF(blocks.single(model))
    before = torch.get_rng_state()

    def objective(batch: Tensor) -> tuple[Tensor, Tensor]:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        optimizer.step(objective, points)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_function_that_draws_nothing_is_told_so() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"points\(500\) has to return a batch of new points"):
        BlockHF(blocks.single(model)).step(fit(model), lambda number: None)
