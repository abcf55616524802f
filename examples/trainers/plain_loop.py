"""A plain loop: a scheduler, an average of the weights, TensorBoard, and a checkpoint that resumes.

``python examples/trainers/plain_loop.py --log runs/plain``
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from blockhf import BlockHF, blocks
from blockhf.integrations.tensorboard import write_report


class Run:
    """All that a checkpoint holds: the model, its average, the optimizer and the schedule."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        width = arguments.width
        self.model = nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 5))
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.optimizer = BlockHF(blocks.by_layer(self.model), weight_decay=1e-4)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=arguments.steps, eta_min=0.1)

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "average": self.average,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def save(self) -> io.BytesIO:
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts().items()}, file)
        return file

    def load(self, file: io.BytesIO) -> None:
        file.seek(0)
        state = torch.load(file, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])

    def objective(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self.model(batch[0])
        return logits, F.cross_entropy(logits, batch[1])

    def step(self, batch: Any, writer: Any = None) -> float:
        loss = self.optimizer.step(self.objective, batch)
        self.scheduler.step()
        self.average.update_parameters(self.model)
        if writer is not None and self.optimizer.report is not None:
            write_report(writer, self.optimizer.report)
        return float(loss)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--log", type=Path, default=None, help="a folder for TensorBoard")
    arguments = parser.parse_args(argv)
    writer = None
    if arguments.log is not None:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(arguments.log))

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(arguments.samples, 20, generator=generator)
    batch = inputs, (inputs @ torch.randn(20, 5, generator=generator) + inputs[:, :5] ** 2).argmax(1)

    whole, half = Run(arguments), Run(arguments)
    losses = [whole.step(batch, writer) for _ in range(arguments.steps)]
    for _ in range(arguments.steps // 2):
        half.step(batch)
    resumed = Run(arguments)
    resumed.load(half.save())
    for _ in range(arguments.steps - arguments.steps // 2):
        resumed.step(batch)
    if writer is not None:
        writer.close()

    ends = [nn.utils.parameters_to_vector(own.average.parameters()) for own in (whole, resumed)]
    with torch.no_grad():
        average = float(F.cross_entropy(whole.average(batch[0]), batch[1]))
    found = {"losses": losses, "average": average, "equal": torch.equal(*ends)}
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, of the average {average:.3f}")
    print(f"resumed equal: {found['equal']}")
    return found


if __name__ == "__main__":
    main()
