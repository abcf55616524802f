"""What the ranks of a mesh send each other: the collectives of torch.distributed, counted."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from blockhf._torch import accelerator, set_group_timeout, use_device
from blockhf.batches import batch_size, has_samples_elsewhere, rebuild, take, tensors_of

DIMENSIONS = ("block", "data")


class RankError(RuntimeError):
    """Another rank has stopped answering, or does something else."""


def mesh(
    block: int | None = None, data: int | None = None, *, device: str | None = None, timeout: float = 600.0
) -> DeviceMesh:
    """A mesh over all processes that ``torchrun`` started, of as many as ``block`` times ``data``.

    Args:
        block: How many ranks solve different blocks side by side. By default all that ``data`` leaves.
        data: How many ranks share the samples of a block. By default 1, or what ``block`` leaves.
        device: The kind of device that the model is on: ``"cpu"``, ``"cuda"``, … By default the machine's
            accelerator, if torch.distributed knows how to talk to it.
        timeout: After so many seconds without an answer the other ranks are taken to be lost.

    Raises:
        ValueError: The numbers do not fit.
    """
    kind = device or "cpu"
    if device is None and (found_device := accelerator()) is not None and found_device.type != "mps":
        kind = found_device.type
    num_ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if block is None:
        block = num_ranks // (data or 1)
    if data is None:
        data = num_ranks // block if block > 0 else 0
    if block < 1 or data < 1 or block * data != num_ranks:
        raise ValueError(
            f"block={block} times data={data} is not the number of processes, {num_ranks}. "
            f"Start so many: torchrun --nproc-per-node {max(block, 1) * max(data, 1)} …"
        )
    if not dist.is_initialized():
        limit = datetime.timedelta(seconds=timeout)
        if "WORLD_SIZE" in os.environ:
            if kind != "cpu":
                use_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group(timeout=limit)
        else:  # one process, not from torchrun
            dist.init_process_group(
                "gloo" if kind == "cpu" else None,
                store=dist.HashStore(),  # type: ignore[attr-defined]
                rank=0,
                world_size=1,
                timeout=limit,
            )
    found = init_device_mesh(kind, (block, data), mesh_dim_names=DIMENSIONS)
    for name in DIMENSIONS:  # groups of their own begin with torch's default, 30 minutes
        set_group_timeout(found.get_group(name), datetime.timedelta(seconds=timeout))
    return found


@dataclass
class Traffic:
    """What this rank has handed over to others since the last step began: calls and bytes by purpose."""

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def note(self, purpose: str, num_bytes: int) -> None:
        self.calls[purpose] = self.calls.get(purpose, 0) + 1
        self.bytes[purpose] = self.bytes.get(purpose, 0) + num_bytes

    def summary(self) -> dict[str, int]:
        """For the report."""
        return {
            **{f"{purpose}_messages": number for purpose, number in self.calls.items()},
            **{f"{purpose}_bytes": number for purpose, number in self.bytes.items()},
        }

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()


class Collectives:
    """This process among the others of a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.mesh_dim_names != DIMENSIONS:
            raise ValueError(
                f"The mesh has the dimensions {mesh.mesh_dim_names}, but must have {DIMENSIONS}. "
                "Build it with blockhf.mesh(block=…, data=…)."
            )
        if mesh.size() != dist.get_world_size():
            raise ValueError(
                f"The mesh has {mesh.size()} ranks of {dist.get_world_size()}. It must have all of them."
            )
        self.num_blocks, self.num_data = mesh.size(0), mesh.size(1)
        self.block, self.data = mesh.get_local_rank("block"), mesh.get_local_rank("data")
        self.rank, self.num_ranks = dist.get_rank(), mesh.size()
        self.traffic = Traffic()
        self._along_block, self._along_data = mesh.get_group("block"), mesh.get_group("data")
        self.device = torch.device(mesh.device_type)
        # Where each rank is in the mesh.
        self._places = {
            int(rank): (row, column)
            for row, ranks in enumerate(mesh.mesh.tolist())
            for column, rank in enumerate(ranks)
        }

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.num_blocks} x {self.num_data} (block x data)"

    def broadcast(self, tensors: Sequence[Tensor], purpose: str) -> None:
        """Write rank 0's values into the tensors of all ranks."""
        for tensor in tensors:
            with self._sending(purpose, tensor):
                dist.broadcast(tensor, 0)

    def row(self, block: int) -> str:
        """The ranks of a coordinate of blocks, in words."""
        ranks = [str(rank) for rank, (row, _) in sorted(self._places.items()) if row == block]
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"

    # Numbers

    def numbers(self, own: Sequence[float], purpose: str) -> list[list[float]]:
        """The numbers of all ranks, in the order of the ranks."""
        mine = torch.tensor(own, dtype=torch.float64, device=self.device)
        with self._sending(purpose, mine):
            found = [torch.empty_like(mine) for _ in range(self.num_ranks)]
            dist.all_gather(found, mine)
        return torch.stack(found).tolist()

    def objects(self, own: Any, purpose: str) -> list[Any]:
        """A small object of each rank, in the order of the ranks."""
        found: list[Any] = [None] * self.num_ranks
        with self._sending(purpose):
            dist.all_gather_object(found, own)
        return found

    def objects_along_block(self, own: Any, purpose: str) -> list[Any]:
        """An object of each rank of this column."""
        found: list[Any] = [None] * self.num_blocks
        with self._sending(purpose):
            dist.all_gather_object(found, own, group=self._along_block)
        return found

    # Sums

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Over all ranks."""
        return self._sum(tensors, None, "sums")

    def sum_along_data(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Over the ranks that own the same blocks."""
        if self.num_data == 1:
            return tensors
        return self._sum(tensors, self._along_data, "products")

    def _sum(self, tensors: Sequence[Tensor], group: dist.ProcessGroup | None, purpose: str) -> list[Tensor]:
        """One bucket for each kind of number and device."""
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(tensors):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
        results = list(tensors)
        for members in kinds.values():
            bucket = torch.cat([tensors[index].reshape(-1) for index in members])
            with self._sending(purpose, bucket):
                dist.all_reduce(bucket, group=group)
            pieces = torch.split(bucket, [tensors[index].numel() for index in members])
            for index, piece in zip(members, pieces, strict=True):
                results[index] = piece.view(tensors[index].shape)
        return results

    # Samples

    @property
    def by_column(self) -> list[int]:
        """All ranks, column by column: those that gather each other's samples are neighbors."""
        return sorted(self._places, key=lambda rank: self._places[rank][::-1])

    def gather_samples(self, batch: Any, counts: Sequence[int]) -> Any:
        """The samples of all ranks of this column: of each as many as ``counts`` says, from the front."""
        if self.num_blocks == 1:
            return take(batch, 0, counts[0])
        if has_samples_elsewhere(batch):
            raise ValueError(
                "On a mesh of blocks samples are sent as tensors, and the batch has lists or arrays of them. "
                "Pass tensors."
            )
        gathered, total = [], batch_size(batch)
        for tensor in tensors_of(batch):
            if tensor.dim() > 0:
                # Samples of several kinds are all sent, and in the same proportions everywhere.
                sizes = [count * len(tensor) // total for count in counts]
                shapes = [(size, *tensor.shape[1:]) for size in sizes]
                pieces = self.gather_along_block(tensor[: sizes[self.block]], shapes, "samples")
                tensor = torch.cat(pieces).to(tensor.device).requires_grad_(tensor.requires_grad)
            gathered.append(tensor)
        return rebuild(batch, gathered)

    def gather_along_block(self, own: Tensor, shapes: Sequence[Sequence[int]], purpose: str) -> list[Tensor]:
        """A tensor of each rank of this column, where all know the shapes of all."""
        # As bytes, because not every backend sends every type, and padded, as all must send as many.
        sizes = [torch.Size(shape).numel() * own.element_size() for shape in shapes]
        mine = torch.zeros(max(*sizes, 1), dtype=torch.uint8, device=self.device)
        mine[: sizes[self.block]] = own.detach().contiguous().view(-1).view(torch.uint8)
        with self._sending(purpose, mine):
            found = [torch.empty_like(mine) for _ in range(self.num_blocks)]
            dist.all_gather(found, mine, group=self._along_block)
        return [
            raw[:size].view(own.dtype).view(tuple(shape))
            for raw, size, shape in zip(found, sizes, shapes, strict=True)
        ]

    @contextlib.contextmanager
    def _sending(self, purpose: str, tensor: Tensor | None = None) -> Iterator[None]:
        self.traffic.note(purpose, 0 if tensor is None else tensor.numel() * tensor.element_size())
        try:
            yield
        except RuntimeError as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise RankError(
                f"{self!r} waited in vain for another rank while it exchanged the {purpose} ({reason}). "
                "The rank that failed says why in its own output; where none failed, one has fallen behind "
                "by more than the timeout of blockhf.mesh, or has left its loop earlier than the others."
            ) from error
