"""Weight decay is an L2 penalty in gradient, matrix, model and search; or, decoupled, a shrinkage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockhf import (
    AllSamples,
    Auto,
    Backtracking,
    BlockHF,
    Cholesky,
    ConjugateGradient,
    DoubleBackward,
    Factored,
    FixedStep,
    Formed,
    Hessian,
    Identity,
    Products,
    Subspace,
    Traced,
    blocks,
)
from blockhf.preconditioners import Preconditioner
from optimizer_tasks import (
    Factory,
    Task,
    by_layer,
    dense_gauss_newton,
    dense_gradient,
    slices,
    through_a_file,
    values,
    written,
)

WAYS: dict[str, dict[str, Any]] = {
    "double backward": {"products": DoubleBackward(), "solver": ConjugateGradient()},
    "traced": {"products": Traced(), "solver": ConjugateGradient()},
    "formed": {"products": Formed(), "solver": ConjugateGradient()},
    "formed, factorized": {"products": Formed(), "solver": Cholesky()},
    "factored": {"products": Factored(), "solver": Cholesky()},
    "factored, multiplied": {"products": Factored(), "solver": ConjugateGradient()},
    "auto": {"products": Auto(), "solver": Cholesky()},
}
DECAYS, DAMPING = (0.1, 0.0, 0.3), 1e-3


def groups_of(model: nn.Module, decays: Sequence[float] = DECAYS) -> list[dict[str, Any]]:
    groups = blocks.by_layer(model)
    for group, decay in zip(groups, decays, strict=True):
        group["weight_decay"] = decay
    return groups


def exact(groups: Any, **options: Any) -> BlockHF:
    """Directions to the last digits."""
    return BlockHF.paper(
        groups, **{"damping": DAMPING, "max_cg_steps": 300, "cg_rtol": 1e-14, "warm_start": 0.0, **options}
    )


def solved(task: Task, decays: Sequence[float] = DECAYS, damping: float = DAMPING) -> list[Tensor]:
    """For each block the solution of (G + (λ + damping) I) x = -(g + λ w), by dense matrices."""
    G, g, w = dense_gauss_newton(task, task.batch), dense_gradient(task, task.batch), values(task.model)
    found = []
    for own, decay in zip(slices(blocks.by_layer(task.model)), decays, strict=True):
        damped = G[own, own] + (decay + damping) * torch.eye(own.stop - own.start, dtype=G.dtype)
        found.append(torch.linalg.solve(damped, -(g[own] + decay * w[own])))
    return found


def assert_close(actual: Tensor, expected: Tensor, bound: float = 1e-10) -> None:
    assert float((actual - expected).norm()) <= bound * float(expected.norm())


def penalty(model: nn.Module, decays: Sequence[float] = DECAYS) -> float:
    return sum(decay / 2 * float(own @ own) for decay, own in zip(decays, by_layer(model), strict=True))


def loss_of(task: Task) -> float:
    return float(task.objective(task.batch)[1].detach())


@pytest.mark.parametrize("num_samples", [16, 4])  # more outputs than parameters of a block, and fewer
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
@pytest.mark.parametrize("way", WAYS)
def test_directions_are_those_of_the_dense_solve(way: str, loss: str, num_samples: int) -> None:
    task = Task(loss, num_samples=num_samples)
    exact(groups_of(task.model), **WAYS[way]).direction(task.objective, task.batch)
    for own, expected in zip(written(task.model), solved(task), strict=True):
        assert_close(-own, expected)


@pytest.mark.parametrize("micro_batch_size", [None, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_penalty_counts_once_whatever_the_parts_and_the_reduction(
    reduction: str, micro_batch_size: int | None
) -> None:
    task = Task(reduction=reduction)
    options: dict[str, Any] = {"reduction": reduction, "micro_batch_size": micro_batch_size}
    optimizer = exact(groups_of(task.model), products=DoubleBackward(), **options)
    loss = optimizer.direction(task.objective, task.batch)
    for own, expected in zip(written(task.model), solved(task), strict=True):
        assert_close(-own, expected)
    assert float(loss) == pytest.approx(loss_of(task), rel=1e-12)
    assert optimizer.report.loss == pytest.approx(loss_of(task) + penalty(task.model), rel=1e-12)


@pytest.mark.parametrize("num_samples", [16, 4])
@pytest.mark.parametrize("decay", [1e-12, 1e-6, 1.0])
def test_exact_solutions_keep_their_digits_where_penalty_and_damping_are_tiny(
    decay: float, num_samples: int
) -> None:
    """A gradient that is in the range of the root but for the penalty."""
    task = Task(num_samples=num_samples)
    decays, damping = [decay] * 3, 1e-13
    exact(groups_of(task.model, decays), **WAYS["factored"], damping=damping).direction(
        task.objective, task.batch
    )
    G, g = dense_gauss_newton(task, task.batch), dense_gradient(task, task.batch)
    for own, place, w in zip(
        written(task.model), slices(blocks.by_layer(task.model)), by_layer(task.model), strict=True
    ):
        rest = G[place, place] @ own + (decay + damping) * own - (g[place] + decay * w)
        assert float(rest.norm()) < 1e-12 * float(g[place].norm())
        # In the null space of the matrix, where the samples say nothing, the penalty alone decides.
        eigenvalues, vectors = torch.linalg.eigh(G[place, place])
        null = vectors[:, eigenvalues < 1e-13 * eigenvalues.max()]
        assert_close(null.T @ own, decay / (decay + damping) * (null.T @ w), 1e-3 if null.numel() else 0.0)


def test_damping_by_own_curvature_leaves_the_penalty_as_it_is() -> None:
    """With ``rescales``: (G + λ I + damping D) x = -g - λ w with D the diagonal in its mean."""
    task = Task(num_samples=4)
    solver = Cholesky(rescales=True)
    exact(groups_of(task.model), products=Factored(), solver=solver).direction(task.objective, task.batch)
    G, g = dense_gauss_newton(task, task.batch), dense_gradient(task, task.batch)
    for own, place, w, decay in zip(
        written(task.model), slices(blocks.by_layer(task.model)), by_layer(task.model), DECAYS, strict=True
    ):
        A = G[place, place] + decay * torch.eye(len(w), dtype=torch.float64)
        damped = A + DAMPING * torch.diag(A.diagonal()) / A.diagonal().mean()
        assert_close(own, torch.linalg.solve(damped, g[place] + decay * w))


def test_the_hessian_has_it_too() -> None:
    task = Task()
    exact(groups_of(task.model), damping=20.0, curvature=Hessian()).direction(task.objective, task.batch)
    params = list(task.model.parameters())
    gradients = torch.autograd.grad(task.objective(task.batch)[1], params, create_graph=True)
    flat = torch.cat([own.reshape(-1) for own in gradients])
    rows = [torch.autograd.grad(own, params, retain_graph=True) for own in flat]
    H = torch.stack([torch.cat([own.reshape(-1) for own in row]) for row in rows])
    for own, place, w, decay in zip(
        written(task.model), slices(blocks.by_layer(task.model)), by_layer(task.model), DECAYS, strict=True
    ):
        A = H[place, place] + (20.0 + decay) * torch.eye(len(w), dtype=torch.float64)
        assert_close(own, torch.linalg.solve(A, flat.detach()[place] + decay * w))


def test_one_step_of_linear_regression_is_ridge_regression() -> None:
    model = nn.Linear(3, 2).double()
    inputs, targets = torch.randn(20, 3).double(), torch.randn(20, 2).double()

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, (outputs - batch[1]).square().sum() / 2

    optimizer = exact(
        [
            {"params": [model.weight, model.bias], "weight_decay": 0.7},
        ],
        lr=1.0,
        damping=0.0,
        search=Backtracking(),
        reduction="sum",
    )
    optimizer.step(objective, (inputs, targets))
    X = torch.cat([inputs, torch.ones(20, 1)], dim=1).double()
    expected = torch.linalg.solve(X.T @ X + 0.7 * torch.eye(4, dtype=torch.float64), X.T @ targets).T
    assert_close(torch.cat([model.weight, model.bias[:, None]], dim=1).detach(), expected)
    assert optimizer.report.ratio == pytest.approx(1.0, abs=1e-10)


SEARCHES = {
    "fixed": FixedStep(evaluates=True),
    "backtracking": Backtracking(),
    "subspace": Subspace(),
    "subspace, nothing held out": Subspace(held_out=0),
}


@pytest.mark.parametrize("search", SEARCHES)
def test_a_run_is_that_of_the_penalty_written_as_outputs(search: str) -> None:
    """With the parameters among the outputs, JᵀHJ has the curvature of an L2 term in the loss."""
    ends, reports = [], []
    for is_option in (True, False):
        task = Task("cross_entropy", num_samples=160)
        params = list(task.model.parameters())

        def by_hand(batch: Any, task: Task = task, params: list[Any] = params) -> Any:
            logits, loss = task.objective(batch)
            weights = torch.cat([param.reshape(-1) for param in params])
            # Outputs have the samples first, so that parts can be told apart: here there is one part.
            return (logits, weights), loss + 0.05 * weights.square().sum() / 2

        optimizer = BlockHF(
            blocks.by_layer(task.model),
            weight_decay=0.05 if is_option else 0.0,
            products=DoubleBackward(),
            preconditioner=Identity(),
            search=SEARCHES[search],
            solver=ConjugateGradient(),
            sampling=AllSamples(),
            curvature_batch_size=None,
        )
        for _ in range(4):
            optimizer.step(task.objective if is_option else by_hand, task.batch)
        ends.append(values(task.model))
        reports.append(optimizer.report)
    assert_close(ends[0], ends[1], 1e-9)
    assert reports[0].loss_after == pytest.approx(reports[1].loss_after, rel=1e-9)
    assert reports[0].predicted == pytest.approx(reports[1].predicted, rel=1e-6)


def test_every_factory_decays(factory: Factory) -> None:
    norms = []
    for decay in (0.0, 1.0):
        task = Task(num_samples=64)
        optimizer = factory(blocks.by_layer(task.model), weight_decay=decay)
        for _ in range(5):
            optimizer.step(task.objective, task.batch)
        norms.append(float(values(task.model).norm()))
    assert norms[1] < 0.7 * norms[0]


def test_a_block_without_influence_decays_by_the_penalty_alone() -> None:
    task = Task()
    idle = nn.Parameter(torch.ones(4, dtype=torch.float64))
    group = {"params": [("idle", idle)], "name": "idle", "weight_decay": 0.5}
    optimizer = exact([*groups_of(task.model), group], lr=1)
    optimizer.step(task.objective, task.batch)  # and there is no warning of a bypassed block
    assert_close(idle.detach(), torch.full_like(idle, 1 - 0.5 / (0.5 + DAMPING)))


@dataclass(frozen=True)
class Recorded(Preconditioner):
    """Keeps what it is asked for."""

    seen: list[Any] = field(default_factory=list)

    def prepare(
        self, samples: Any, curvature: Any, operator: Any, dampings: Sequence[float], state: Any
    ) -> list[None]:
        one = torch.eye(operator.sizes[0], dtype=torch.float64)[0]
        self.seen.append((list(dampings), operator.product(0, 0, one)))
        return [None] * len(samples.blocks)


def test_preconditioners_see_the_decay_once_in_the_damping() -> None:
    task, recorded = Task(), Recorded()
    exact(groups_of(task.model), preconditioner=recorded).direction(task.objective, task.batch)
    ((dampings, column),) = recorded.seen
    assert dampings == [DAMPING + decay for decay in DECAYS]
    size = len(column)
    assert_close(column, dense_gauss_newton(task, task.batch)[:size, 0])


def test_decoupled_decay_shrinks_and_leaves_loss_and_search_alone(factory: Factory) -> None:
    task, other = Task(), Task()
    lr = 0.5
    optimizer = factory(groups_of(task.model), lr=lr, decoupled_weight_decay=True, damping=0.1)
    plain = factory(blocks.by_layer(other.model), lr=lr, damping=0.1)
    before = by_layer(task.model)
    assert optimizer.step(task.objective, task.batch) == plain.step(other.objective, other.batch)
    for start, own, expected, decay in zip(
        before, by_layer(task.model), by_layer(other.model), DECAYS, strict=True
    ):
        assert_close(own, expected - lr * decay * start, 1e-14)
    assert optimizer.report.loss == plain.report.loss
    assert optimizer.report.loss_after == plain.report.loss_after


def test_a_rejected_step_decays_nothing() -> None:
    task = Task()
    optimizer = BlockHF.martens(
        groups_of(task.model), decoupled_weight_decay=True, search=Backtracking(sufficient=0.999, max_tries=1)
    )
    before = values(task.model)
    optimizer.step(task.objective, task.batch)
    assert not optimizer.report.accepted
    assert torch.equal(values(task.model), before)


def test_options_are_read_at_each_step_saved_and_loaded(factory: Factory) -> None:
    task = Task()
    optimizer = factory(groups_of(task.model)[:2], damping=0.1, weight_decay=0.2)
    optimizer.add_param_group(blocks.by_layer(task.model)[2])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.2]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number in range(2):
        optimizer.param_groups[1]["weight_decay"] = 0.1 * number
        optimizer.step(task.objective, task.batch)
        scheduler.step()
    twin = task.copy()
    again = factory(blocks.by_layer(twin.model), damping=0.1)
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    assert [group["weight_decay"] for group in again.param_groups] == [0.1, 0.1, 0.2]
    optimizer.step(task.objective, task.batch)
    again.step(twin.objective, twin.batch)
    assert torch.equal(values(task.model), values(twin.model))


def test_a_state_without_the_options_loads_as_one_without_decay(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.by_layer(task.model), damping=0.1)
    optimizer.step(task.objective, task.batch)
    state = through_a_file(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["weight_decay"], group["decoupled_weight_decay"]
    again = factory(blocks.by_layer(task.model), damping=0.1, weight_decay=0.5)
    again.load_state_dict(state)
    assert {group["weight_decay"] for group in again.param_groups} == {0.0}
    again.step(task.objective, task.batch)


def test_the_direction_of_a_penalty_written_into_the_loss_alone_is_another() -> None:
    """Why the option exists: an L2 term that is no function of the outputs has no curvature in JᵀHJ."""
    task = Task()
    decay = 1.0

    def by_hand(batch: Any) -> tuple[Tensor, Tensor]:
        outputs, loss = task.objective(batch)
        return outputs, loss + decay / 2 * sum(param.square().sum() for param in task.model.parameters())

    optimizer = exact(blocks.single(task.model), products=DoubleBackward())
    optimizer.direction(by_hand, task.batch)
    off = torch.cat(written(task.model))
    G, g, w = dense_gauss_newton(task, task.batch), dense_gradient(task, task.batch), values(task.model)
    right = torch.linalg.solve(G + (decay + DAMPING) * torch.eye(len(g), dtype=G.dtype), g + decay * w)
    assert float((off - right).norm()) > float(right.norm())


def test_products_are_all_here() -> None:
    public = {kind.__name__ for kind in Products.__subclasses__() if kind.__module__.startswith("blockhf.")}
    assert public == {type(options["products"]).__name__ for options in WAYS.values()}
