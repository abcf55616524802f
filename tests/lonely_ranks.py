"""What ranks of a process group do that their optimizers know nothing of."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from blockhf import BlockHF, blocks, mesh


def told(wrapped: bool, on_mesh: bool = False) -> tuple[str, int]:
    """What a rank is told that has no mesh: the error or the first warning, and how many warnings came.

    Args:
        wrapped: Whether the model is wrapped for data parallelism.
        on_mesh: Whether there is a mesh all the same.
    """
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, batch = nn.Linear(3, 2), (torch.randn(16, 3), torch.randn(16, 2))
    optimizer = BlockHF(blocks.single(model), mesh=mesh(data=2, device="cpu") if on_mesh else None)
    called = DistributedDataParallel(model) if wrapped else model

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = called(batch[0])
        return outputs, F.mse_loss(outputs, batch[1])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(3):
                optimizer.step(objective, batch)
        except ValueError as error:
            return str(error), len(caught)
    return str(caught[0].message), len(caught)
