"""What other optimizers survive and this one survives too: odd models, odd numbers, odd surroundings."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from misused_steps import Speech, once_in_the_loss
from torch import Tensor, nn
from torch.func import functional_call

import ranks
from blockhf import AllSamples, Backtracking, BlockHF, EmpiricalFisher, Formed, NoWalk, Traced, blocks
from blockhf.curvature.trace import Trace
from optimizer_tasks import Factory, Task, values

Objective = Callable[[Any], tuple[Tensor, Tensor]]


def classes(num_samples: int = 256, num_classes: int = 4) -> tuple[Tensor, Tensor]:
    """Samples around one center for each class, in the order of the classes."""
    targets = torch.arange(num_samples) * num_classes // num_samples
    centers = 1.5 * torch.randn(num_classes, 6)
    return centers[targets] + torch.randn(num_samples, 6), targets


def classifier(*norms: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), *norms, nn.Tanh(), nn.Linear(12, 4))


def cross_entropy(model: nn.Module) -> Objective:
    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, F.cross_entropy(outputs.float(), batch[1])

    return objective


def train(optimizer: BlockHF, objective: Objective, batch: Any, num_steps: int = 4) -> tuple[float, float]:
    """The loss at the start and at the end."""
    losses = [float(optimizer.step(objective, batch)) for _ in range(num_steps)]
    return losses[0], losses[-1]


@contextlib.contextmanager
def at_most_one_warning(*words: str) -> Iterator[None]:
    """One warning may come, if it has one of these words in it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert len(caught) <= 1, [str(own.message) for own in caught]
    for own in caught:
        assert any(word in str(own.message) for word in words), own.message


def test_a_loss_that_is_no_number_is_rejected_and_training_goes_on(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.by_layer(task.model))
    before = values(task.model)
    optimizer.step(lambda batch: (out := task.model(batch[0]), (out * torch.nan).mean()), task.batch)
    assert not optimizer.report.accepted
    assert optimizer.report.reason == "the loss is not finite"
    assert torch.equal(values(task.model), before)
    optimizer.step(task.objective, task.batch)
    assert optimizer.report.accepted


def test_a_step_without_grad_mode_trains(factory: Factory) -> None:
    task = Task()
    with torch.no_grad():
        first, last = train(factory(blocks.by_layer(task.model), damping=0.1), task.objective, task.batch)
    assert last < first


def test_a_loss_without_second_derivative_trains_with_the_empirical_fisher() -> None:
    speech = Speech()
    optimizer = BlockHF(blocks.by_layer(speech), curvature=EmpiricalFisher())
    first, last = train(optimizer, speech.objective, speech.batch(), 8)
    assert last < 0.95 * first
    task = Task()
    optimizer = BlockHF(blocks.by_layer(task.model), curvature=EmpiricalFisher())
    first, last = train(
        optimizer, lambda batch: once_in_the_loss(task.model(batch[0]), batch[1]), task.batch, 8
    )
    assert last < 0.95 * first


def test_a_variational_autoencoder_returns_a_clone() -> None:
    task = Task(num_samples=32)
    head = nn.Linear(2, 3).double()
    batch = task.batch[0]

    def objective(inputs: Tensor) -> Any:
        code = task.model(inputs)
        decoded = head(code)
        mean = code.clone()
        return (mean, decoded), F.mse_loss(decoded, inputs) + 0.1 * mean.square().mean()

    model = nn.ModuleList([task.model, head])
    first, last = train(BlockHF(blocks.by_module(model)), objective, batch)
    assert last < first


def test_an_enormous_lr_leaves_finite_parameters(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.by_layer(task.model), lr=1e300)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            optimizer.step(task.objective, task.batch)
    assert values(task.model).isfinite().all()


SCALES = {
    1e30: "square of the gradient, .* is beyond the numbers of torch.float32. Multiply the loss",
    1e10: None,
    1e-10: None,
    1e-30: "square of the gradient, .* is beyond the numbers of torch.float32. Multiply the loss",
}


@pytest.mark.parametrize(("scale", "message"), SCALES.items(), ids=map(str, SCALES))
def test_a_loss_of_another_scale_trains_or_is_told(scale: float, message: str | None) -> None:
    model, batch = classifier(), classes()
    plain = cross_entropy(model)

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs, loss = plain(batch)
        return outputs, loss * scale

    optimizer = BlockHF(blocks.by_layer(model))
    with contextlib.nullcontext() if message is None else pytest.warns(UserWarning, match=message) as caught:
        first, last = train(optimizer, objective, batch, 12)
    assert values(model).isfinite().all()
    assert message is None or len(caught) == 1
    assert message is not None or last < 0.5 * first


