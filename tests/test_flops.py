"""Counted operations: against torch's own counter, and term by term."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from blockhf import Formed, GaussNewton, Traced, blocks
from blockhf.flops import Counter
from blockhf.point import Linearizer, Point
from blockhf.policy import PolicyState
from blockhf.samples import Samples
from cases import CROSS_ENTROPY, NETWORKS, Case, as_blocks
from optimizer_tasks import Task
from regression import point_of

CASES = [Case(network, CROSS_ENTROPY) for network in NETWORKS if network.name in ("mlp", "residual cnn")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_and_forward_passes_cost_what_torchs_counter_says(case: Case) -> None:
    model = case.model()
    objective = case.objective(model)
    point = point_of(Samples(objective, case.batch(), as_blocks(blocks.by_layer(model))))
    with FlopCounterMode(display=False) as gradient:
        torch.autograd.grad(objective(case.batch())[1], list(model.parameters()))
    with torch.no_grad(), FlopCounterMode(display=False) as forward:
        objective(case.batch())
    point.gradient()
    point.loss_at([torch.zeros_like(value) for value in point.origin])
    assert point.samples.ledger.totals == {
        "gradient": gradient.get_total_flops(),
        "forward": forward.get_total_flops(),
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_traced_product_costs_what_it_costs_to_run_it(case: Case) -> None:
    model = case.model()
    samples = Samples(case.objective(model), case.batch(), as_blocks(blocks.by_layer(model)))
    budget = [0] * len(samples.blocks)
    operator = Traced().linearize(GaussNewton(), samples, budget, PolicyState())
    for index, block in enumerate(samples.blocks):
        vector = torch.ones(block.size, dtype=torch.float64)
        samples.ledger.totals.clear()
        with Counter() as counter:
            operator.product(index, index, vector)
        assert samples.ledger.totals == {"product": counter.flops}
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
    with Counter() as counter:
        run(torch.eye(5), torch.ones(5))
    assert counter.flops == expected


def test_forming_costs_its_last_products_besides_the_jacobians() -> None:
    task = Task(num_samples=200)
    samples = Samples(task.objective, task.batch, as_blocks(blocks.by_layer(task.model)))
    point = Point(samples, Linearizer(GaussNewton(), Formed(), PolicyState()))
    point.gradient()
    samples.ledger.totals.clear()
    with point.linearize():
        pass
    num_outputs = task.model(task.batch[0])[0].numel()
    least = sum(2 * 200 * num_outputs * block.size**2 for block in samples.blocks)
    forming = samples.ledger.totals["forming"]
    assert least < forming < 1.5 * least


def test_orthogonal_factors_are_counted_after_householder() -> None:
    with Counter() as counter:
        torch.linalg.qr(torch.eye(6))
    assert counter.flops == 8 * 6**3 // 3
    with Counter() as counter:
        torch.linalg.qr(torch.ones(2, 9, 3))
    assert counter.flops == 2 * 4 * 3**2 * (9 - 1)


def test_a_network_without_products_costs_nothing() -> None:
    model = nn.LayerNorm(3).double()
    samples = Samples(
        lambda batch: (z := model(batch), z.square().mean()),
        torch.ones(2, 3, dtype=torch.float64),
        as_blocks(blocks.single(model)),
    )
    point_of(samples).gradient()
    assert samples.ledger.total == 0
