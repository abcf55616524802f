"""``direction()`` in front of other optimizers: they get the preconditioned gradient instead of the gradient.

The inputs are mixtures of signals with scales from 0.01 to 1, as raw measurements are. That slows down what
follows the gradient, and scaling each parameter by itself, as Adam does, helps little.
Each contestant has the same processor time and the best of its learning rates.
``python examples/direction.py``
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from blockhf import AllSamples, BlockHF, blocks

FOLLOWERS: dict[str, Callable[..., Optimizer]] = {
    "SGD with momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "Adam": lambda params, lr: torch.optim.Adam(params, lr=lr),
}
if "Muon" in vars(torch.optim):  # from torch 2.9 on
    FOLLOWERS["Muon"] = lambda params, lr: torch.optim.Muon(params, lr=lr, weight_decay=0.0)
RATES = {
    "SGD with momentum": (0.03, 0.1, 0.3, 1.0),
    "Adam": (3e-3, 0.01, 0.03, 0.1),
    "Muon": (0.01, 0.03, 0.1, 0.3),
}


def draw(num_samples: int, generator: torch.Generator, *, mixed: bool) -> tuple[Tensor, Tensor]:
    """A smooth function of 20 signals of very different scales, of which mixtures are seen."""
    signals = torch.randn(num_samples, 20, generator=generator)
    fixed = torch.Generator().manual_seed(5)
    hidden = torch.tanh(signals @ torch.randn(20, 8, generator=fixed) / 3)
    targets = hidden @ torch.randn(8, 4, generator=fixed)
    mixture, _ = torch.linalg.qr(torch.randn(20, 20, generator=fixed))
    seen = signals * torch.logspace(-2, 0, 20)
    return seen @ mixture if mixed else seen, targets


def train(
    name: str, lr: float, arguments: argparse.Namespace, *, preconditioned: bool
) -> tuple[float, int, float]:
    """The loss on new samples, the number of steps and the seconds of the processor."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    width = arguments.width
    model = nn.Sequential(nn.Linear(20, width, bias=False), nn.Tanh(), nn.Linear(width, 4, bias=False))

    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, F.mse_loss(outputs, batch[1])

    newton = BlockHF(blocks.by_layer(model), sampling=AllSamples(), max_cg_steps=2, curvature_batch_size=300)
    follower = FOLLOWERS[name](model.parameters(), lr)
    start, num_steps = time.process_time(), 0
    while time.process_time() - start < arguments.seconds and num_steps != arguments.steps:
        batch = draw(arguments.samples, generator, mixed=arguments.mixed)
        if preconditioned:
            newton.direction(objective, batch)
        else:
            follower.zero_grad()
            objective(batch)[1].backward()
        follower.step()
        num_steps += 1
    seconds = time.process_time() - start
    with torch.no_grad():
        loss = float(objective(draw(2000, generator.manual_seed(2), mixed=arguments.mixed))[1])
    return loss if loss == loss else float("inf"), num_steps, seconds


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of the processor, for each run")
    parser.add_argument("--steps", type=int, default=-1, help="as many at most; -1 sets no limit")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--unmixed", dest="mixed", action="store_false", help="signals that are scaled alone")
    parser.add_argument("--width", type=int, default=64)
    arguments = parser.parse_args(argv)
    found: dict[str, Any] = {}
    for name in FOLLOWERS:
        for preconditioned in (False, True):
            runs = [(train(name, lr, arguments, preconditioned=preconditioned), lr) for lr in RATES[name]]
            (loss, num_steps, seconds), lr = min(runs)
            label = f"direction() + {name}" if preconditioned else name
            print(f"{label:32} loss {loss:.2e} after {num_steps:5d} steps, {seconds:.1f} s, lr {lr:g}")
            found[label] = loss
    return found


if __name__ == "__main__":
    main()