def test_precision_may_change_in_mid_run(factory: Factory) -> None:
    model, (inputs, targets) = classifier(), classes()
    optimizer, objective = factory(blocks.by_layer(model)), cross_entropy(model)
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        for _ in range(2):
            optimizer.step(objective, (inputs.to(dtype), targets))
            assert optimizer.report.accepted or "led uphill" in optimizer.report.reason
    assert {param.dtype for param in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_trains(factory: Factory, dtype: torch.dtype) -> None:
    (inputs, targets), model = classes(), classifier().to(dtype)
    optimizer = factory(blocks.by_layer(model))
    first, last = train(optimizer, cross_entropy(model), (inputs.to(dtype), targets), 6)
    assert last < 0.95 * first
    assert {param.dtype for param in model.parameters()} == {dtype}


def test_the_model_may_turn_to_half_precision_in_mid_run() -> None:
    (inputs, targets), model = classes(), classifier()
    optimizer, objective = BlockHF.martens(blocks.by_layer(model)), cross_entropy(model)
    first, _ = train(optimizer, objective, (inputs, targets), 2)
    model.bfloat16()
    _, last = train(optimizer, objective, (inputs.bfloat16(), targets), 3)
    assert last < first


@pytest.mark.parametrize("options", [{}, {"products": Traced()}], ids=["default", "traced"])
def test_autocast_trains(options: dict[str, Any]) -> None:
    model, batch = classifier(), classes()
    plain = cross_entropy(model)

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(batch)

    first, last = train(BlockHF(blocks.by_layer(model), **options), objective, batch, 6)
    assert last < 0.8 * first
    assert {param.dtype for param in model.parameters()} == {torch.float32}


class Experts(nn.Module):
    """Two experts, of which the second gets the samples whose first number is large, and a layer unused."""

    def __init__(self) -> None:
        super().__init__()
        self.threshold = 100.0
        self.first, self.second, self.unused = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        chosen = inputs[:, 0] > self.threshold
        outputs = inputs.new_zeros(len(inputs), 4)
        for mask, expert in ((chosen, self.second), (~chosen, self.first)):
            if mask.any():
                outputs = outputs.masked_scatter(mask[:, None].expand(-1, 4), expert(inputs[mask]))
        return outputs


def test_experts_without_samples_and_layers_never_called_stay_put(factory: Factory) -> None:
    model, batch = Experts(), classes()
    before = values(model.second), values(model.unused)
    optimizer = factory(blocks.by_module(model), walk=NoWalk())  # its reports have no blocks
    first, last = train(optimizer, cross_entropy(model), batch)
    assert last < first
    assert torch.equal(values(model.second), before[0])
    assert torch.equal(values(model.unused), before[1])
    statuses = {block.name: block.status for block in optimizer.report.blocks}
    assert statuses["second"] == statuses["unused"] != statuses["first"]
    model.threshold = 0.0  # an expert that gets samples later learns later
    optimizer.step(cross_entropy(model), batch)
    assert not torch.equal(values(model.second), before[0])


class Scaled(nn.Module):
    """A model with parameters of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.scale, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * self.layer(inputs) + self.shift


@pytest.mark.parametrize("options", [{}, {"products": Formed()}], ids=["default", "formed"])
def test_parameters_without_dimension_train(options: dict[str, Any]) -> None:
    model = Scaled()
    first, last = train(BlockHF(blocks.by_module(model), **options), cross_entropy(model), classes())
    assert last < first
    assert model.scale != 0.5


@pytest.mark.filterwarnings("ignore:The curvature along")
def test_no_damping_and_dead_layers_train(factory: Factory) -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].bias.fill_(-1000.0)  # no unit is ever active
    optimizer = factory(blocks.by_layer(model), damping=0.0)
    first, last = train(optimizer, cross_entropy(model), classes())
    assert values(model).isfinite().all()
    assert last <= first


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 64}, {"products": Formed()}], ids=str)
def test_a_default_device_is_no_concern(factory: Factory, options: dict[str, Any]) -> None:
    model, batch = classifier(), classes()
    optimizer = factory(blocks.by_layer(model), **options)
    with torch.device("meta"):
        first, last = train(optimizer, cross_entropy(model), batch, 2)
    assert last < first


@pytest.mark.parametrize("options", [{}, {"curvature_batch_size": None}], ids=str)
def test_functional_calls_train(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr("blockhf.curvature.auto._NODE", 0)
    model, batch = classifier(), classes()
    params = dict(model.named_parameters())

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = functional_call(model, params, (batch[0],))
        return outputs, F.cross_entropy(outputs, batch[1])

    with at_most_one_warning("cannot be traced"):
        first, last = train(BlockHF(blocks.by_layer(model), **options), objective, batch)
    assert last < first


def test_modules_made_in_the_objective_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = classifier(), classes()
    options: dict[str, Any] = {"products": Traced(), "search": Backtracking(), "sampling": AllSamples()}
    made: list[int] = []
    plain = Trace.__init__

    def counted(self: Trace, *args: Any) -> None:
        made.append(1)
        plain(self, *args)

    monkeypatch.setattr(Trace, "__init__", counted)

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = nn.Sequential(model, nn.Identity())(batch[0])
        return outputs, nn.CrossEntropyLoss()(outputs, batch[1])

    first, last = train(BlockHF(blocks.by_layer(model), **options), objective, batch, 6)
    assert last < first
    assert len(made) == 1


def test_labels_that_are_left_out_make_no_difference_between_micro_batches_and_the_whole() -> None:
    inputs, targets = classes()
    targets[torch.rand(len(targets)) < 0.4] = -100
    targets[:64] = -100  # a whole micro-batch without a label
    found = []
    for options in ({}, {"micro_batch_size": 64}):
        torch.manual_seed(1)
        model = classifier().double()
        optimizer = BlockHF(
            blocks.by_layer(model), reduction=lambda batch: (batch[1] != -100).sum(), **options
        )
        for _ in range(3):
            optimizer.step(cross_entropy_in_double(model), (inputs.double(), targets))
            assert optimizer.report.accepted
        found.append(values(model))
    assert torch.linalg.vector_norm(found[0] - found[1]) <= 1e-8 * torch.linalg.vector_norm(found[0])


def cross_entropy_in_double(model: nn.Module) -> Objective:
    return lambda batch: (outputs := model(batch[0]), F.cross_entropy(outputs, batch[1]))


def test_lists_arrays_and_words_of_a_batch_stay_with_their_samples() -> None:
    inputs, targets = classes(num_samples=600)
    number = torch.arange(600)
    model, seen = classifier(), []

    def objective(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        expected = batch["number"].tolist()
        assert batch["list"] == expected
        assert batch["array"].tolist() == expected
        assert batch["words"] == [f"sample {own}" for own in expected]
        assert batch["name"] == "digits"
        assert batch["scale"] == 2.0
        seen.append(len(expected))
        outputs = model(batch["inputs"])
        return outputs, F.cross_entropy(outputs, batch["targets"])

    batch = {
        "inputs": inputs,
        "targets": targets,
        "number": number,
        "list": number.tolist(),
        "array": np.arange(600),
        "words": [f"sample {own}" for own in range(600)],
        "name": "digits",
        "scale": 2.0,
    }
    optimizer = BlockHF(blocks.by_layer(model), curvature_batch_size=100, micro_batch_size=150)
    train(optimizer, objective, batch)
    assert len(set(seen)) > 1, "the test needs parts of the batch"


def test_samples_in_order_train_as_well_as_shuffled_ones() -> None:
    inputs, targets = classes(num_samples=1024)
    order = torch.randperm(1024)
    ends = []
    for batch in ((inputs, targets), (inputs[order], targets[order])):
        torch.manual_seed(2)
        model = classifier()
        train(BlockHF(blocks.by_layer(model)), cross_entropy(model), batch, 15)
        ends.append(float(cross_entropy(model)(batch)[1].detach()))
    assert ends[0] == pytest.approx(ends[1], rel=0.3)


def test_batch_norm_is_tested_with_statistics_of_the_trained_model() -> None:
    batch, model = classes(), classifier(nn.BatchNorm1d(12))
    objective = cross_entropy(model)
    train(BlockHF(blocks.by_layer(model)), objective, batch, 5)
    anew = copy.deepcopy(model)
    anew[1].reset_running_stats()
    anew[1].momentum = None
    with torch.no_grad():
        anew(batch[0])
        found, expected = (float(cross_entropy(own.eval())(batch)[1]) for own in (model, anew))
    assert found == pytest.approx(expected, rel=0.05, abs=0.01)


def test_threads_train_apart() -> None:
    """What another thread computes meanwhile comes out as if it were alone, and its buffers move."""

    def run(norm: nn.Module) -> Tensor:
        with seeding:  # the random numbers are one stream for all threads
            torch.manual_seed(3)
            model, batch = classifier(norm), classes()
        train(BlockHF(blocks.by_layer(model)), cross_entropy(model), batch, 6)
        return torch.cat([values(model), model[1].running_mean, model[1].num_batches_tracked[None]])

    seeding = threading.Lock()
    alone = run(nn.BatchNorm1d(12))
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(run(nn.BatchNorm1d(12)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    for own in found:
        torch.testing.assert_close(own, alone)


@pytest.mark.parametrize("wrapped", [True, False], ids=["DDP", "a process group"])
def test_processes_without_a_mesh_are_told(wrapped: bool, tmp_path: Path) -> None:
    for message, number in ranks.run(2, "lonely_ranks:told", tmp_path, wrapped):
        if wrapped:
            assert "calls a DistributedDataParallel module" in message
            assert "the ranks would drift apart" in message
        else:
            assert number == 1
            assert "There are 2 processes" in message
        assert "Pass mesh=blockhf.mesh(data=2) to the optimizer" in message


def test_a_wrapped_module_on_a_mesh_is_refused(tmp_path: Path) -> None:
    for message, _ in ranks.run(2, "lonely_ranks:told", tmp_path, True, True):
        assert "call the module inside (model.module) in the objective" in message
        assert "drift apart" not in message
