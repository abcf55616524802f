"""Products within a subspace, ``vᵢᵀ G vⱼ``, against dense matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracles
from blockhf import Auto, DoubleBackward, EmpiricalFisher, Formed, GaussNewton, Hessian, Traced
from blockhf.batches import take
from blockhf.blocks import Block
from blockhf.curvature import Curvature, Products, auto
from blockhf.linalg import BlockOperator, Described
from blockhf.point import Linearizer, Point
from blockhf.policy import PolicyState
from blockhf.samples import Samples
from cases import CROSS_ENTROPY, MLP, NUM_SAMPLES, ONE_PER_NETWORK, PARTITIONS, Case, as_blocks

PLAIN = Case(MLP, CROSS_ENTROPY)


@dataclass(frozen=True, repr=False)
class Linearized:
    """A matrix in blocks at the parameters of a model."""

    model: nn.Module
    point: Point
    operator: BlockOperator


def linearized(
    curvature: Curvature, case: Case, products: Products, partition: str = "two uneven", **options: Any
) -> Linearized:
    model = case.model()
    blocks = as_blocks(PARTITIONS[partition](model))
    samples = Samples(case.objective(model), case.batch(), blocks, **options)
    point = Point(samples, Linearizer(curvature, products, PolicyState()))
    torch.manual_seed(case.seed)
    point.gradient()
    budget = [100] * len(blocks)
    return Linearized(model, point, products.linearize(curvature, samples, budget, PolicyState()))


@functools.cache
def dense(case: Case) -> Tensor:
    return oracles.gauss_newton(case, case.batch())


def gram_error(actual: Linearized, whole_matrix: Tensor) -> float:
    """Of two vectors for each block, against the dense matrix; entries across blocks included."""
    rows = oracles.positions(actual.model)
    generator = torch.Generator().manual_seed(1)
    columns, vectors, whole = [], [], []
    for index, block in [*enumerate(actual.point.blocks), *enumerate(actual.point.blocks)]:
        vector = torch.randn(block.size, generator=generator, dtype=torch.float64)
        columns.append(index)
        vectors.append(vector)
        whole.append(torch.zeros(len(whole_matrix), dtype=torch.float64))
        whole[-1][torch.cat([rows[param] for param in block.params])] = vector
    D = torch.stack(whole, 1)
    expected = D.T @ whole_matrix @ D
    return float((actual.operator.gram(columns, vectors) - expected).norm() / expected.norm())


WAYS: dict[str, Callable[[], Any]] = {
    "double backward": DoubleBackward,
    "traced": Traced,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("case", ONE_PER_NETWORK, ids=lambda case: case.name)
def test_a_gram_matrix_of_gauss_newton_equals_the_dense_one(case: Case, way: Callable[[], Any]) -> None:
    actual = linearized(GaussNewton(), case, way())
    assert gram_error(actual, dense(case)) < 1e-10


@pytest.mark.parametrize("way", [Formed, Traced, Auto])
def test_so_it_does_where_blocks_are_formed_or_traced_in_parts(
    way: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "_NODE", 0)
    for options in ({}, {"micro_batch_size": 2}):
        actual = linearized(GaussNewton(), PLAIN, way(), "by layer", **options)
        assert gram_error(actual, dense(PLAIN)) < 1e-10
        noted = Linearized(actual.model, actual.point, Described(actual.operator, list))
        assert gram_error(noted, dense(PLAIN)) < 1e-10


@pytest.mark.parametrize("budget", [0, 2**40])
def test_so_it_does_over_micro_batches_that_are_kept_or_not(budget: int) -> None:
    way = DoubleBackward(memory_budget=budget)
    actual = linearized(GaussNewton(), PLAIN, way, micro_batch_size=2)
    assert gram_error(actual, dense(PLAIN)) < 1e-10


@pytest.mark.parametrize("way", [DoubleBackward, Traced])
def test_matrices_without_halves_get_it_by_products(way: Callable[[], Any]) -> None:
    fisher = oracles.empirical_fisher(PLAIN, *(take(PLAIN.batch(), i, i + 1) for i in range(NUM_SAMPLES)))
    curved: list[tuple[Curvature, Tensor]] = [
        (EmpiricalFisher(), fisher),
        (Hessian(), oracles.loss_hessian(PLAIN, PLAIN.batch())),
    ]
    for curvature, expected in curved:
        assert gram_error(linearized(curvature, PLAIN, way()), expected) < 1e-10


def test_blocks_that_do_not_influence_all_outputs_have_products_by_a_trace_too() -> None:
    encode, decode = nn.Linear(3, 2).double(), nn.Linear(2, 3).double()
    inputs = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def objective(batch: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        code = encode(batch)
        outputs = code.clone(), decode(code.tanh())
        return outputs, sum((own.square().sum(1).mean() for own in outputs), torch.zeros(()))

    parts = [Block(name, tuple(own.parameters())) for name, own in (("encode", encode), ("decode", decode))]
    grams = []
    for products in (Traced(), DoubleBackward()):
        samples = Samples(objective, inputs, parts)
        operator = products.linearize(GaussNewton(), samples, [10, 10], PolicyState())
        grams.append(operator.gram([0, 1], [torch.ones(block.size).double() for block in parts]))
    torch.testing.assert_close(*grams)
