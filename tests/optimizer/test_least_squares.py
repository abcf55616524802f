"""The method for losses without noise: exact solutions, relative damping, and what it falls back to."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockhf import BlockHF, Outcome, RelativeDamping, blocks


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1)).to(
        dtype
    )


def wave(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 40, dtype=dtype)[:, None]
    return x, torch.sin(3 * x)


def fit(model: nn.Module, scale: float = 1.0) -> Any:
    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, scale * F.mse_loss(outputs, batch[1])

    return objective


def run(
    num_steps: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float64, **options: Any
) -> list[float]:
    model = network(dtype)
    optimizer = BlockHF.least_squares(blocks.single(model), **options)
    return [float(optimizer.step(fit(model, scale), wave(dtype))) / scale for _ in range(num_steps)]


@pytest.mark.parametrize(("dtype", "goal"), [(torch.float64, 1e-8), (torch.float32, 1e-6)])
def test_a_curve_is_fitted_to_many_digits(dtype: torch.dtype, goal: float) -> None:
    losses = run(60, dtype=dtype)
    assert losses[-1] < goal < losses[0]
    assert all(after <= before for before, after in itertools.pairwise(losses))


@pytest.mark.parametrize("scale", [1024.0, 1 / 1024])
def test_the_scale_of_the_loss_does_not_matter(scale: float) -> None:
    assert run(8, scale=scale) == pytest.approx(run(8), rel=1e-6)


def test_blocks_are_solved_exactly_each_on_its_smaller_side() -> None:
    model = network()
    optimizer = BlockHF.least_squares(blocks.by_layer(model))
    optimizer.step(fit(model), wave())
    report = optimizer.report
    assert report is not None
    assert [block.products for block in report.blocks] == [f"Jacobian, 40 x {size}" for size in (20, 110, 11)]
    assert all((block.status, block.num_products) == ("converged", 0) for block in report.blocks)
    assert report.work["curvature_batch"] == report.work["gradient_batch"] == 40


def test_where_jacobians_cannot_be_stored_one_warning_says_why_and_cg_solves() -> None:
    model = network()

    def mixed(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0]) - model(batch[0]).mean()
        return outputs, F.mse_loss(outputs, batch[1])

    optimizer = BlockHF.least_squares(blocks.single(model))
    with pytest.warns(UserWarning, match="Jacobians cannot be stored: the samples see each other"):
        first = float(optimizer.step(mixed, wave()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            last = float(optimizer.step(mixed, wave()))
    assert last < 0.1 * first
    assert optimizer.report is not None
    assert optimizer.report.blocks[0].num_steps > 0


# --- without a batch ---------------------------------------------------------------------------------


def test_residuals_of_several_shapes_need_no_batch() -> None:
    """The least of ``(x y - 2)² + |x + y - 3|²`` with the second residual twice, as a matrix."""
    point = nn.Parameter(torch.tensor([4.0, -1.0], dtype=torch.float64))

    def objective() -> tuple[tuple[Tensor, Tensor], Tensor]:
        outputs = point[0] * point[1] - 2, (point.sum() - 3).expand(1, 2)
        return outputs, sum(own.square().sum() for own in outputs) / 2  # type: ignore[return-value]

    optimizer = BlockHF.least_squares([point])
    for _ in range(12):
        loss = optimizer.step(objective)
    assert float(loss) < 1e-20
    assert optimizer.report is not None
    assert optimizer.report.blocks[0].products == "Jacobian, 3 x 2"


def test_the_same_with_and_without_a_batch() -> None:
    moved = []
    for has_batch in (True, False):
        model = network()
        optimizer = BlockHF.least_squares(blocks.by_layer(model))
        objective = fit(model)
        for _ in range(4):
            if has_batch:
                optimizer.step(objective, wave())
            else:
                optimizer.step(lambda: objective(wave()))  # noqa: B023
        moved.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-6, atol=1e-8)


def test_outputs_that_the_loss_ties_together_are_left_to_cg() -> None:
    point = nn.Parameter(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))

    def tied() -> tuple[Tensor, Tensor]:
        outputs = point * 1.0
        return outputs, torch.logsumexp(outputs, 0) + outputs.square().sum()

    optimizer = BlockHF.least_squares([point])
    with pytest.warns(UserWarning, match="the loss ties outputs together"):
        first = float(optimizer.step(tied))
    assert float(optimizer.step(tied)) < first


# --- the damping -------------------------------------------------------------------------------------


def test_damping_follows_the_ratio_and_short_steps_are_bad_ones() -> None:
    rule, state = RelativeDamping(factor=0.5, shortest=0.1), {}
    assert rule.is_relative
    for outcome, expected in [
        (Outcome(True, ratio=0.9, length=1.0), 0.5),
        (Outcome(True, ratio=0.9, length=0.05), 2.0),
        (Outcome(True, ratio=0.5, length=0.5), 1.0),
        (Outcome(True, ratio=0.1, length=0.5), 2.0),
        (Outcome(False), 2.0),
        (Outcome(False), 4.0),
        (Outcome(False), 8.0),
        (Outcome(True, ratio=0.5), 1.0),
        (Outcome(False), 2.0),
    ]:
        assert rule.update(1.0, outcome, state) == pytest.approx(expected)


def test_the_floor_is_at_the_rounding_of_the_numbers() -> None:
    rule = RelativeDamping()
    good = Outcome(True, ratio=1.0, length=1.0, rounding=torch.finfo(torch.float32).eps)
    assert rule.update(1e-12, good, {}) == pytest.approx(4 * good.rounding)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^shortest is 1.0, but must be at least 0 and below 1\.$"):
        RelativeDamping(shortest=1.0)
    with pytest.raises(ValueError, match="factor is 2"):
        RelativeDamping(factor=2)
