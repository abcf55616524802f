"""Costs in gradient-equivalents, GE: one gradient on the task's large batch is 1.

Counted, not measured: the same run costs the same on every machine and under any load. What is counted are
the multiplications and additions of matrix products and convolutions, which is what ``FlopCounterMode``
sees; what is done element by element is left out, in gradients as in products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from blockhf.report import StepReport
from blockhf_lab.tasks import Samples, Task

_COUNTED_SAMPLES = 8


@dataclass(frozen=True)
class Unit:
    """One GE.

    Attributes:
        samples: The large batch.
        flops: Multiplications and additions of a gradient on it.
    """

    samples: int
    flops: float

    def of_samples(self, num_samples: int) -> float:
        """The cost of one gradient on so many samples."""
        return num_samples / self.samples

    def of_report(self, report: StepReport) -> float:
        """The cost of a step of ``BlockHF``."""
        return report.work["flops"] / self.flops


def unit(task: Task, model: nn.Module, samples: Samples) -> Unit:
    """Count one gradient of the task on a few samples, and scale to the large batch.

    Where there is no product of matrices, a parameter at a sample counts as one.
    """
    batch = samples.take(slice(0, _COUNTED_SAMPLES))
    params = [param for param in model.parameters() if param.requires_grad]
    with FlopCounterMode(display=False) as counter:
        _, loss = task.objective(model)(batch)
        torch.autograd.grad(loss, params)
    counted = counter.get_total_flops() or len(batch[0]) * sum(param.numel() for param in params)
    return Unit(task.large_batch, counted / len(batch[0]) * task.large_batch)
