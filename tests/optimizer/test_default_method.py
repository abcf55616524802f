"""``BlockHF(groups)`` as it comes: it lowers the loss, keeps its promises and goes on where it was saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockhf import Auto, BlockHF, NoiseScale, NoWalk, Traced, blocks
from blockhf.curvature import auto
from blockhf.plan import Sizes, draw_plan
from cases import BATCH_NORM, CASES, CROSS_ENTROPY, DROPOUT, MLP, ONE_PER_NETWORK, Case
from optimizer_tasks import Graphs, Task, equal, snapshot, through_a_file, values

PLAIN = Case(MLP, CROSS_ENTROPY)


def loss_of(case: Case, model: nn.Module, batch: Any) -> float:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return float(case.objective(model)(batch)[1].detach())


def trained(case: Case, num_samples: int, num_steps: int = 5, **options: Any) -> tuple[float, float]:
    model, batch = case.model(), case.batch(num_samples)
    optimizer = BlockHF(blocks.by_layer(model), **options)
    torch.manual_seed(case.seed)
    before = loss_of(case, model, batch)
    for _ in range(num_steps):
        optimizer.step(case.objective(model, options.get("reduction", "mean")), batch)
        assert bool(values(model).isfinite().all())
    return before, loss_of(case, model, batch)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_lowers_the_loss_in_sample(case: Case, seed: int) -> None:
    if case.network.random:
        pytest.skip("the loss of one mask is below")
    before, after = trained(Case(case.network, case.loss, seed), 24, num_steps=3)
    assert after < before


@pytest.mark.parametrize("case", ONE_PER_NETWORK, ids=lambda case: case.name)
def test_each_step_lowers_the_loss_on_the_samples_held_out_or_is_rejected(case: Case) -> None:
    model, batch = case.model(), case.batch(160)
    optimizer = BlockHF(blocks.by_layer(model), sampling=NoiseScale())
    torch.manual_seed(case.seed)
    num_accepted = 0
    for _ in range(6):
        before = values(model)
        optimizer.step(case.objective(model), batch)
        report = optimizer.report
        assert report is not None
        if report.accepted:
            assert report.loss_after is not None
            assert report.loss_before is not None
            assert report.loss_after < report.loss_before
            num_accepted += 1
        else:
            assert torch.equal(values(model), before)
    assert num_accepted >= 3


@pytest.mark.parametrize(
    ("num_samples", "options"),
    [
        pytest.param(1, {}, id="one sample"),
        pytest.param(2, {}, id="two samples"),
        pytest.param(160, {"micro_batch_size": 50}, id="micro-batches"),
        pytest.param(160, {"reduction": "sum"}, id="sum"),
        pytest.param(160, {"reduction": "sum", "micro_batch_size": 50}, id="sum over micro-batches"),
        pytest.param(30, {"reduction": "sum", "micro_batch_size": 8}, id="few, sum over micro-batches"),
        pytest.param(160, {"curvature_batch_size": 10}, id="little curvature"),
    ],
)
def test_it_lowers_the_loss_of_every_kind_of_batch(num_samples: int, options: dict[str, Any]) -> None:
    before, after = trained(PLAIN, num_samples, **options)
    assert after < before


def test_it_lowers_the_loss_with_masks() -> None:
    before, after = trained(Case(DROPOUT, CROSS_ENTROPY), 300, num_steps=8)
    assert after < before


@pytest.mark.parametrize("partition", [blocks.single, blocks.by_layer])
def test_it_lowers_the_loss_of_a_closure(partition: Any) -> None:
    task = Task()
    optimizer = BlockHF(partition(task.model))
    losses = [float(optimizer.step(lambda: task.objective(task.batch))) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def test_frozen_parameters_stay_put() -> None:
    task = Task(num_samples=200)
    task.model[2].requires_grad_(False)
    before = task.model[2].weight.detach().clone()
    optimizer = BlockHF(blocks.by_layer(task.model))
    losses = [float(optimizer.step(task.objective, task.batch)) for _ in range(6)]
    assert losses[-1] < losses[0]
    assert torch.equal(task.model[2].weight, before)


MAKERS: dict[str, Callable[[nn.Module], BlockHF]] = {
    "default": lambda model: BlockHF(blocks.by_layer(model)),
    "one block": lambda model: BlockHF(blocks.single(model)),
    "micro-batches": lambda model: BlockHF(blocks.by_layer(model), micro_batch_size=40),
    "traced": lambda model: BlockHF(blocks.by_layer(model), products=Traced()),
    "auto": lambda model: BlockHF(blocks.by_layer(model), products=Auto()),
}


@pytest.mark.parametrize(
    ("name", "num_samples"),  # of 128 some are held out
    [*((name, 160) for name in MAKERS), ("default", 60), ("auto", 60)],
)
def test_a_resumed_run_goes_on_to_the_last_bit(
    name: str, num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "auto":
        monkeypatch.setattr(auto, "_NODE", 0)
    task, resumed = Task(num_samples=num_samples), Task(num_samples=num_samples, seed=1)
    resumed.batch = task.batch
    one = MAKERS[name](task.model)
    for _ in range(2):
        one.step(task.objective, task.batch)
    other = MAKERS[name](resumed.model)
    saved = through_a_file({"model": task.model.state_dict(), "optimizer": one.state_dict()})
    resumed.model.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    for _ in range(3):
        assert one.step(task.objective, task.batch) == other.step(resumed.objective, resumed.batch)
        assert torch.equal(values(task.model), values(resumed.model))
        assert equal(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("num_samples", [16, 200])
def test_no_graph_survives_a_step(num_samples: int) -> None:
    task, graphs = Task(num_samples=num_samples), Graphs()
    optimizer = BlockHF(blocks.by_layer(task.model))
    with graphs.watch(task.model):
        for _ in range(2):
            optimizer.step(task.objective, task.batch)
            graphs.assert_gone()


def test_running_statistics_are_those_of_the_new_parameters_on_the_curvature_s_samples() -> None:
    case = Case(BATCH_NORM, CROSS_ENTROPY)
    model, twin = case.model(), case.model()
    batch = case.batch(200)
    optimizer = BlockHF(blocks.by_layer(model), walk=NoWalk())
    optimizer.step(case.objective(model), batch)
    assert optimizer.report is not None
    assert optimizer.report.accepted
    work = optimizer.report.work
    plan = draw_plan([200], Sizes(work["gradient_batch"], work["curvature_batch"], held_out=50), seed=1)
    (inputs, _), _ = plan.curvature.take(batch, 0)
    with torch.no_grad():
        for param, value in zip(twin.parameters(), model.parameters(), strict=True):
            param.copy_(value)
    for module in twin.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 1.0
    twin(inputs)
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_the_use_of_random_numbers_is_the_same_each_time() -> None:
    case, ends = Case(DROPOUT, CROSS_ENTROPY), []
    for _ in range(2):
        model = case.model()
        optimizer = BlockHF(blocks.by_layer(model))
        torch.manual_seed(0)
        for _ in range(3):
            optimizer.step(case.objective(model), case.batch(200))
        ends.append((values(model), torch.get_rng_state()))
    assert equal(ends[0], ends[1])


@pytest.mark.parametrize("num_samples", [16, 200])
def test_a_loss_that_is_no_number_leaves_everything_as_it_was(num_samples: int) -> None:
    task = Task(num_samples=num_samples)
    optimizer = BlockHF(blocks.by_layer(task.model))
    optimizer.step(task.objective, task.batch)
    before = snapshot(task.model, optimizer)
    inputs, targets = task.batch
    optimizer.step(task.objective, (inputs * float("nan"), targets))
    assert optimizer.report is not None
    assert not optimizer.report.accepted
    assert equal(snapshot(task.model, optimizer), before)


def test_held_out_samples_are_neither_in_the_gradient_nor_in_the_curvature() -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    inputs = torch.arange(200.0, dtype=torch.float64)[:, None]
    calls: list[set[int]] = []

    def objective(batch: Tensor) -> tuple[Tensor, Tensor]:
        calls.append({int(x) for x in batch})
        outputs = model(batch / 200)
        return outputs, F.mse_loss(outputs, torch.sin(batch / 50))

    optimizer = BlockHF(blocks.single(model), sampling=NoiseScale())
    drawn = set()
    for _ in range(5):
        calls.clear()
        optimizer.step(objective, inputs)
        assert optimizer.report is not None
        if len(calls[0]) == 2:  # a look at what a sample is, once
            del calls[0]
        seen, held_out = calls[0], calls[-1]
        assert len(seen) == optimizer.report.work["gradient_batch"]
        assert len(held_out) == 50
        assert not seen & held_out
        assert all(call == held_out or call <= seen for call in calls)
        first = calls.index(held_out)
        assert first > 0
        assert all(call == held_out for call in calls[first:])
        assert all(len(held_out & set(range(start, start + 40))) == 10 for start in range(0, 200, 40))
        drawn.add(frozenset(held_out))
    assert len(drawn) == 5, "others in each step"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("is_told", [True, False], ids=["size of the set known", "unknown"])
@pytest.mark.parametrize("name", ["autoencoder", "lstm", "cnn"])
def test_the_same_defaults_diverge_on_none_of_the_tasks(name: str, is_told: bool, seed: int) -> None:
    from blockhf_lab import runs, tasks

    task = tasks.get(name, "quick")
    train, test = task.load(None)
    torch.manual_seed(seed)
    model = task.make_model()
    optimizer = BlockHF(task.make_blocks(model), population=len(train) if is_told else None)
    first = best = tasks.evaluate(task, model, test)["loss"]
    for update in range(25):
        order = runs.order(len(train), seed, update)
        optimizer.step(task.objective(model), train.take(order[: task.race_batch]))
        loss = tasks.evaluate(task, model, test)["loss"]
        best = min(best, loss)
        assert loss < 1.2 * best  # of samples that no step has seen
    assert best < 0.8 * first


@pytest.mark.parametrize("factor", [2.0**-10, 2.0**10, 1e3])
def test_the_loss_times_a_constant_gives_the_same_run(factor: float) -> None:
    """Noisy samples, new ones at each step, of which some are held out."""
    found = []
    for scale in (1.0, factor):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()

        def objective(
            batch: tuple[Tensor, Tensor], model: nn.Module = model, scale: float = scale
        ) -> tuple[Tensor, Tensor]:
            outputs = model(batch[0])
            return outputs, F.cross_entropy(outputs, batch[1]) * scale

        optimizer = BlockHF(blocks.by_layer(model))
        sizes = []
        for _ in range(8):
            inputs = torch.randn(1600, 6).double()
            noise = torch.randn(1600, 3).double()
            optimizer.step(objective, (inputs, (inputs[:, :3].sin() + noise).argmax(1)))
            assert optimizer.report is not None
            sizes.append(optimizer.report.work["gradient_batch"])
        found.append((torch.cat([param.detach().flatten() for param in model.parameters()]), sizes))
    (plain, sizes), (scaled, others) = found
    assert others == sizes
    torch.testing.assert_close(scaled, plain, rtol=1e-6, atol=1e-8)
