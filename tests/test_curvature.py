"""Curvature products against dense matrices, and the contract of curvatures.

The matrices are made as the optimizer makes them: a problem, its gradient, its linearization.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Normal, Poisson
from torch.nn import functional as F

import oracles
from blockhf import BlockHF
from blockhf.blocks import Block
from blockhf.curvature import (
    Curvature,
    DoubleBackward,
    EmpiricalFisher,
    GaussNewton,
    Hessian,
    MonteCarloFisher,
    Products,
)
from blockhf.objective import Problem, take
from blockhf.operators import BlockMatrix, DiagonalBlock
from cases import (
    CASES,
    CROSS_ENTROPY,
    MLP,
    MSE,
    NUM_CLASSES,
    NUM_SAMPLES,
    ONE_PER_NETWORK,
    PARTITIONS,
    PHYSICS,
    Case,
    Network,
    as_blocks,
    vectors,
)

RTOL = 1e-10
NUM_DRAWS = 3
DRAW_SEED = 7
PLAIN = Case(MLP, CROSS_ENTROPY)

Objective = Callable[[nn.Module, Tensor, Tensor], Any]


def table(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def objectives(*functions: Objective) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("objective", functions, ids=lambda function: function.__name__)


def sampled(cases: Sequence[Case]) -> list[Case]:
    """Those whose samples a Fisher matrix can tell apart."""
    return [case for case in cases if case.network.separable and case.network.has_samples]


@dataclass(frozen=True, repr=False)
class Linearized:
    """A matrix in blocks at the parameters of a model."""

    model: nn.Module
    blocks: Sequence[Block]
    matrix: BlockMatrix

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
                expected = probes.double() @ dense[owned[row]][:, owned[column]].T
                difference = (products - expected).norm()
                errors.append(float(difference and difference / expected.norm()))
        return max(errors)


def linearized(
    curvature: Curvature,
    case: Case,
    partition: str = "two uneven",
    *,
    dtype: torch.dtype = torch.float64,
    objective: Objective | None = None,
    products: Products | None = None,
    **options: Any,
) -> Linearized:
    model = case.model().to(dtype)
    blocks = as_blocks(PARTITIONS[partition](model))
    inputs, targets = case.batch()
    batch = (inputs.to(dtype) if inputs.is_floating_point() else inputs, targets)
    problem = Problem(
        case.objective(model, options.get("reduction", "mean"))
        if objective is None
        else lambda batch: objective(model, *batch),
        batch,
        blocks,
        **options,
    )
    torch.manual_seed(case.seed)
    problem.differentiate()
    torch.manual_seed(DRAW_SEED)
    way = products or DoubleBackward()
    return Linearized(model, blocks, way.linearize(curvature, problem, [100] * len(blocks)))


def parts(batch: Any, size: int) -> list[Any]:
    return [take(batch, start, start + size) for start in range(0, len(batch[1]), size)]


def categorical(network: Network) -> Callable[..., Distribution]:
    return lambda *outputs: Categorical(logits=network.predict(*outputs))


@functools.cache
def dense_gauss_newton(case: Case) -> Tensor:
    return oracles.gauss_newton(case, case.batch())


@functools.cache
def dense_hessian(case: Case) -> Tensor:
    return oracles.loss_hessian(case, case.batch())


# Every block equals the dense one.


@pytest.mark.parametrize("partition", PARTITIONS)
@table(CASES)
def test_gauss_newton_equals_the_dense_blocks(case: Case, partition: str) -> None:
    assert linearized(GaussNewton(), case, partition).error(dense_gauss_newton(case)) < RTOL


@pytest.mark.parametrize("partition", PARTITIONS)
@table(ONE_PER_NETWORK)
def test_hessian_equals_the_dense_blocks(case: Case, partition: str) -> None:
    assert linearized(Hessian(), case, partition).error(dense_hessian(case)) < RTOL


@table([case for case in CASES if case not in ONE_PER_NETWORK])
def test_hessian_equals_the_dense_blocks_for_every_other_loss(case: Case) -> None:
    assert linearized(Hessian(), case).error(dense_hessian(case)) < RTOL


@table(sampled(CASES))
def test_empirical_fisher_equals_the_mean_of_outer_products(case: Case) -> None:
    dense = oracles.empirical_fisher(case, *parts(case.batch(), 1))
    if case.network.random:
        # The oracle runs sample by sample, so that is how random numbers must be drawn.
        actual = linearized(EmpiricalFisher(), case, micro_batch_size=1)
        assert actual.error(dense, num_probes=2) < RTOL
    else:
        assert linearized(EmpiricalFisher(), case).error(dense) < RTOL


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


# What an objective may return.


def chunks(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    outputs = model(inputs).chunk(2, dim=1)
    return outputs, F.cross_entropy(torch.cat(outputs, dim=1), targets)


def columns(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    outputs = model(inputs).unbind(1)
    return list(outputs), F.cross_entropy(torch.stack(outputs, dim=1), targets)


def samples_in_a_nest(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    first, *others = model(inputs).split(1)
    nest = {"first": first, "others": [tuple(others[:2]), {"rest": others[2:]}]}
    return nest, F.cross_entropy(torch.cat([first, *others]), targets)


def samples_last(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    outputs = model(inputs).t()
    return outputs, F.cross_entropy(outputs.t(), targets)


def an_output_that_the_loss_ignores(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    hidden = model[:2](inputs)
    logits, other = model[2](hidden), model[2](hidden).square()
    return (logits, other), F.cross_entropy(logits, targets)


def an_output_without_derivatives(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    logits = model(inputs)
    nest = (logits, logits.argmax(1), logits.detach(), None, "a note")
    return nest, F.cross_entropy(logits, targets)


def a_loss_linear_in_one_output(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    logits, bonus = model(inputs), model[0](inputs).sum(1)
    return (bonus, logits), F.cross_entropy(logits, targets) + bonus.mean()


def a_loss_of_one_element(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    outputs = model(inputs)
    return outputs, F.cross_entropy(outputs, targets).reshape(1, 1)


def weight_decay(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    outputs = model(inputs)
    decay = sum(param.square().sum() for param in model.parameters())
    return outputs, F.cross_entropy(outputs, targets) + decay


@objectives(
    chunks,
    columns,
    samples_in_a_nest,
    samples_last,
    an_output_that_the_loss_ignores,
    an_output_without_derivatives,
    a_loss_linear_in_one_output,
    a_loss_of_one_element,
    weight_decay,  # does not reach the parameters through the outputs
)
def test_gauss_newton_does_not_depend_on_the_form_of_the_outputs(objective: Objective) -> None:
    actual = linearized(GaussNewton(), PLAIN, objective=objective)
    assert actual.error(dense_gauss_newton(PLAIN)) < RTOL


@objectives(chunks, an_output_that_the_loss_ignores)
def test_empirical_fisher_does_not_depend_on_the_form_of_the_outputs(objective: Objective) -> None:
    dense = oracles.empirical_fisher(PLAIN, *parts(PLAIN.batch(), 1))
    assert linearized(EmpiricalFisher(), PLAIN, objective=objective).error(dense) < RTOL


def test_hessian_takes_a_loss_without_outputs() -> None:
    actual = linearized(Hessian(), PLAIN, objective=lambda *args: weight_decay(*args)[1])
    decay = 2 * torch.eye(len(dense_hessian(PLAIN)), dtype=torch.float64)
    assert actual.error(dense_hessian(PLAIN) + decay) < RTOL


@pytest.mark.parametrize(
    "curvature",
    [GaussNewton(), Hessian(), EmpiricalFisher()],
    ids=lambda curvature: type(curvature).__name__,
)
def test_a_parameter_that_is_not_used_has_zero_rows_and_columns(curvature: Curvature) -> None:
    used, unused = nn.Linear(3, 2).double(), nn.Parameter(torch.ones(4, dtype=torch.float64))

    def objective(batch: Tensor) -> tuple[Tensor, Tensor]:
        outputs = used(batch)
        return outputs, outputs.square().mean()

    blocks = [Block("all", (used.weight, unused, used.bias))]
    problem = Problem(objective, vectors(4), blocks)
    problem.differentiate()
    matrix = DoubleBackward().linearize(curvature, problem)
    rows = torch.stack([matrix.product(0, 0, vector) for vector in torch.eye(12).double()])
    assert not rows[6:10].any()
    assert not rows[:, 6:10].any()
    assert rows[:6, :6].norm() > 0


def test_a_block_in_which_the_loss_is_linear_has_a_zero_hessian() -> None:
    slope, weight = torch.ones(3).double().requires_grad_(), torch.ones(2).double().requires_grad_()

    def objective(batch: Tensor) -> Tensor:
        return (batch @ slope).mean() + weight.square().sum()

    problem = Problem(objective, vectors(4), [Block("linear", (slope,)), Block("curved", (weight,))])
    problem.differentiate()
    matrix = DoubleBackward().linearize(Hessian(), problem)
    assert not matrix.product(0, 0, torch.ones(3).double()).any()
    assert not matrix.product(1, 0, torch.ones(3).double()).any()
    assert not matrix.product(0, 1, torch.ones(2).double()).any()
    assert matrix.product(1, 1, torch.ones(2).double()).tolist() == [2.0, 2.0]


# What an objective may not return, and what to do about it.


def detached(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    outputs = model(inputs)
    return outputs.detach(), F.cross_entropy(outputs, targets)


def recomputed(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    return model(inputs), F.cross_entropy(model(inputs), targets)


def loss_of_the_whole_and_outputs_in_chunks(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    outputs = model(inputs)
    return outputs.chunk(2, dim=1), F.cross_entropy(outputs, targets)


def loss_of_a_detached_copy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    outputs = model(inputs)
    return outputs, F.cross_entropy(outputs.detach(), targets) + model[0].weight.square().sum()


def no_outputs(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    return F.cross_entropy(model(inputs), targets)


def loss_of_each_sample(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    outputs = model(inputs)
    return outputs, F.cross_entropy(outputs, targets, reduction="none")


def loss_as_a_number(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    outputs = model(inputs)
    return outputs, F.cross_entropy(outputs, targets).item()


def three_things(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    outputs = model(inputs)
    return outputs, F.cross_entropy(outputs, targets), targets


def outputs_of_the_last_layer_alone(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    hidden = model[:2](inputs)
    outputs = model[2](hidden.detach())
    return outputs, F.cross_entropy(outputs, targets) + hidden.square().mean()


def loss_linear_in_the_outputs(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    outputs = F.log_softmax(model(inputs), dim=1)
    return outputs, -outputs.gather(1, targets.unsqueeze(1)).mean()


def hidden_and_logits(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    hidden = model[:2](inputs)
    logits = model[2](hidden)
    return (hidden, logits), F.cross_entropy(logits, targets) + hidden.square().mean()


def the_same_twice(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    outputs = model(inputs)
    return (outputs, outputs), F.cross_entropy(outputs, targets)


def a_whole_and_its_part(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    outputs = model(inputs)
    return (outputs, outputs[:, 0]), F.cross_entropy(outputs, targets) + outputs[:, 0].square().mean()


REMEDIES = {
    detached: r"no outputs that can be differentiated.* Write `return outputs, loss`",
    no_outputs: r"no outputs that can be differentiated.* Write `return outputs, loss`",
    recomputed: r"does not depend on the outputs.* Write `return outputs, loss`",
    loss_of_the_whole_and_outputs_in_chunks: r"does not depend on the outputs.* Write `return outputs, loss`",
    loss_of_a_detached_copy: r"does not depend on the outputs.* Write `return outputs, loss`",
    loss_of_each_sample: r"has shape \(5,\).* Write loss.mean\(\), or loss.sum\(\)",
    loss_as_a_number: r"is a float.* Leave out .item\(\) and float\(\)",
    three_things: r"returned a tuple, not a pair. Write `return outputs, loss`",
    outputs_of_the_last_layer_alone: r"do not depend on block '0'.* Return all the outputs .* or freeze",
    loss_linear_in_the_outputs: r"linear in the outputs.* Return what comes before .* or use curvature=",
    hidden_and_logits: r"Output 1, .*computed from another output. Return only .* the logits",
    the_same_twice: r"Output 0, .*computed from another output. Return only",
    a_whole_and_its_part: r"Output 1, .*computed from another output. Return only",
}


@objectives(*REMEDIES)
def test_gauss_newton_names_the_remedy_for(objective: Objective) -> None:
    with pytest.raises(ValueError, match=REMEDIES[objective]):
        linearized(GaussNewton(), PLAIN, "by layer", objective=objective)


def test_log_probabilities_as_outputs_have_no_curvature_and_the_report_says_so() -> None:
    """The second derivatives of nll_loss are zeros, but zeros in the graph: it is no structural error.

    A loss may well be flat for a while, like Huber's far from the targets, so training goes on.
    """
    model = PLAIN.model()

    def objective(batch: Any) -> Any:
        outputs = F.log_softmax(model(batch[0]), dim=1)
        return outputs, F.nll_loss(outputs, batch[1])

    optimizer = BlockHF.paper(model.parameters(), damping=0.0)
    optimizer.step(objective, PLAIN.batch())
    assert optimizer.report is not None
    assert not optimizer.report.accepted
    assert optimizer.report.reason == "no block has a direction of positive curvature"


FISHER_REMEDIES = {
    detached: r"Write `return outputs, loss`",
    recomputed: r"Write `return outputs, loss`",
    hidden_and_logits: r"Return only .* the logits",
    samples_last: r"5 of them, but the outputs have shapes \(3, 5\). Move the sample dimension to the front",
    samples_in_a_nest: r"outputs have shapes \(1, 3\), .* or use GaussNewton\(\)",
}


@objectives(*FISHER_REMEDIES)
@pytest.mark.parametrize(
    "curvature",
    [EmpiricalFisher(), MonteCarloFisher(categorical(MLP))],
    ids=lambda curvature: type(curvature).__name__,
)
def test_fisher_matrices_name_the_remedy_for(objective: Objective, curvature: Curvature) -> None:
    with pytest.raises(ValueError, match=FISHER_REMEDIES[objective]):
        linearized(curvature, PLAIN, objective=objective)


@table(PHYSICS)
def test_fisher_matrices_refuse_outputs_that_are_not_of_samples(case: Case) -> None:
    with pytest.raises(
        ValueError, match=r"outputs have shapes \(5, 1\), \(2, 1\). Move the sample dimension"
    ):
        linearized(EmpiricalFisher(), case)


def test_fisher_matrices_refuse_outputs_without_dimensions() -> None:
    def objective(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
        output = model(inputs).mean()
        return output, output.square()

    with pytest.raises(ValueError, match="needs outputs with the samples first"):
        linearized(EmpiricalFisher(), PLAIN, objective=objective)


def test_monte_carlo_fisher_needs_a_draw() -> None:
    with pytest.raises(ValueError, match="num_draws is 0, but must be at least 1"):
        MonteCarloFisher(categorical(MLP), num_draws=0)
