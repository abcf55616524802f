"""Matrices of the cases at one point, their dense counterparts, and small networks to step with."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oracles
from blockhf import BlockHF, BlockOperator, Curvature, DoubleBackward, PolicyState, Products, Samples
from blockhf.batches import Share, batch_size, take
from blockhf.blocks import Block
from blockhf.objective import Objective
from blockhf.plan import Plan, Role, curvature_samples
from blockhf.point import Linearizer, Point
from blockhf.report import Stopwatch
from blockhf.update import Update
from cases import CASES, ONE_PER_NETWORK, PARTITIONS, Case, as_blocks

RTOL = 1e-10
DRAW_SEED = 7
OTHER_LOSSES = [case for case in CASES if case not in ONE_PER_NETWORK]

Written = Callable[[nn.Module, Tensor, Tensor], Any]
"""From a model, inputs and targets to what an objective returns."""


def table(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@dataclass(frozen=True, repr=False)
class Linearized:
    """A matrix in blocks at the parameters of a model."""

    model: nn.Module
    blocks: Sequence[Block]
    matrix: BlockOperator

    def error(self, dense: Tensor, num_probes: int | None = None) -> float:
        """The largest relative error of a block, on or off the diagonal.

        With ``num_probes``, that of the products of each block with so many random vectors.
        """
        rows = oracles.positions(self.model)
        owned = [torch.cat([rows[param] for param in block.params]) for block in self.blocks]
        generator = torch.Generator().manual_seed(0)
        errors = []
        for column, block in enumerate(self.blocks):
            probes = (
                torch.eye(block.size)
                if num_probes is None
                else torch.randn(num_probes, block.size, generator=generator)
            ).to(block.params[0].dtype)
            for row in range(len(self.blocks)):
                products = torch.stack([self.matrix.product(row, column, probe) for probe in probes])
                expected = (probes.double() @ dense[owned[row]][:, owned[column]].T).detach()
                difference = (products.detach() - expected).norm()
                errors.append(float(difference and difference / expected.norm()))
        return max(errors)


def linearized(
    curvature: Curvature,
    case: Case,
    partition: str = "two uneven",
    *,
    dtype: torch.dtype = torch.float64,
    objective: Written | None = None,
    products: Products | None = None,
    curvature_batch: Any = None,
    **options: Any,
) -> Linearized:
    """The matrix of a case, made as the optimizer makes it: a plan, the gradient, the linearization.

    Args:
        curvature: Which matrix.
        case: Of what.
        partition: The name of a partition.
        dtype: Of parameters and inputs.
        objective: Another objective than the case's own.
        products: How to multiply; by double backward, if nothing is said.
        curvature_batch: The samples of the curvature, or how many are taken from the front.
        options: Further options of ``Samples``.
    """
    model = case.model().to(dtype)
    blocks = as_blocks(PARTITIONS[partition](model))
    inputs, targets = case.batch()
    batch = (inputs.to(dtype) if inputs.is_floating_point() else inputs, targets)
    function: Objective = (
        case.objective(model, options.get("reduction", "mean"))
        if objective is None
        else lambda batch: objective(model, *batch)
    )
    way = products or DoubleBackward()
    number, given = batch_size(batch), None
    if isinstance(curvature_batch, int):
        number = curvature_samples(curvature_batch, number, largest_block=0)
    elif curvature_batch is not None:
        given = [batch_size(curvature_batch)]
    state = PolicyState()
    gradient = curved = Role([batch_size(batch)])
    if given is not None:
        curved = Role(given)
    elif number < batch_size(batch):
        curved = Role(gradient.sizes, torch.arange(number))

    def make_point(own: Any, share: Share) -> Point:
        return Point(
            Samples(function, own, blocks, share=share, **options), Linearizer(curvature, way, state)
        )

    update = Update.begin(
        Plan(gradient, curved, given=given is not None),
        0,
        batch,
        curvature_batch,
        make_point,
        groups=[],
        population=None,
        watch=Stopwatch(torch.device("cpu"), memory=False),
    )
    torch.manual_seed(case.seed)
    update.point.gradient()
    torch.manual_seed(DRAW_SEED)
    matrix = way.linearize(curvature, update.curvature.samples, [100] * len(blocks), state)
    return Linearized(model, blocks, matrix)


def parts(batch: Any, size: int) -> list[Any]:
    return [take(batch, start, start + size) for start in range(0, len(batch[1]), size)]


@functools.cache
def dense_gauss_newton(case: Case) -> Tensor:
    return oracles.gauss_newton(case, case.batch())


@functools.cache
def dense_hessian(case: Case) -> Tensor:
    return oracles.loss_hessian(case, case.batch())


def mlp(*sizes: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def squares(model: nn.Module) -> Callable[[Any], tuple[Tensor, Tensor]]:
    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, F.mse_loss(outputs, batch[1])

    return objective


def branching(model: nn.Module) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """Can be neither traced nor formed, as it asks for a value."""

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        if float(outputs.detach().sum()) > 1e9:
            outputs = outputs.abs()
        return outputs, F.mse_loss(outputs, batch[1])

    return objective


def data(num_samples: int, num_inputs: int = 3, num_outputs: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return (
        torch.randn(num_samples, num_inputs, generator=generator, dtype=torch.float64),
        torch.randn(num_samples, num_outputs, generator=generator, dtype=torch.float64),
    )


def step(optimizer: BlockHF, model: nn.Module, num_samples: int) -> None:
    optimizer.step(squares(model), data(num_samples))


def ways(optimizer: BlockHF) -> list[str]:
    """How the last step made its products, by block."""
    assert optimizer.report is not None
    return [block.products for block in optimizer.report.blocks]
