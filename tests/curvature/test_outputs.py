"""What an objective may return, what it may not, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

import oracles
from blockhf import (
    BlockHF,
    BlockOperator,
    Curvature,
    DoubleBackward,
    EmpiricalFisher,
    GaussNewton,
    Hessian,
    MonteCarloFisher,
    Samples,
)
from blockhf.blocks import Block
from blockhf.objective import Objective
from cases import CROSS_ENTROPY, MLP, PARTITIONS, PHYSICS, Case, vectors
from curvature_tasks import RTOL, Written, dense_gauss_newton, dense_hessian, linearized, parts, table

PLAIN = Case(MLP, CROSS_ENTROPY)


def objectives(*functions: Written) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("objective", functions, ids=lambda function: function.__name__)


def drawn() -> MonteCarloFisher:
    return MonteCarloFisher(lambda outputs: Categorical(logits=outputs))


def matrix_of(curvature: Curvature, objective: Objective, blocks: Sequence[Block]) -> BlockOperator:
    return DoubleBackward().operator(curvature, Samples(objective, vectors(4), blocks))


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
def test_gauss_newton_does_not_depend_on_the_form_of_the_outputs(objective: Written) -> None:
    actual = linearized(GaussNewton(), PLAIN, objective=objective)
    assert actual.error(dense_gauss_newton(PLAIN)) < RTOL


@objectives(chunks, an_output_that_the_loss_ignores)
def test_empirical_fisher_does_not_depend_on_the_form_of_the_outputs(objective: Written) -> None:
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
    matrix = matrix_of(curvature, objective, blocks)
    rows = torch.stack([matrix.product(0, 0, vector) for vector in torch.eye(12).double()])
    assert not rows[6:10].any()
    assert not rows[:, 6:10].any()
    assert rows[:6, :6].norm() > 0


def test_a_block_in_which_the_loss_is_linear_has_a_zero_hessian() -> None:
    slope, weight = torch.ones(3).double().requires_grad_(), torch.ones(2).double().requires_grad_()

    def objective(batch: Tensor) -> Tensor:
        return (batch @ slope).mean() + weight.square().sum()

    matrix = matrix_of(Hessian(), objective, [Block("linear", (slope,)), Block("curved", (weight,))])
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
    hidden_and_logits: r"Output 1, .*computed from another output. Return only .* the logits",
    the_same_twice: r"Output 0, .*computed from another output. Return only",
    a_whole_and_its_part: r"Output 1, .*computed from another output. Return only",
}


@objectives(*REMEDIES)
def test_gauss_newton_names_the_remedy_for(objective: Written) -> None:
    with pytest.raises(ValueError, match=REMEDIES[objective]):
        linearized(GaussNewton(), PLAIN, "by layer", objective=objective)


def test_a_block_that_the_loss_uses_beside_the_outputs_is_named_once() -> None:
    model = PLAIN.model()
    layers = PARTITIONS["by layer"](model)

    def objective(batch: Any) -> Any:
        return outputs_of_the_last_layer_alone(model, *batch)

    optimizer = BlockHF.martens(layers)
    with pytest.warns(
        UserWarning, match=r"depends on block '0', but the outputs do not.* Return all the out"
    ):
        optimizer.step(objective, PLAIN.batch())
    assert optimizer.report is not None
    assert optimizer.report.blocks[0].status == "no influence"
    assert len(optimizer.report.warnings) == 1
    optimizer.step(objective, PLAIN.batch())
    assert optimizer.report.warnings == ()


def test_log_probabilities_as_outputs_have_no_curvature_and_the_report_says_so() -> None:
    """The second derivatives of nll_loss are zeros, but zeros in the graph: it is no structural error.

    A loss may well be flat for a while, like Huber's far from the targets, so training goes on.
    """
    model = PLAIN.model()

    def objective(batch: Any) -> Any:
        outputs = F.log_softmax(model(batch[0]), dim=1)
        return outputs, F.nll_loss(outputs, batch[1])

    optimizer = BlockHF.paper(model.parameters(), damping=0.0)
    with pytest.warns(UserWarning, match=r"The curvature along the gradient is zero.* e\.g\. the logits"):
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
    [EmpiricalFisher(), drawn()],
    ids=lambda curvature: type(curvature).__name__,
)
def test_fisher_matrices_name_the_remedy_for(objective: Written, curvature: Curvature) -> None:
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
        MonteCarloFisher(Categorical, num_draws=0)
