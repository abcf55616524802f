"""Curvature products against dense matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Distribution, Normal, Poisson

import oracles
from blockhf import Curvature, EmpiricalFisher, GaussNewton, Hessian, MonteCarloFisher
from blockhf.batches import take
from blockhf.linalg import DiagonalBlock
from cases import (
    CASES,
    CROSS_ENTROPY,
    MLP,
    MSE,
    NUM_CLASSES,
    NUM_SAMPLES,
    ONE_PER_NETWORK,
    PARTITIONS,
    Case,
    Network,
    vectors,
)
from curvature_tasks import (
    DRAW_SEED,
    OTHER_LOSSES,
    RTOL,
    dense_gauss_newton,
    dense_hessian,
    linearized,
    parts,
    table,
)

NUM_DRAWS = 3
PLAIN = Case(MLP, CROSS_ENTROPY)


def sampled(cases: Sequence[Case]) -> list[Case]:
    """Those whose samples a Fisher matrix can tell apart."""
    return [case for case in cases if case.network.separable and case.network.has_samples]


def categorical(network: Network) -> Callable[..., Distribution]:
    return lambda *outputs: Categorical(logits=network.predict(*outputs))


# Every block equals the dense one.


@pytest.mark.parametrize("partition", PARTITIONS)
@table(ONE_PER_NETWORK)
def test_gauss_newton_equals_the_dense_blocks(case: Case, partition: str) -> None:
    assert linearized(GaussNewton(), case, partition).error(dense_gauss_newton(case)) < RTOL


@table(OTHER_LOSSES)
def test_gauss_newton_equals_the_dense_blocks_for_every_other_loss(case: Case) -> None:
    assert linearized(GaussNewton(), case).error(dense_gauss_newton(case), num_probes=2) < RTOL


@pytest.mark.parametrize("partition", PARTITIONS)
@table(ONE_PER_NETWORK)
def test_hessian_equals_the_dense_blocks(case: Case, partition: str) -> None:
    assert linearized(Hessian(), case, partition).error(dense_hessian(case)) < RTOL


@table(OTHER_LOSSES)
def test_hessian_equals_the_dense_blocks_for_every_other_loss(case: Case) -> None:
    assert linearized(Hessian(), case).error(dense_hessian(case), num_probes=2) < RTOL


@table(sampled(CASES))
def test_empirical_fisher_equals_the_mean_of_outer_products(case: Case) -> None:
    dense = oracles.empirical_fisher(case, *parts(case.batch(), 1))
    if case.network.random:
        # The oracle runs sample by sample, so that is how random numbers must be drawn.
        actual = linearized(EmpiricalFisher(), case, micro_batch_size=1)
        assert actual.error(dense, num_probes=2) < RTOL
    else:
        num_probes = None if case in ONE_PER_NETWORK else 2
        assert linearized(EmpiricalFisher(), case).error(dense, num_probes) < RTOL


@table(sampled(ONE_PER_NETWORK))
def test_monte_carlo_fisher_equals_the_mean_over_the_targets_drawn(case: Case) -> None:
    distribution = categorical(case.network)
    dense = oracles.monte_carlo_fisher(case, distribution, NUM_DRAWS, DRAW_SEED, case.batch())
    assert linearized(MonteCarloFisher(distribution, NUM_DRAWS), case).error(dense) < RTOL


@pytest.mark.parametrize(
    "distribution",
    [
        lambda outputs: Normal(outputs, 0.5),
        lambda outputs: Bernoulli(logits=outputs),
        lambda outputs: Poisson(outputs.exp()),
    ],
    ids=["normal", "bernoulli", "poisson"],
)
def test_monte_carlo_fisher_takes_any_distribution(distribution: Callable[..., Distribution]) -> None:
    case = Case(MLP, MSE)
    dense = oracles.monte_carlo_fisher(case, distribution, NUM_DRAWS, DRAW_SEED, case.batch())
    assert linearized(MonteCarloFisher(distribution, NUM_DRAWS), case).error(dense) < RTOL


def test_monte_carlo_fisher_approaches_gauss_newton() -> None:
    case = Case(Network("linear", lambda: nn.Linear(3, NUM_CLASSES), vectors), CROSS_ENTROPY)
    dense = dense_gauss_newton(case)
    mean, variance = oracles.categorical_fisher(case, case.batch())
    torch.testing.assert_close(mean, dense, rtol=RTOL, atol=RTOL)

    num_draws = 1000
    standard_error = (variance / num_draws).sqrt()
    estimate = linearized(MonteCarloFisher(categorical(case.network), num_draws), case, "single")
    actual = torch.stack([estimate.matrix.product(0, 0, row) for row in torch.eye(len(dense)).double()])
    assert 5 * standard_error.norm() < 0.25 * dense.norm()
    assert ((actual - dense).abs() <= 5 * standard_error + RTOL).all()


def test_a_diagonal_block_multiplies_as_its_matrix_does() -> None:
    actual = linearized(GaussNewton(), PLAIN)
    vector = torch.randn(actual.blocks[1].size, dtype=torch.float64)
    product = DiagonalBlock(actual.matrix, 1) @ vector
    torch.testing.assert_close(product, actual.matrix.product(1, 1, vector), rtol=0, atol=0)


@table([case for case in ONE_PER_NETWORK if case.network.name in ("gru", "lstm", "transformer layer")])
@pytest.mark.parametrize("curvature", [GaussNewton(), Hessian()], ids=["GaussNewton", "Hessian"])
def test_kernels_for_float32_are_differentiated_twice(case: Case, curvature: Curvature) -> None:
    dense = dense_gauss_newton(case) if isinstance(curvature, GaussNewton) else dense_hessian(case)
    assert linearized(curvature, case, "single", dtype=torch.float32).error(dense, num_probes=2) < 1e-5


# Which samples, in which parts, and how they are summed up.


@table([case for case in ONE_PER_NETWORK if case.network.separable])
def test_micro_batches_leave_gauss_newton_and_hessian_as_they_are(case: Case) -> None:
    batches = parts(case.batch(), 2)
    actual = linearized(GaussNewton(), case, micro_batch_size=2)
    assert actual.error(oracles.gauss_newton(case, *batches), num_probes=2) < RTOL
    actual = linearized(Hessian(), case, micro_batch_size=2)
    assert actual.error(oracles.loss_hessian(case, *batches), num_probes=2) < RTOL


@table(sampled(ONE_PER_NETWORK))
def test_micro_batches_leave_fisher_matrices_as_they_are(case: Case) -> None:
    if not case.network.random:
        dense = oracles.empirical_fisher(case, *parts(case.batch(), 1))
        assert linearized(EmpiricalFisher(), case, micro_batch_size=2).error(dense, num_probes=2) < RTOL
    distribution = categorical(case.network)
    dense = oracles.monte_carlo_fisher(case, distribution, NUM_DRAWS, DRAW_SEED, *parts(case.batch(), 2))
    actual = linearized(MonteCarloFisher(distribution, NUM_DRAWS), case, micro_batch_size=2)
    assert actual.error(dense, num_probes=2) < RTOL


@pytest.mark.parametrize("micro_batch_size", [NUM_SAMPLES, NUM_SAMPLES + 1])
def test_a_micro_batch_that_holds_the_batch_changes_nothing(micro_batch_size: int) -> None:
    actual = linearized(GaussNewton(), PLAIN, micro_batch_size=micro_batch_size)
    assert actual.error(dense_gauss_newton(PLAIN)) < RTOL


@table(ONE_PER_NETWORK)
def test_a_number_of_curvature_samples_is_taken_from_the_front(case: Case) -> None:
    dense = oracles.gauss_newton(case, take(case.batch(), 0, 3))
    assert linearized(GaussNewton(), case, curvature_batch=3).error(dense, num_probes=2) < RTOL


@pytest.mark.parametrize("number", [NUM_SAMPLES, NUM_SAMPLES + 1])
def test_a_number_of_curvature_samples_beyond_the_batch_takes_all(number: int) -> None:
    assert linearized(GaussNewton(), PLAIN, curvature_batch=number).error(dense_gauss_newton(PLAIN)) < RTOL


@table(ONE_PER_NETWORK)
def test_a_curvature_batch_of_its_own_is_used_alone(case: Case) -> None:
    other = case.batch(num_samples=4, seed=1)
    dense = oracles.gauss_newton(case, other)
    assert linearized(GaussNewton(), case, curvature_batch=other).error(dense, num_probes=2) < RTOL


@table([case for case in ONE_PER_NETWORK if case.network.separable])
def test_curvature_samples_may_come_in_micro_batches(case: Case) -> None:
    dense = oracles.gauss_newton(case, *parts(take(case.batch(), 0, 4), 3))
    actual = linearized(GaussNewton(), case, curvature_batch=4, micro_batch_size=3)
    assert actual.error(dense, num_probes=2) < RTOL

    other = case.batch(num_samples=4, seed=1)
    dense = oracles.gauss_newton(case, *parts(other, 3))
    actual = linearized(GaussNewton(), case, curvature_batch=other, micro_batch_size=3)
    assert actual.error(dense, num_probes=2) < RTOL


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("num_curvature_samples", [3, NUM_SAMPLES])
def test_a_sum_over_curvature_samples_is_scaled_up_to_the_batch(
    num_curvature_samples: int, micro_batch_size: int | None
) -> None:
    batch = take(PLAIN.batch(), 0, num_curvature_samples)
    batches = parts(batch, micro_batch_size or NUM_SAMPLES)
    distribution = categorical(PLAIN.network)
    means = {
        GaussNewton(): oracles.gauss_newton(PLAIN, *batches),
        Hessian(): oracles.loss_hessian(PLAIN, *batches),
        EmpiricalFisher(): oracles.empirical_fisher(PLAIN, *parts(batch, 1)),
        MonteCarloFisher(distribution, NUM_DRAWS): oracles.monte_carlo_fisher(
            PLAIN, distribution, NUM_DRAWS, DRAW_SEED, *batches
        ),
    }
    for curvature, mean in means.items():
        actual = linearized(
            curvature,
            PLAIN,
            reduction="sum",
            curvature_batch=num_curvature_samples,
            micro_batch_size=micro_batch_size,
        )
        assert actual.error(NUM_SAMPLES * mean, num_probes=2) < RTOL
