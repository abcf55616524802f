"""The doctor finds what is wrong, leaves all as it was, and answers on every family of models."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockhf
from blockhf import CheckReport, EmpiricalFisher, blocks, check
from blockhf import __main__ as command
from model_zoo import ZOO

Loss = Callable[[Tensor, Any], Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def report_of(loss: Loss, model: nn.Module | None = None, **options: Any) -> CheckReport:
    model = model or network()
    inputs = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, loss(outputs, batch[1])

    return check(objective, (inputs, torch.arange(12) // 4), blocks.by_layer(model), **options)


def said(report: CheckReport, topic: str) -> str:
    """What was found wrong on a topic, with the remedies."""
    return " ".join(f"{own.text} -> {own.remedy}" for own in report.on(topic) if own.is_problem)


def contrastive(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def unbounded(outputs: Tensor, labels: Tensor) -> Tensor:
    return -(torch.gather(outputs, 1, labels[:, None]) + 1e-12).log().mean()


def probabilities() -> nn.Module:
    model = network()
    with torch.no_grad():
        model[2].weight.mul_(100)
    return nn.Sequential(model, nn.Softmax(1))


class Shuffled(nn.Module):
    """Its outputs depend on the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        return outputs - outputs.mean(0)


class Counting(nn.Module):
    """Its outputs grow from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = network(), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self.inner(inputs) * self.calls
        return outputs


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


@pytest.mark.parametrize(
    ("loss", "model", "topic", "text", "remedy"),
    [
        (lambda z, _: z.abs().mean(), network, "loss", "curvature along the gradient is zero", "Return what"),
        (lambda z, _: (z**2).mean() - z[:, 0].square().mean(), network, "loss", "not convex", "EmpiricalF"),
        (unbounded, probabilities, "loss", "no bound", "Return"),
        (contrastive, network, "samples", "ties samples together", "micro_batch_size"),
        (F.cross_entropy, Shuffled, "samples", "see each other", "batches"),
        (F.cross_entropy, normalized, "samples", "see each other in the outputs, by BatchNorm1d", "batches"),
        (F.cross_entropy, Counting, "random", "two calls with the same random numbers differ", "Take out"),
        (lambda z, _: z.detach().square().mean(), network, "outputs", "does not depend", "Leave out"),
        (
            lambda z, y: F.cross_entropy(z, y, weight=torch.tensor([1.0, 2.0, 50.0]).double()),
            network,
            "samples",
            "losses of two micro-batches",
            "reduction=function",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_with_its_remedy(
    loss: Loss, model: Callable[[], nn.Module], topic: str, text: str, remedy: str
) -> None:
    report = report_of(loss, model())
    assert text in said(report, topic), str(report)
    assert remedy in said(report, topic)
    assert "-> " in str(report)


def test_a_plain_classifier_has_nothing_wrong_but_its_batch() -> None:
    report = report_of(F.cross_entropy)
    assert {finding.topic for finding in report.problems} <= {"batch"}
    texts = {finding.topic: finding.text for finding in report.findings}
    assert "cross entropy" in texts["loss"]
    assert texts["random"] == "nothing is random"
    assert texts["factors"].startswith("100 %")
    assert report.figures["forming_in_gradients"] == 3
    assert report.figures["jacobian_bytes"] == 3 * 12 * 51 * 8
    assert 0 < report.figures["product_in_gradients"] < 2


def test_a_block_whose_gradient_bypasses_the_outputs_is_found() -> None:
    model, other = network(), nn.Linear(4, 1).double()

    def objective(batch: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(batch)
        return outputs, outputs.square().mean() + other(batch).square().mean()

    groups = blocks.by_layer(nn.ModuleDict({"model": model, "other": other}))
    report = check(objective, torch.randn(8, 4, dtype=torch.float64), groups)
    assert "block 'other'" in said(report, "blocks")


def test_a_loss_without_a_second_derivative_has_a_remedy_that_works() -> None:
    objective, batch, groups = ZOO["ctc"]()
    assert "EmpiricalFisher()" in said(check(objective, batch, groups), "loss")
    report = check(objective, batch, groups, curvature=EmpiricalFisher())
    assert not report.on("loss")
    assert report.on("step")


def test_nothing_is_changed() -> None:
    model = nn.Sequential(normalized(), nn.Dropout(0.5))
    before = {name: own.clone() for name, own in model.state_dict().items()}
    start = torch.get_rng_state()
    report_of(F.cross_entropy, model)
    assert torch.equal(torch.get_rng_state(), start)
    assert all(torch.equal(own, before[name]) for name, own in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())


SLOW = ("resnet18", "t5", "gpt", "bert", "vit")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ZOO]
)
def test_every_family_is_looked_at_within_twenty_seconds(name: str) -> None:
    torch.manual_seed(0)
    objective, batch, groups = ZOO[name]()
    start = time.process_time()
    report = check(objective, batch, groups)
    assert time.process_time() - start < 20
    assert report.on("outputs")
    assert bool(said(report, "samples")) == (name == "resnet18")
    assert bool(said(report, "loss")) == (name == "ctc")


FACTORY = """
import torch
from torch import nn
from blockhf import blocks

def make():
    model = nn.Linear(3, 1)

    def objective(batch):
        outputs = model(batch)
        return outputs, outputs.LOSS.mean()

    return objective, torch.randn(64, 3) + 3, blocks.by_layer(model)
"""


@pytest.mark.parametrize(("loss", "code"), [("square()", 0), ("abs()", 1)])
def test_the_command_checks_what_a_factory_returns(
    loss: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    file = tmp_path / "own.py"
    file.write_text(FACTORY.replace("LOSS", loss))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["blockhf", "check", f"{file}:make"])
    with pytest.raises(SystemExit) as raised:
        command.main()
    assert raised.value.code == code
    assert capsys.readouterr().out.startswith(
        "  outputs    the loss is computed from outputs of shape (64, 1)"
    )


@pytest.mark.parametrize("argument", ["--help", "own.py", "missing.py:make"])
def test_the_command_says_how_to_call_it(
    argument: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["blockhf", "check", argument])
    with pytest.raises(SystemExit) as raised:
        command.main()
    assert raised.value.code == (0 if argument == "--help" else 2)
    shown = capsys.readouterr()
    assert "blockhf check module.py:factory" in shown.out or "missing.py" in shown.err
    assert blockhf.check is check
