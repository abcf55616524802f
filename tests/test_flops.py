"""Counted operations: against torch's own counter, and once each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from blockhf import BlockHF, DoubleBackward, Formed, GaussNewton, Traced, blocks
from blockhf.flops import Counter, Meter
from blockhf.objective import Problem
from cases import CROSS_ENTROPY, NETWORKS, Case, as_blocks
from optimizer_tasks import Task

CASES = [Case(network, CROSS_ENTROPY) for network in NETWORKS if network.name in ("mlp", "residual cnn")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_and_forward_passes_cost_what_torchs_counter_says(case: Case) -> None:
    model = case.model()
    problem = Problem(case.objective(model), case.batch(), as_blocks(blocks.by_layer(model)))
    objective = case.objective(model)
    with FlopCounterMode(display=False) as gradient:
        torch.autograd.grad(objective(case.batch())[1], list(model.parameters()))
    with torch.no_grad(), FlopCounterMode(display=False) as forward:
        objective(case.batch())
    problem.differentiate()
    problem.loss_at([torch.zeros_like(value) for value in problem.origin])
    assert problem.meter.totals == {
        "gradient": gradient.get_total_flops(),
        "forward": forward.get_total_flops(),
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_traced_product_costs_what_it_costs_to_run_it(case: Case) -> None:
    model = case.model()
    problem = Problem(case.objective(model), case.batch(), as_blocks(blocks.by_layer(model)))
    problem.differentiate()
    matrix = Traced().linearize(GaussNewton(), problem)
    for index, block in enumerate(problem.blocks):
        vector = torch.ones(block.size, dtype=torch.float64)
        problem.meter.totals.clear()
        with Counter() as counter:
            matrix.product(index, index, vector)
        assert problem.meter.totals == {"product": counter.flops}
        assert counter.flops > 0


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda a, v: a @ v, 2 * 25),
        (lambda a, v: a @ a, 2 * 125),
        (lambda a, v: torch.addmm(a, a, a), 2 * 125),
        (lambda a, v: a.clone().addmm_(a, a), 2 * 125),
        (lambda a, v: torch.addmv(v, a, v), 2 * 25),
        (lambda a, v: v.clone().addmv_(a, v), 2 * 25),
        (lambda a, v: torch.zeros(3, 5, 2).baddbmm_(a.expand(3, 5, 5), torch.ones(3, 5, 2)), 2 * 3 * 50),
        (lambda a, v: torch.linalg.cholesky(a), 125 // 3),
        (lambda a, v: torch.cholesky_inverse(a), 2 * 125 // 3),
        (lambda a, v: torch.linalg.eigh(a), 9 * 125),
        (lambda a, v: torch.cholesky_solve(v[:, None], a), 2 * 25),
        (lambda a, v: torch.linalg.solve_triangular(a, v[:, None], upper=True), 25),
        (lambda a, v: a + a, 0),
    ],
)
def test_an_operation_costs_its_leading_term(run: Callable[[Tensor, Tensor], object], expected: int) -> None:
    meter = Meter()
    with meter.counting("work"):
        run(torch.eye(5), torch.ones(5))
    assert meter.total == expected


def test_forming_costs_its_last_products_besides_the_jacobians() -> None:
    task = Task(num_samples=200)
    optimizer = BlockHF.paper(blocks.by_layer(task.model), products=Formed(), damping=1.0)
    with optimizer._problem(task.objective, task.batch, None) as problem:
        problem.differentiate()
        problem.meter.totals.clear()
        problem.matrix()
    num_outputs = task.model(task.batch[0])[0].numel()
    least = sum(2 * 200 * num_outputs * block.size**2 for block in problem.blocks)
    forming = problem.meter.totals["forming"]
    assert least < forming < 1.5 * least


def test_a_count_within_a_count_is_part_of_it() -> None:
    meter, a = Meter(), torch.eye(3)
    with meter.counting("outer"):
        _ = a @ a
        with meter.counting("inner"):
            _ = a @ a
    assert meter.totals == {"outer": 2 * 54}


def test_the_same_work_is_counted_once_and_remembered_by_its_key() -> None:
    meter, a = Meter(), torch.eye(3)
    for size in (3, 2, 3):
        with meter.counting("work", size):
            _ = a[:size, :size] @ a[:size, :size]
    assert meter.totals == {"work": 54 + 16 + 54}


def test_orthogonal_factors_are_counted_after_householder() -> None:
    with Counter() as counter:
        torch.linalg.qr(torch.eye(6))
    assert counter.flops == 8 * 6**3 // 3
    with Counter() as counter:
        torch.linalg.qr(torch.ones(2, 9, 3))
    assert counter.flops == 2 * 4 * 3**2 * (9 - 1)


def test_work_that_failed_is_not_counted_and_does_not_stop_the_meter() -> None:
    meter, a = Meter(), torch.eye(3)
    with pytest.raises(RuntimeError), meter.counting("work"):
        _ = a @ torch.eye(2)
    with meter.counting("work"):
        _ = a @ a
    assert meter.totals == {"work": 54}


def test_what_is_done_once_goes_under_checks() -> None:
    meter = Meter()
    meter.add("product", 5)
    with meter.once():
        meter.add("product", 7)
        meter.add("forward", 1)
    assert meter.totals == {"product": 5, "checks": 8}


@pytest.mark.parametrize("products", [DoubleBackward, Traced, Formed])
def test_the_report_adds_up_and_a_resumed_step_costs_the_same_but_for_its_checks(products: type) -> None:
    reports = []
    task = Task(num_samples=200)
    optimizer = BlockHF(blocks.by_layer(task.model), products=products())
    for _ in range(2):
        optimizer.step(task.objective, task.batch)
    other = task.copy()
    resumed = BlockHF(blocks.by_layer(other.model), products=products())
    resumed.load_state_dict(optimizer.state_dict())
    for each, own in ((optimizer, task), (resumed, other)):
        each.step(own.objective, own.batch)
        assert each.report is not None
        kinds = {kind: n for kind, n in each.report.work.items() if kind.endswith("_flops")}
        kinds.pop("checks_flops", None)
        assert each.report.work["flops"] == sum(kinds.values()) > 0
        reports.append(kinds)
    assert reports[0] == reports[1]


def test_a_network_without_products_costs_nothing() -> None:
    model = nn.LayerNorm(3).double()
    problem = Problem(
        lambda batch: (z := model(batch), z.square().mean()),
        torch.ones(2, 3, dtype=torch.float64),
        as_blocks(blocks.single(model)),
    )
    problem.differentiate()
    assert problem.meter.total == 0
