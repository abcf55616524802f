"""Stored roots of Gauss-Newton blocks, against dense matrices in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oracles
from blockhf import (
    BlockHF,
    BlockOperator,
    Cholesky,
    DoubleBackward,
    GaussNewton,
    Hessian,
    PolicyState,
    Samples,
    blocks,
)
from blockhf.blocks import Block
from blockhf.curvature import Factored
from blockhf.curvature.jacobian import FormingError
from blockhf.linalg import Root
from cases import CASES, PARTITIONS, Case, as_blocks

RTOL = 1e-10
# Samples that see each other, random numbers, no batching rule; of "dict" the loss is not convex.
HAVE_NO_ROOT = ("batch norm in train mode", "dropout", "gru", "lstm", "pendulum", "heat", "dict")


def mlp(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def data(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(num_samples, 2, generator=generator, dtype=torch.float64)


def squares(model: nn.Module) -> Any:
    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, F.mse_loss(outputs, batch[1])

    return objective


def factored(
    objective: Any, batch: Any, params: list[Block], **options: Any
) -> tuple[Samples, BlockOperator]:
    samples = Samples(objective, batch, params, **options)
    return samples, Factored().linearize(GaussNewton(), samples, [], PolicyState())


def root_of(operator: BlockOperator, block: int = 0) -> Root:
    root = operator.root(block)
    assert root is not None
    return root


def gradient(samples: Samples) -> Tensor:
    """Of the parts' weighted losses."""
    losses = [part.weight * samples.evaluate(part).loss for part in samples.parts]
    gradients = torch.autograd.grad(sum(losses, torch.zeros(())), samples.params)
    return torch.cat([own.flatten() for own in gradients])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_roots_give_the_dense_blocks_or_say_why_not(case: Case) -> None:
    model = case.model()
    parts = as_blocks(PARTITIONS["two uneven"](model))
    try:
        _, operator = factored(case.objective(model), case.batch(), parts)
    except FormingError:
        assert any(name in case.name.lower() for name in HAVE_NO_ROOT), case.name
        return
    rows = oracles.positions(model)
    places = [torch.cat([rows[param] for param in block.params]) for block in parts]
    dense = oracles.gauss_newton(case, case.batch())
    for index, own in enumerate(places):
        root = root_of(operator, index).rows
        expected = dense[own][:, own]
        assert float((root.T @ root - expected).norm()) <= RTOL * float(expected.norm())


def cross_entropy(model: nn.Module) -> Any:
    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, F.cross_entropy(outputs, batch[1])

    return objective


def masked(model: nn.Module) -> Any:
    """The targets' weights, some of them zero."""

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, (batch[1].relu() * (outputs - batch[1]).square()).mean()

    return objective


@pytest.mark.parametrize("micro_batch_size", [None, 3])
@pytest.mark.parametrize("loss", [squares, cross_entropy, masked])
def test_the_slopes_give_the_gradient(loss: Any, micro_batch_size: int | None) -> None:
    """Also of cross entropy, whose curvature is singular in each sample, and of weights that are zero."""
    inputs, targets = data(7)
    batch = (inputs, targets.argmax(1) if loss is cross_entropy else targets)
    model = mlp(3, 5, 2)
    block = Block("all", tuple(model.parameters()))
    samples, operator = factored(loss(model), batch, [block], micro_batch_size=micro_batch_size)
    root = root_of(operator)
    assert root.rows.shape == (14, block.size)
    assert len(samples.parts) == (3 if micro_batch_size else 1)
    torch.testing.assert_close(root.rows.T @ root.slopes, gradient(samples), rtol=1e-10, atol=1e-12)


def test_a_root_is_kept_for_each_block() -> None:
    model = mlp(3, 4, 4, 2)
    parts = as_blocks(blocks.by_layer(model))
    samples, operator = factored(squares(model), data(6), parts)
    reference = DoubleBackward().operator(GaussNewton(), samples)
    vector = torch.sin(torch.arange(parts[2].size, dtype=torch.float64))
    for row in range(3):
        torch.testing.assert_close(operator.product(row, 2, vector), reference.product(row, 2, vector))
    rows = [root_of(operator, index).rows for index in range(3)]
    assert [own.shape[1] for own in rows] == [part.size for part in parts] == list(operator.sizes)
    assert operator.note(1) == "Jacobian, 12 x 20"
    for index, own in enumerate(rows):
        like = own[0]
        assert operator.mean_diagonal(index, like) == pytest.approx(float((own.T @ own).diagonal().mean()))


def test_a_root_in_float32_is_that_in_float64_up_to_rounding() -> None:
    found = []
    for dtype in (torch.float64, torch.float32):
        model = mlp(3, 5, 2).to(dtype)
        batch = tuple(own.to(dtype) for own in data(6))
        _, operator = factored(squares(model), batch, [Block("all", tuple(model.parameters()))])
        rows = root_of(operator).rows
        assert rows.dtype == dtype
        found.append(rows.double())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_what_has_no_root_is_refused_with_the_reason() -> None:
    model = mlp(3, 5, 2)
    block = [Block("all", tuple(model.parameters()))]

    def refused(objective: Any, curvature: Any = None, products: Factored | None = None) -> str:
        samples = Samples(objective, data(6), block)
        with pytest.raises(FormingError) as error:
            (products or Factored()).linearize(curvature or GaussNewton(), samples, [], PolicyState())
        return str(error.value)

    def concave(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, outputs.cos().mean()

    def mixed(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0] - batch[0].mean(0))
        return outputs, F.mse_loss(outputs, batch[1])

    assert "Hessian has no stored root" in refused(squares(model), Hessian())
    assert "not convex in the outputs" in refused(concave)
    assert "see each other" in refused(mixed)
    assert "more than the memory_budget of 0 MiB" in refused(squares(model), None, Factored(1000))


def test_an_exact_step_on_a_linear_model_ends_at_the_optimum() -> None:
    """Of fewer samples than parameters too, where it is the nearest one."""
    for num_samples in (20, 2):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        inputs, targets = data(num_samples)
        start = torch.cat([param.detach().reshape(2, -1).mT for param in model.parameters()])
        optimizer = BlockHF.martens(blocks.single(model), products=Factored(), solver=Cholesky(), damping=0.0)
        optimizer.step(squares(model), (inputs, targets))
        design = torch.cat([inputs, torch.ones(num_samples, 1, dtype=torch.float64)], dim=1)
        expected = start + torch.linalg.pinv(design) @ (targets - design @ start)
        found = torch.cat([param.detach().reshape(2, -1).mT for param in model.parameters()])
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
