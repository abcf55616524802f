"""Traced products against the same dense matrices as the double backward, and how long a trace lasts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockhf import (
    BlockHF,
    DoubleBackward,
    GaussNewton,
    Hessian,
    MonteCarloFisher,
    NoWalk,
    PolicyState,
    Samples,
    Traced,
    blocks,
)
from blockhf.blocks import Block
from blockhf.fx_graphs import TracingError
from cases import DROPOUT, MLP, ONE_PER_NETWORK, PARTITIONS, SCALED, TWO_HEADS, Case
from curvature_tasks import (
    OTHER_LOSSES,
    RTOL,
    data,
    dense_gauss_newton,
    dense_hessian,
    linearized,
    mlp,
    squares,
    step,
    table,
)


@pytest.mark.parametrize("partition", PARTITIONS)
@table(ONE_PER_NETWORK)
def test_traced_gauss_newton_equals_the_dense_blocks(case: Case, partition: str) -> None:
    actual = linearized(GaussNewton(), case, partition, products=Traced())
    assert actual.error(dense_gauss_newton(case)) < RTOL


@pytest.mark.parametrize(
    "case",
    [
        # A loss sees nothing of a network but the form of its outputs.
        pytest.param(case, marks=[] if case.network in (MLP, TWO_HEADS, SCALED) else pytest.mark.slow)
        for case in OTHER_LOSSES
    ],
    ids=lambda case: case.name,
)
def test_traced_gauss_newton_equals_the_dense_blocks_for_every_other_loss(case: Case) -> None:
    actual = linearized(GaussNewton(), case, products=Traced())
    assert actual.error(dense_gauss_newton(case), num_probes=2) < RTOL


@table(ONE_PER_NETWORK)
def test_a_traced_hessian_equals_the_dense_blocks(case: Case) -> None:
    assert linearized(Hessian(), case, products=Traced()).error(dense_hessian(case)) < RTOL


@table([case for case in ONE_PER_NETWORK if case.network.separable])
def test_traced_micro_batches_equal_those_of_the_double_backward(case: Case) -> None:
    plain = linearized(GaussNewton(), case, micro_batch_size=2)
    # Whether a part's residuals are kept or made again matters to random numbers, and to nothing else.
    budgets = [0, 2**40] if case.network in (MLP, DROPOUT) else [0]
    for budget in budgets:
        way = Traced(memory_budget=budget)
        actual = linearized(GaussNewton(), case, products=way, micro_batch_size=2)
        for index, block in enumerate(plain.blocks):
            vector = torch.randn(block.size, dtype=torch.float64)
            expected = plain.matrix.product(index, index, vector)
            torch.testing.assert_close(
                actual.matrix.product(index, index, vector), expected, rtol=1e-10, atol=1e-12
            )


def test_an_epoch_with_a_partial_last_batch_is_traced_twice_and_the_next_epochs_not_at_all(
    num_traces: list[int],
) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.by_layer(model), products=Traced())
    for _ in range(3):
        for num_samples in (8, 8, 8, 5):
            step(optimizer, model, num_samples)
    assert num_traces == [2]


def test_a_last_batch_that_is_dropped_leaves_one_trace(num_traces: list[int]) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.by_layer(model), products=Traced())
    for _ in range(5):
        step(optimizer, model, 8)
    assert num_traces == [1]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda model: model.eval(), id="mode"),
        pytest.param(lambda model: model[0].weight.requires_grad_(False), id="frozen parameter"),
    ],
)
def test_another_mode_or_other_parameters_are_traced_anew(
    change: Callable[[nn.Module], Any], num_traces: list[int]
) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.by_layer(model), products=Traced())
    step(optimizer, model, 8)
    change(model)
    step(optimizer, model, 8)
    step(optimizer, model, 8)
    assert num_traces == [2]


def test_the_trace_that_was_used_last_is_remembered_longest(num_traces: list[int]) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.single(model), products=Traced(max_traces=2))
    for num_samples in (8, 5, 8, 6, 8, 7, 8):
        step(optimizer, model, num_samples)
    assert num_traces == [4]


def test_no_more_traces_are_remembered_than_allowed(num_traces: list[int]) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.single(model), products=Traced(max_traces=1))
    for num_samples in (8, 5, 8):
        step(optimizer, model, num_samples)
    assert num_traces == [3]


def test_a_number_that_the_objective_takes_from_elsewhere_is_noticed_when_it_changes(
    num_traces: list[int],
) -> None:
    model, weight = mlp(3, 4, 2), [1.0]

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, weight[0] * F.mse_loss(outputs, batch[1])

    block = [Block("all", tuple(model.parameters()))]
    vector = torch.ones(block[0].size, dtype=torch.float64)
    state = PolicyState()

    def product() -> Tensor:
        samples = Samples(objective, data(4), block)
        return Traced().linearize(GaussNewton(), samples, [1], state).product(0, 0, vector)

    first = product()
    for number in range(2, 8):  # however often, if it stays for a while
        weight[0] = float(number)
        torch.testing.assert_close(product(), number * first)
        torch.testing.assert_close(product(), number * first)
        assert num_traces == [number]
    for number in range(8, 11):
        weight[0] = float(number)
        product()
    weight[0] = 11.0
    with pytest.raises(TracingError, match="changes from call to call"):
        product()


def test_an_objective_that_always_changes_ends_in_a_tracing_error() -> None:
    model, calls = mlp(3, 4, 2), [0]

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        calls[0] += 1
        outputs = model(batch[0])
        return outputs, calls[0] * F.mse_loss(outputs, batch[1])

    optimizer = BlockHF.martens(blocks.single(model), products=Traced())
    with pytest.raises(TracingError, match=r"changes from call to call|is off by"):
        optimizer.step(objective, data(8))


def test_random_draws_are_not_traced() -> None:
    model = mlp(3, 4, 2)
    drawn = MonteCarloFisher(lambda mean: torch.distributions.Normal(mean, 1.0))
    with pytest.raises(TracingError, match="Monte-Carlo"):
        step(BlockHF.martens(blocks.single(model), curvature=drawn, products=Traced()), model, 8)


def test_a_parameter_that_no_module_owns_cannot_be_traced() -> None:
    weight = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = batch[0] @ weight
        return outputs, F.mse_loss(outputs, batch[1])

    with pytest.raises(TracingError, match="1 parameters are owned by no module"):
        BlockHF.martens([weight], products=Traced()).step(objective, data(8))


def test_tracing_leaves_buffers_flags_and_random_numbers_alone() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    twin = copy.deepcopy(model)
    for one, way in ((model, Traced()), (twin, DoubleBackward())):
        torch.manual_seed(0)
        optimizer = BlockHF.paper(blocks.single(one), curvature_batch_size=6, damping=0.1, products=way)
        for _ in range(3):
            step(optimizer, one, 10)
        states = torch.get_rng_state()
        assert all(param.requires_grad for param in one.parameters())
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-8, atol=1e-12)
    assert torch.equal(states, torch.get_rng_state())


def test_residuals_of_micro_batches_are_kept_as_far_as_the_budget_goes() -> None:
    model = mlp(3, 4, 2)
    runs = {}
    for budget in (0, 800, 2**30):
        block = Block("all", tuple(model.parameters()))
        samples = Samples(squares(model), data(12), [block], micro_batch_size=3)
        matrix = Traced(memory_budget=budget).linearize(GaussNewton(), samples, [1], PolicyState())
        before = samples.ledger.work.num_linearizations
        matrix.product(0, 0, torch.ones(block.size, dtype=torch.float64))
        runs[budget] = samples.ledger.work.num_linearizations - before
    assert runs[0] >= 4
    assert 0 < runs[800] < 4
    assert runs[2**30] == 0


def test_slices_of_a_recurrence_are_put_together_at_once() -> None:
    class Recurrence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3, dtype=torch.float64) / 2)

        def forward(self, inputs: Tensor) -> Tensor:
            state, states = torch.zeros_like(inputs[:, 0]), []
            for entry in inputs.unbind(1):
                state = torch.tanh(entry + state @ self.weight)
                states.append(state)
            return torch.stack(states, 1)

    model, inputs = Recurrence(), torch.randn(4, 9, 3, dtype=torch.float64)

    def objective(batch: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(batch)
        return outputs, outputs.square().mean()

    samples, state = Samples(objective, inputs, [Block("all", (model.weight,))]), PolicyState()
    vector = torch.randn(9, dtype=torch.float64)
    actual = Traced().linearize(GaussNewton(), samples, [1], state).product(0, 0, vector)
    expected = DoubleBackward().operator(GaussNewton(), samples).product(0, 0, vector)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    (trace,) = state.cache["traces"].values()
    targets = [str(node.target) for node in trace._product.graph.nodes]
    assert "aten.select_backward.default" not in targets
    assert "aten.stack.default" in targets


def test_a_record_that_does_not_run_is_no_trace() -> None:
    """The LSTM of oneDNN is recorded with an argument that its kernel does not take back."""
    torch.manual_seed(0)
    lstm, head = nn.LSTM(32, 96, batch_first=True), nn.Linear(96, 5)
    model = nn.ModuleDict({"lstm": lstm, "head": head})
    batch = (torch.randn(256, 8, 32), torch.randint(0, 5, (256,)))

    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = head(lstm(batch[0])[0][:, -1])
        return outputs, nn.functional.cross_entropy(outputs, batch[1])

    optimizer = BlockHF(blocks.by_module(model), walk=NoWalk())
    with warnings.catch_warnings():  # torch has other kernels on other machines
        warnings.filterwarnings(
            "ignore", "This objective cannot be traced: the recorded operations do not run"
        )
        first = optimizer.step(objective, batch)
    assert optimizer.report is not None
    assert optimizer.report.accepted
    assert float(optimizer.step(objective, batch)) < float(first)
