"""The paper's tasks, optimizers by name, and costs in gradients."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import tiny_task
from blockhf import Backtracking, BlockHF
from blockhf.report import BlockReport, StepReport
from blockhf_lab import costs, optimizers, tasks
from blockhf_lab.optimizers import Spec

# Tasks

PAPER = {
    "autoencoder": {
        "large_batch": 6000,
        "curvature_batches": (3000, 1200, 600),
        "adam_batches": (600, 6000),
        "recipe": {"lr": 0.1, "damping": 0.0, "max_cg_steps": 30, "warm_start": 0.95},
        "averaging": None,
    },
    "lstm": {
        "large_batch": 6000,
        "curvature_batches": (3000, 1200, 600),
        "adam_batches": (100, 2000, 6000),
        "recipe": {"lr": 0.1, "damping": 0.01, "max_cg_steps": 100, "cg_rtol": 1e-3, "warm_start": 0.95},
        "averaging": None,
    },
    "cnn": {
        "large_batch": 2048,
        "curvature_batches": (512, 256, 128),
        "adam_batches": (256, 2048),
        "recipe": {"lr": 0.1, "damping": 0.1, "max_cg_steps": 30, "warm_start": 0.95, "slow_start": (10, 2)},
        "averaging": 0.99,
    },
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_settings(name: str) -> None:
    task = tasks.get(name, "paper")
    for key, value in PAPER[name].items():
        assert getattr(task, key) == value
    assert (task.budget, task.stop, task.averaging_warm_up) == ("1000epochs", "worse", False)


@pytest.mark.parametrize(
    ("name", "size", "groups"),
    [
        ("autoencoder", 2_837_314, ["encoder", "decoder"]),
        ("lstm", 2_360, ["bottom", "middle", "top"]),
        ("cnn", 77_610, ["bottom", "middle", "top"]),
    ],
)
def test_the_papers_networks_and_blocks(name: str, size: int, groups: list[str]) -> None:
    task = tasks.get(name, "paper")
    model = task.make_model()
    assert sum(param.numel() for param in model.parameters()) == size
    assert [group["name"] for group in task.make_blocks(model)] == groups


@pytest.mark.parametrize("name", tasks.TASKS)
def test_the_quick_size_needs_no_data_but_the_carried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKHF_DATA", "/nowhere")
    task = tasks.get(name, "quick")
    train, test = task.load(None)
    assert (len(train), len(test)) == (6000, 1000)
    outputs, loss = task.objective(task.make_model())(train.take(slice(0, 3)))
    assert len(outputs) == 3
    assert loss.isfinite()
    with pytest.raises(FileNotFoundError, match="Run: blockhf data fetch"):
        tasks.get(name, "cpu").load(None)


@pytest.mark.parametrize("name", tasks.TASKS)
@pytest.mark.parametrize("preset", tasks.PRESETS)
def test_every_optimizer_of_every_figure_can_be_set_up(name: str, preset: str) -> None:
    task = tasks.get(name, preset)
    model = task.make_model()
    for text in (*task.figure(), "blockhf", "sgd:lr=0.1,schedule=cosine"):
        spec = Spec.parse(text)
        assert str(Spec.parse(str(spec))) == str(spec)
        spec.start(task, model, costs.Unit(task.large_batch, 1.0))


def test_sequences_are_averages_of_pixels_row_by_row() -> None:
    picture = torch.zeros(1, 28, 28)
    picture[0, 4:8, 24:28] = 1.0  # the second row of sixteen, the last column
    picture[0, 0, 0] = 0.5
    sequence = tasks.sequences(picture.view(1, 784))
    assert sequence.shape == (1, 49, 1)
    assert sequence[0, 13, 0] == 1.0
    assert sequence[0, 0, 0] == 0.5 / 16
    assert sequence.sum() == pytest.approx(1 + 0.5 / 16)


def test_evaluation_is_a_mean_over_all_samples_whatever_the_parts() -> None:
    task = tasks.get("lstm", "quick")
    model = task.make_model()
    train, _ = task.load(None)
    samples = tasks.Samples(*train.take(slice(0, 25)))
    found = tasks.evaluate(task, model, samples, chunk=10)
    with torch.no_grad():
        logits = model(samples.inputs)
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, samples.targets).item())
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == samples.targets).float().mean().item())


def test_evaluation_is_in_eval_mode_and_leaves_the_mode_and_the_generator() -> None:
    task = tiny_task.random_task()
    model = task.make_model()
    state = torch.get_rng_state()
    _, test = tiny_task.load(None)
    assert tasks.evaluate(task, model, test) == tasks.evaluate(task, model, test)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())


def test_reached_goes_by_the_metric() -> None:
    error, accuracy = tasks.get("autoencoder"), tasks.get("lstm")
    assert [error.reached(value, 10.0) for value in (9.0, 10.0, 11.0, None)] == [True, True, False, False]
    assert [accuracy.reached(value, 0.9) for value in (0.91, 0.9, 0.8, None)] == [True, True, False, False]


# Optimizers by name


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("adam", "adam", {}),
        ("Adam: lr = 1e-3 , batch=600", "adam", {"lr": 1e-3, "batch": 600}),
        ("adamw:betas=0.9/0.95,amsgrad=true", "adamw", {"betas": (0.9, 0.95), "amsgrad": True}),
        ("sgd:lr=0.1,schedule=cosine", "sgd", {"lr": 0.1, "schedule": "cosine"}),
        ("paper:curvature=1200,slow_start=10/2", "paper", {"curvature": 1200, "slow_start": (10, 2)}),
        (
            "blockhf:search=Backtracking,blocks=layer",
            "blockhf",
            {"search": "Backtracking", "blocks": "layer"},
        ),
    ],
)
def test_specs_are_read(text: str, name: str, options: dict[str, Any]) -> None:
    spec = Spec.parse(text)
    assert (spec.name, spec.options) == (name, options)
    assert Spec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("nope", "There is no optimizer 'nope'. There are blockhf, paper, hf, "),
        ("adam:lr", "Cannot read 'lr'"),
        ("adam:=3", "Cannot read '=3'"),
        ("adam:lr=", "Cannot read 'lr='"),
        ("adam:lr=1,lr=2", "lr is twice"),
        ("adam:bach=3", "adam has no option 'bach'. It has batch, schedule, lr, "),
        ("adam:curvature=3", "adam has no option 'curvature'"),
        ("hf:curvature_batch_size=3", "hf has no option 'curvature_batch_size'"),
        ("adam:batch=0", "batch of adam is 0"),
        ("adam:batch=1.5", "batch of adam is 1.5"),
        ("adam:schedule=linear", "there is cosine alone"),
        ("blockhf:blocks=odd", "blocks of blockhf is 'odd'"),
    ],
)
def test_other_specs_are_refused(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what.replace(".", r"\.")):
        Spec.parse(text)


def test_values_that_the_optimizer_refuses_are_told() -> None:
    task = tiny_task.task()
    for text, what in (
        ("adam:lr=-1", "Invalid learning rate"),
        ("hf:damping=-1", "damping is -1"),
        ("hf:curvature=-1", "batch_size is -1"),
    ):
        with pytest.raises(ValueError, match=f"does not work on tiny: .*{what}"):
            Spec.parse(text).start(task, task.make_model(), costs.Unit(60, 1.0))


@pytest.mark.parametrize("text", ["muon:lr=0.01", "soap:lr=0.01"])
def test_products_that_an_optimizer_makes_for_itself_are_in_its_cost(text: str) -> None:
    spec, task = Spec.parse(text), tiny_task.task()
    if not spec.is_available:
        pytest.skip("pytorch-optimizer is not installed")
    model, (train, _) = task.make_model(), task.load(None)
    unit = costs.unit(task, model, train)
    method = spec.start(task, model, unit)
    steps = [method.update(train.take(slice(0, 60)), 0.0) for _ in range(3)]
    with FlopCounterMode(display=False) as counter:
        method.optimizer.step()
    assert steps[-1].loss < steps[0].loss
    assert steps[-1].ge == pytest.approx(1 + counter.get_total_flops() / unit.flops)


def test_an_optimizer_that_is_not_installed_can_be_read_but_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    spec, task = Spec.parse("soap:lr=0.01"), tiny_task.task()
    assert (spec.label, spec.is_available) == ("SOAP, lr 0.01", False)
    with pytest.raises(ValueError, match=r"soap.* does not work on tiny: it needs pytorch-optimizer"):
        spec.start(task, task.make_model(), costs.Unit(60, 1.0))


def test_the_state_of_an_optimizer_is_weighed() -> None:
    task = tiny_task.task()
    model, (train, _) = task.make_model(), task.load(None)
    weights = [param.numel() for param in model.parameters()]
    for text, expected in (
        ("sgd", 0),
        ("sgd:momentum=0.9", sum(weights)),
        ("adam", 2 * sum(weights) + len(weights)),
    ):
        method = Spec.parse(text).start(task, model, costs.Unit(60, 1.0))
        method.update(train.take(slice(0, 60)), 0.0)
        assert method.state_bytes() == 4 * expected


def test_the_recipe_is_the_papers_and_options_change_it() -> None:
    task = tiny_task.task()

    def groups(text: str) -> list[dict[str, Any]]:
        optimizer = Spec.parse(text).start(task, task.make_model(), costs.Unit(60, 1.0)).optimizer
        assert isinstance(optimizer, BlockHF)
        assert optimizer.curvature_batch_size == 30
        return optimizer.param_groups

    block, single = groups("paper:curvature=30"), groups("hf:curvature=30,lr=0.2")
    assert [group["name"] for group in block] == ["encoder", "decoder"]
    assert [group["name"] for group in single] == ["all"]
    assert {key: block[0][key] for key in task.recipe} == task.recipe
    assert single[0]["lr"] == 0.2
    assert len(groups("blockhf:curvature=30,blocks=layer")) == 4


def test_the_default_is_the_librarys_own_and_policies_go_by_name() -> None:
    task = tiny_task.task()
    model, unit = task.make_model(), costs.Unit(60, 1.0)
    plain = BlockHF(task.make_blocks(model))
    optimizer = Spec.parse("blockhf").start(task, model, unit).optimizer
    assert isinstance(optimizer, BlockHF)
    assert type(optimizer.search) is type(plain.search)
    assert optimizer.defaults == plain.defaults
    assert optimizer.curvature_batch_size == plain.curvature_batch_size
    named = Spec.parse("blockhf:search=Backtracking").start(task, model, unit).optimizer
    assert isinstance(named, BlockHF)
    assert isinstance(named.search, Backtracking)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("blockhf", 500),
        ("blockhf:population=900", 900),
        ("blockhf:without=population", None),
        ("paper", None),
    ],
)
def test_the_default_alone_is_told_the_size_of_the_training_set(text: str, expected: int | None) -> None:
    task = tiny_task.task()
    method = Spec.parse(text).start(task, task.make_model(), costs.Unit(60, 1.0), population=500)
    assert isinstance(method.optimizer, BlockHF)
    assert method.optimizer.population == expected


def test_every_optimizer_of_torch_has_a_name() -> None:
    assert {"adam", "adamw", "sgd", "rmsprop", "nadam", "lbfgs", "muon"} <= set(optimizers.FIRST_ORDER)


def test_labels_and_folders_tell_optimizers_apart() -> None:
    specs = [Spec.parse(text) for text in ("adam", "adam:batch=6", "adamw:betas=0.9/0.95", "hf", "paper")]
    assert len({spec.label for spec in specs}) == len({spec.folder for spec in specs}) == 5
    assert not any(set(spec.folder) & set('/\\:*?"<>| ') for spec in specs)


# Costs


@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_gradient_on_the_large_batch_is_one(name: str) -> None:
    """The count on a few samples, scaled, is the count on the whole."""
    task = tasks.get(name, "quick")
    model = task.make_model()
    train, _ = task.load(None)
    unit = costs.unit(task, model, train)
    assert unit.of_samples(task.large_batch) == 1.0
    number = 50
    with FlopCounterMode(display=False) as counter:
        _, loss = task.objective(model)(train.take(slice(0, number)))
        torch.autograd.grad(loss, list(model.parameters()))
    assert counter.get_total_flops() / unit.flops == pytest.approx(number / task.large_batch)


def test_a_first_order_step_costs_its_gradients() -> None:
    task = tiny_task.task()
    batch = tiny_task.load(None)[0].take(slice(0, 20))
    for text, cost in (("adam", 1 / 3), ("lbfgs:max_iter=4,max_eval=3", 1.0)):
        method = Spec.parse(text).start(task, task.make_model(), costs.Unit(60, 1.0))
        assert method.update(batch, 0.0).ge == pytest.approx(cost)


def _report(work: dict[str, int]) -> StepReport:
    block = BlockReport(
        "all", 5, "converged", 3, num_products=4, residual=0.0, decrease=0.0, damping=0.0, norm=0.0
    )
    return StepReport(1, True, "", 1.0, blocks=[block], work=work)


def test_a_step_of_block_hf_costs_what_its_report_counted() -> None:
    unit = costs.Unit(samples=100, flops=1e6)
    assert unit.of_report(_report({"flops": 2_500_000})) == 2.5


def test_former_names_are_read(tmp_path: Path) -> None:
    spec = Spec.parse("block-hf:curvature=30")
    assert (str(spec), spec.label) == ("paper:curvature=30", "paper, curvature 30")
    assert spec.folder_in(tmp_path, 0) == tmp_path / "paper_curvature=30" / "seed-0"
    former = tmp_path / "block-hf_curvature=30" / "seed-0"
    former.mkdir(parents=True)
    (former / "config.json").touch()
    assert spec.folder_in(tmp_path, 0) == former
    assert spec.folder_in(tmp_path, 1) == tmp_path / "paper_curvature=30" / "seed-1"
