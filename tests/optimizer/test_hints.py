"""Habits from other optimizers are pointed out once, in the report; torch's reasons are told in our words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockhf import BlockHF, FixedStep, Formed, Traced, blocks
from blockhf.curvature.jacobian import FormingError
from blockhf.fx_graphs import TracingError

LR = "lr is 0.001, so steps are 0.001 times as long"
ONE_BLOCK = "all 4 parameter tensors are one block"
SMALL = "a batch of 64 samples is too small to hold any out"


def run(
    make: Callable[[nn.Module], BlockHF],
    num_samples: int = 64,
    steps: int = 1,
    layer: nn.Module | None = None,
) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), layer or nn.Tanh(), nn.Linear(8, 2)).double()
    batch = (torch.randn(num_samples, 4).double(), torch.randn(num_samples, 2).double())

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, F.mse_loss(outputs, batch[1])

    optimizer, reports = make(model), []
    for _ in range(steps):
        optimizer.step(objective, batch)
        reports.append(optimizer.report)
    return reports


@pytest.mark.parametrize(
    ("make", "num_samples", "expected"),
    [
        (lambda model: BlockHF(model.parameters(), lr=1e-3), 64, [LR, ONE_BLOCK, SMALL]),
        (lambda model: BlockHF(blocks.by_module(model)), 256, []),
        (lambda model: BlockHF(blocks.single(model)), 256, []),
        (lambda model: BlockHF(blocks.single(model), population=64), 64, []),
        (lambda model: BlockHF(blocks.single(model), damping=0.1, search=FixedStep(), lr=1e-3), 64, []),
        (lambda model: BlockHF.paper(blocks.single(model), lr=1e-3), 64, []),
    ],
)
def test_habits_are_pointed_out(make: Any, num_samples: int, expected: list[str]) -> None:
    (report,) = run(make, num_samples)
    assert len(report.hints) == len(expected)
    assert all(hint.startswith(start) for hint, start in zip(report.hints, expected, strict=True))
    assert str(report).count("hint: ") == len(expected)


def test_hints_come_once() -> None:
    first, second = run(lambda model: BlockHF(model.parameters()), steps=2)
    assert first.hints
    assert not second.hints


def test_numbered_blocks_say_what_they_are() -> None:
    (report,) = run(lambda model: BlockHF(blocks.by_module(model)))
    assert [block.label for block in report.blocks] == ["0: Linear", "2: Linear"]
    (report,) = run(lambda model: BlockHF(model.parameters()))
    assert [block.label for block in report.blocks] == ["block0: Sequential"]


class Conditional(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs.abs() if float(outputs.detach().sum()) > 1e9 else outputs


@pytest.mark.parametrize(
    ("layer", "products", "told"),
    [
        (lambda: nn.BatchNorm1d(8), Formed(), "BatchNorm in training lets samples see each other"),
        (lambda: nn.Dropout(0.5), Formed(), "draws random numbers, as that of dropout does in training"),
        (lambda: Conditional(8, 8), Formed(), r"reads numbers out of tensors, by \.item\(\)"),
        (lambda: Conditional(8, 8), Traced(), r"reads numbers out of tensors, by \.item\(\)"),
    ],
)
def test_reasons_are_in_our_words(layer: Any, products: Any, told: str) -> None:
    with pytest.raises((FormingError, TracingError), match=told) as caught:
        run(lambda model: BlockHF(blocks.single(model), products=products), layer=layer())
    assert not any(word in str(caught.value) for word in ("transform", "guard", "Error", "aten"))


def test_tracing_is_told_once() -> None:
    first, second = run(lambda model: BlockHF(blocks.single(model), products=Traced()), steps=2)
    assert "; tracing took " in str(first)
    assert "tracing" not in second.details()
