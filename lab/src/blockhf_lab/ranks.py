"""A run by several processes: ``torchrun`` starts them, each has its share of every batch, one writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from blockhf.blocks import Group
from blockhf.meshes import Collectives, best_shape, estimated_costs, mesh

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """This process among the others of a run; with no mesh it is the only one."""

    mesh: DeviceMesh | None = None
    collectives: Collectives | None = None

    @property
    def number(self) -> int:
        return 1 if self.collectives is None else self.collectives.num_ranks

    @property
    def leads(self) -> bool:
        """Whether it is the one that writes and prints."""
        return self.collectives is None or self.collectives.rank == 0

    @property
    def shape(self) -> str | None:
        """The mesh as on the command line, ``BLOCKxDATA``."""
        return (
            None if self.collectives is None else f"{self.collectives.num_blocks}x{self.collectives.num_data}"
        )

    def share(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The samples of a batch that this process takes."""
        if self.collectives is None:
            return batch
        size, rank = len(batch[0]), self.collectives.rank
        start, stop = rank * size // self.number, (rank + 1) * size // self.number
        return batch[0][start:stop], batch[1][start:stop]

    def numbers(self, own: Sequence[float]) -> list[list[float]]:
        """Those of all processes, in their order."""
        return [list(own)] if self.collectives is None else self.collectives.numbers(own, "numbers")

    def first(self, value: Value) -> Value:
        """The first process's value."""
        if self.collectives is None:
            return value
        found: Value = self.collectives.objects(value if self.leads else None, "numbers")[0]
        return found

    def average(self, params: Sequence[Tensor], loss: Tensor, num_samples: int) -> Tensor:
        """Make the gradients those of all processes' samples; returns the loss of them all."""
        if self.collectives is None:
            return loss
        total = sum(number for (number,) in self.numbers([float(num_samples)]))
        own = [loss, *(torch.zeros_like(param) if param.grad is None else param.grad for param in params)]
        loss, *gradients = self.collectives.sum([tensor * (num_samples / total) for tensor in own])
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        return loss


ALONE = Ranks()


def is_one_of_many() -> bool:
    """Whether ``torchrun`` started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def has_restarted() -> bool:
    """Whether ``torchrun`` has started this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def join(shape: str | None, make_groups: Callable[[], Sequence[Group] | None]) -> Ranks:
    """Meet the other processes.

    Args:
        shape: The mesh, ``BLOCKxDATA``; without it, the best for the blocks.
        make_groups: Makes the blocks, or ``None`` where all parameters are treated alike; asked where there
            are several processes and no shape.

    Raises:
        ValueError: The shape cannot be read, or does not fit.
    """
    if not is_one_of_many():
        if shape is not None:
            raise ValueError(f"A mesh of {shape} needs several processes. Start them with --ranks.")
        return ALONE
    if shape is not None:
        numbers = shape.lower().split("x")
        if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
            raise ValueError(f"Cannot read the mesh {shape!r}. Write 2x1, for block x data.")
        chosen = int(numbers[0]), int(numbers[1])
    elif (groups := make_groups()) is None:
        chosen = 1, int(os.environ["WORLD_SIZE"])
    else:
        sizes = [[param.numel() for _, param in group["params"]] for group in groups]
        costs = estimated_costs([sum(own) for own in sizes], [own[0] for own in sizes])
        chosen = best_shape(costs, int(os.environ["WORLD_SIZE"]))
    found = mesh(*chosen)
    return Ranks(found, Collectives(found))


def leave() -> None:
    """Part from the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(number: int, restarts: int, arguments: Sequence[str]) -> int:
    """Run ``blockhf`` with these arguments in several processes of this machine; returns the exit code."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(number), "--max-restarts", str(restarts)),
        *("-m", "blockhf", *arguments),
    ]
    environment: dict[str, Any] = {**os.environ}
    environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // number, 1)))
    # Otherwise processes that are started again find the addresses of those that failed, and wait for them.
    environment.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    process = subprocess.Popen(command, env=environment)
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    try:
        return process.wait()
    except KeyboardInterrupt:  # the processes have it too, and save
        return process.wait()
