"""Jacobians sample by sample, of objectives that differentiate inside among others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockhf import DoubleBackward, GaussNewton, PolicyState, Samples
from blockhf.blocks import Block
from blockhf.curvature import Factored
from blockhf.curvature.jacobian import FormingError, PerSampleJacobian


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def points(number: int = 6) -> Tensor:
    return torch.rand(number, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def laplacian(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    value = net(x)[:, 0]
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    seconds = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
    return value, seconds[0] + seconds[1]


class Jets(nn.Module):
    """A field whose derivatives come from a method other than ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.field = network()

    def jet(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return laplacian(self.field, x.detach().requires_grad_())


def poisson_of(net: nn.Module) -> Any:
    """The residual inside and on the boundary, told apart by a mask."""

    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, inside = batch
        value, curved = laplacian(net, x.detach().requires_grad_())
        residual = torch.where(inside, curved + torch.sin(x.detach()).sum(1), 3 * value)
        return residual, residual.square().mean() / 2

    return objective


def by_method(jets: Jets) -> Any:
    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        value, curved = jets.jet(batch[0])
        residual = curved + value**3 - 1
        return residual, residual.square().mean() / 2

    return objective


def in_place(net: nn.Module) -> Any:
    """``requires_grad_()`` on the batch itself."""

    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = batch[0].requires_grad_()
        value, curved = laplacian(net, x)
        residual = torch.stack([curved - value, value], dim=1)
        return residual, residual.square().mean() / 2

    return objective


PHYSICS = [(poisson_of, network), (by_method, Jets), (in_place, network)]


@pytest.mark.parametrize(("write", "build"), PHYSICS, ids=lambda own: own.__name__)
@pytest.mark.parametrize("micro_batch_size", [None, 4])
def test_physics_residuals_have_roots(write: Any, build: Any, micro_batch_size: int | None) -> None:
    model = build().double()
    block = Block("all", tuple(model.parameters()))
    batch = (points(), torch.arange(6) < 4)
    samples = Samples(write(model), batch, [block], micro_batch_size=micro_batch_size)
    operator = Factored().linearize(GaussNewton(), samples, [], PolicyState())
    reference = DoubleBackward().operator(GaussNewton(), samples)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        vector = torch.randn(block.size, generator=generator, dtype=torch.float64)
        expected = reference.product(0, 0, vector)
        torch.testing.assert_close(operator.product(0, 0, vector), expected, rtol=1e-9, atol=1e-11)


def test_what_was_recorded_serves_other_points_and_parameters() -> None:
    """Recorded once, run at new values: nothing of the first sample is left in the graph."""
    model = network()
    block = Block("all", tuple(model.parameters()))
    objective, state = poisson_of(model), PolicyState()
    for seed in range(3):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)))
        batch = (points() * (seed + 1) / 3, torch.arange(6) < 2 * seed)
        samples = Samples(objective, batch, [block])
        operator = Factored().linearize(GaussNewton(), samples, [], state)
        vector = torch.ones(block.size, dtype=torch.float64)
        expected = DoubleBackward().operator(GaussNewton(), samples).product(0, 0, vector)
        torch.testing.assert_close(operator.product(0, 0, vector), expected, rtol=1e-9, atol=1e-11)
    assert len(state.cache["one sample"]) == 1


def test_rows_are_the_gradients_of_outputs() -> None:
    model = network()
    block = Block("all", tuple(model.parameters()))

    def objective(batch: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, outputs.square().mean()

    samples = Samples(objective, (points(),), [block])
    rows = PerSampleJacobian(samples, samples.parts[0], [block], 1, {}).rows(2, 5)[0]
    for row, x in zip(rows, points()[2:5], strict=True):
        gradients = torch.autograd.grad(model(x[None]).sum(), list(block.params))
        torch.testing.assert_close(row, torch.cat([own.flatten() for own in gradients]))


def test_an_objective_that_asks_for_values_is_refused() -> None:
    model = network()
    block = Block("all", tuple(model.parameters()))

    def objective(batch: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        outputs = outputs.abs() if float(outputs.detach().sum()) > 1e9 else outputs
        return outputs, outputs.square().mean()

    samples = Samples(objective, (points(),), [block])
    samples.structure  # noqa: B018 - runs the objective once
    with pytest.raises(FormingError, match="reads numbers out of tensors"):
        PerSampleJacobian(samples, samples.parts[0], [block], 1, {}).rows(0, 6)
