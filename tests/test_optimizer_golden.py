"""Seeded loss curves against stored ones, so that no change of the numbers goes unnoticed.

Where a change is meant, store the new curves and say in the commit why they moved::

    python tests/test_optimizer_golden.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockhf import BlockHF, blocks

GOLDEN = Path(__file__).parent / "golden" / "optimizer.json"
NUM_STEPS = 20

STYLES: dict[str, Callable[[nn.Module], BlockHF]] = {
    "default": lambda model: BlockHF.martens(blocks.by_module(model), curvature_batch_size=40),
    "default, 8 CG steps": lambda model: BlockHF.martens(
        blocks.by_module(model), max_cg_steps=8, curvature_batch_size=40
    ),
    "paper, one block": lambda model: BlockHF.paper(
        blocks.single(model), damping=0.1, max_cg_steps=8, curvature_batch_size=40
    ),
    "paper, two blocks": lambda model: BlockHF.paper(
        blocks.by_module(model), damping=0.1, max_cg_steps=8, curvature_batch_size=40
    ),
}
# A disturbance of 1e-13 in the weights moves the curves by no more than 1e-11, but for the default's: a
# CG that runs until its residual is 1e-6 has forgotten by then where rounding led it within that bound.
TOLERANCES = {style: 1e-4 if style == "default" else 1e-6 for style in STYLES}


class Autoencoder(nn.Module):
    """Weights and data are written out, so that they hang on no random number generator."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 6))
        self.double()
        with torch.no_grad():
            for index, param in enumerate(self.parameters()):
                param.copy_(0.6 * waves(param.numel(), 1, index + 1).view(param.shape))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decoder(self.encoder(inputs))


def waves(rows: int, columns: int, phase: float) -> Tensor:
    row, column = torch.arange(rows, dtype=torch.float64), torch.arange(columns, dtype=torch.float64)
    return torch.sin(phase + 1.7 * row[:, None] + 2.3 * column) + 0.4 * torch.sin(row[:, None] * (column + 1))


def curve(make: Callable[[nn.Module], BlockHF]) -> list[float]:
    """The losses of some steps, each on a batch of its own."""
    model = Autoencoder()
    optimizer = make(model)
    data = waves(NUM_STEPS * 20 + 60, 6, 0.0)

    def objective(inputs: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(inputs)
        return outputs, F.mse_loss(outputs, inputs)

    batches = [data[20 * step : 20 * step + 80] for step in range(NUM_STEPS)]
    return [float(optimizer.step(objective, batch)) for batch in batches]


@pytest.mark.parametrize("style", STYLES)
def test_the_losses_of_20_steps_are_those_that_are_stored(style: str) -> None:
    golden = json.loads(GOLDEN.read_text())[style]
    assert curve(STYLES[style]) == pytest.approx(golden, rel=TOLERANCES[style])


@pytest.mark.parametrize("style", STYLES)
def test_the_stored_losses_fall(style: str) -> None:
    """A golden curve that went nowhere would say little."""
    losses = json.loads(GOLDEN.read_text())[style]
    assert len(losses) == NUM_STEPS
    assert losses[-1] < 0.2 * losses[0]


def test_each_style_has_its_own_curve() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert list(golden) == list(STYLES)
    assert len({tuple(losses) for losses in golden.values()}) == len(STYLES)


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps({style: curve(make) for style, make in STYLES.items()}, indent=1) + "\n")
