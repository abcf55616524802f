"""Who solves which block, and what processes tell each other: thin collectives over a ``DeviceMesh``.

A mesh has two dimensions. Ranks with the same ``block`` coordinate own the same blocks and share the samples
of their curvature; ranks with different ones share nothing while they solve. In an update

- all ranks tell each other how many samples they have (a few numbers),
- the gradient is added up over all ranks,
- the curvature's samples are gathered along ``block``, as the owner of a block needs all of its column's,
- each product is added up along ``data``; with one rank there, nothing is sent while CG is at work,
- the directions are gathered along ``block``.

What all ranks decide by is the same on all of them to the last bit: it was gathered or reduced, and not
computed twice.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from blockhf.blocks import Block
from blockhf.objective import Total, rebuild, tensors_of
from blockhf.operators import BlockMatrix, gram
from blockhf.solvers import Iterate, Solution, Status

DIMENSIONS = ("block", "data")


class RankError(RuntimeError):
    """Another rank has stopped answering, or does something else."""


def mesh(block: int | None = None, data: int | None = None, *, timeout: float = 600.0) -> DeviceMesh:
    """A mesh over all processes that ``torchrun`` started, of as many as ``block`` times ``data``.

    Args:
        block: How many ranks solve different blocks side by side. By default all that ``data`` leaves.
        data: How many ranks share the samples of a block. By default 1, or what ``block`` leaves.
        timeout: After so many seconds without an answer the other ranks are taken to be lost.

    Raises:
        ValueError: The numbers do not fit.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if accelerator is None else accelerator.type
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
                torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group(timeout=limit)
        else:  # one process, not from torchrun
            dist.init_process_group(
                "gloo" if kind == "cpu" else None,
                store=dist.HashStore(),  # type: ignore[attr-defined]
                rank=0,
                world_size=1,
                timeout=limit,
            )
    return init_device_mesh(kind, (block, data), mesh_dim_names=DIMENSIONS)


# Placement: pure functions


@dataclass(frozen=True)
class Placement:
    """Which coordinate owns each block, and what each coordinate has to do."""

    owners: tuple[int, ...]
    loads: tuple[float, ...]

    @property
    def time(self) -> float:
        """When the last is done."""
        return max(self.loads)


def assign(costs: Sequence[float], num_owners: int) -> Placement:
    """Share out blocks, the dearest first, each to whoever has least to do.

    >>> assign([4.0, 3.0, 3.0, 1.0], 2)
    Placement(owners=(0, 1, 1, 0), loads=(5.0, 6.0))
    """
    loads = [0.0] * num_owners
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owner = min(range(num_owners), key=lambda owner: (loads[owner], owner))
        owners[index] = owner
        loads[owner] += costs[index]
    return Placement(tuple(owners), tuple(loads))


def estimated_costs(sizes: Sequence[int]) -> list[float]:
    """What a product with each block costs, in the units of one pass through its parameters.

    Blocks come in the network's order. A tangent begins at the block and goes through all that come after;
    a cotangent comes back the same way. In the block itself there are also the change of its parameters and
    the gradient by them.

    >>> estimated_costs([10, 10])
    [60.0, 40.0]
    """
    after = [sum(sizes[index + 1 :]) for index in range(len(sizes))]
    return [4.0 * size + 2.0 * rest for size, rest in zip(sizes, after, strict=True)]


def best_shape(costs: Sequence[float], num_ranks: int) -> tuple[int, int]:
    """The mesh of so many ranks, ``(block, data)``, on which the dearest coordinate is done first.

    Where one block is dearer than all others, it is shared by several ranks along ``data``, while the small
    ones are grouped on one coordinate. Of two that are as good, the one that sends less, with more
    coordinates of blocks.

    >>> best_shape([1.0, 1.0], 4), best_shape([9.0, 1.0, 1.0], 2), best_shape([1.0, 1.0, 1.0], 3)
    ((2, 2), (1, 2), (3, 1))
    """
    shapes = [(block, num_ranks // block) for block in range(1, num_ranks + 1) if num_ranks % block == 0]
    return min(shapes, key=lambda shape: (assign(costs, shape[0]).time / shape[1], -shape[0]))


class Ownership:
    """Who owns which block now, and whether another placement would be better.

    The first guess goes by ``estimated_costs``; from then on the measured times count. They are known to all
    ranks, so all come to the same.

    Args:
        num_owners: How many coordinates there are.
        gain: Blocks move where the slowest coordinate would be done earlier by this share.
        every: But only so many steps after the last time, as they take their state along.
        memory: The weight of the past in the averages of the measured times.
    """

    def __init__(self, num_owners: int, *, gain: float = 0.1, every: int = 5, memory: float = 0.5) -> None:
        self.num_owners, self.gain, self.every, self.memory = num_owners, gain, every, memory
        self.owners: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        """How long this rank's own blocks took in the last step."""
        self._costs: dict[str, float] = {}
        self._num_measured = 0
        self._next: dict[str, int] = {}

    def begin(self, sizes: Mapping[str, int]) -> None:
        """Place blocks by their sizes."""
        placement = assign(estimated_costs(list(sizes.values())), self.num_owners)
        self.owners = dict(zip(sizes, placement.owners, strict=True))

    def is_due(self, sizes: Mapping[str, int], measured: Mapping[str, float]) -> bool:
        """Take in what was measured; whether the blocks should ``move``.

        Args:
            sizes: Of the blocks, in the network's order.
            measured: Seconds of each in the last step, on the slowest of its owners; zero if unknown.
        """
        if all(measured.get(name, 0.0) > 0 for name in sizes):
            self._num_measured += 1
            if self._num_measured > 1:  # the first time includes what is done once
                for name in sizes:
                    known = self._costs.get(name, measured[name])
                    self._costs[name] = self.memory * known + (1 - self.memory) * measured[name]
        known = all(name in self._costs for name in sizes)
        costs = [self._costs[name] for name in sizes] if known else estimated_costs(list(sizes.values()))
        placement = assign(costs, self.num_owners)
        self._next = dict(zip(sizes, placement.owners, strict=True))
        if any(name not in self.owners for name in sizes):
            return True
        loads = [0.0] * self.num_owners
        for name, cost in zip(sizes, costs, strict=True):
            loads[self.owners[name]] += cost
        ready = known and self._num_measured > self.every
        return ready and placement.time < (1 - self.gain) * max(loads)

    def move(self) -> None:
        """Take the better placement."""
        self.owners, self.seconds, self._num_measured = self._next, {}, 0


def share_out(number: int, sizes: Sequence[int]) -> list[int]:
    """Take a number of samples from shards in proportion to their sizes.

    >>> share_out(10, [100, 100, 50])
    [4, 4, 2]
    >>> share_out(3, [1, 1, 1, 1])
    [1, 1, 1, 0]
    """
    total = sum(sizes)
    number = min(number, total)
    exact = [number * size / total if total else 0.0 for size in sizes]
    shares = [int(share) for share in exact]
    by_rest = sorted(range(len(sizes)), key=lambda rank: (shares[rank] - exact[rank], rank))
    for rank in itertools.islice(itertools.cycle(by_rest), 2 * len(sizes)):
        if sum(shares) == number:
            break
        if shares[rank] < sizes[rank]:
            shares[rank] += 1
    return shares


# Processes


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


class Team:
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
        self._device = torch.device(mesh.device_type)
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
        return ", ".join(str(rank) for rank, (row, _) in sorted(self._places.items()) if row == block)

    # Numbers

    def numbers(self, own: Sequence[float], purpose: str) -> list[list[float]]:
        """The numbers of all ranks, in the order of the ranks."""
        mine = torch.tensor(own, dtype=torch.float64, device=self._device)
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

    def column(self, counts: Sequence[int]) -> list[int]:
        """Of a number for each rank, those of this column, along ``block``."""
        found = [0] * self.num_blocks
        for rank, (row, column) in self._places.items():
            if column == self.data:
                found[row] = counts[rank]
        return found

    def columns(self, counts: Sequence[int]) -> list[int]:
        """The sums of the columns, along ``data``."""
        found = [0] * self.num_data
        for rank, (_, column) in self._places.items():
            found[column] += counts[rank]
        return found

    def gather_samples(self, batch: Any, counts: Sequence[int]) -> Any:
        """The samples of all ranks of this column: of each as many as ``counts`` says, from the front."""
        own = [tensor for tensor in tensors_of(batch) if tensor.dim() > 0]
        shapes = [[(tensor.dtype, (count, *tensor.shape[1:])) for tensor in own] for count in counts]
        received = self._gather_bytes(
            [tensor[: counts[self.block]] for tensor in own],
            [sum(_num_bytes(*shape) for shape in each) for each in shapes],
            "samples",
        )
        columns: list[list[Tensor]] = [[] for _ in own]
        for each, buffer in zip(shapes, received, strict=True):
            for column, piece in zip(columns, _unpacked(buffer, each), strict=True):
                column.append(piece)
        whole = iter([torch.cat(column) for column in columns])
        return rebuild(batch, [next(whole) if tensor.dim() > 0 else tensor for tensor in tensors_of(batch)])

    # Solutions

    def gather_solutions(
        self,
        own: Mapping[int, tuple[Solution, Sequence[float]]],
        owners: Sequence[int],
        likes: Sequence[Tensor],
        num_iterates: Sequence[int],
        num_numbers: int,
    ) -> list[tuple[Solution, list[float]]]:
        """Of all blocks, from their owners, each with some numbers about it.

        Args:
            own: The solutions of this rank's blocks.
            owners: Who has which block.
            likes: A vector of the size and kind of each block's.
            num_iterates: How many iterates a block's solution has at most.
            num_numbers: How many numbers come with each.
        """
        shapes = [
            [(torch.float64, (_HEAD + num_numbers + 2 * most,))]
            + [(like.dtype, (like.numel(),))] * (1 + most)
            for like, most in zip(likes, num_iterates, strict=True)
        ]
        packed = [
            tensor
            for index, (solution, numbers) in own.items()
            for tensor in _packed_solution(solution, numbers, likes[index], num_iterates[index])
        ]
        sizes = [
            sum(
                _num_bytes(*shape)
                for index, each in enumerate(shapes)
                for shape in each
                if owners[index] == row
            )
            for row in range(self.num_blocks)
        ]
        received = self._gather_bytes(packed, sizes, "directions")
        found: list[tuple[Solution, list[float]] | None] = [None] * len(owners)
        for row, buffer in enumerate(received):
            mine = [index for index, owner in enumerate(owners) if owner == row]
            pieces = iter(_unpacked(buffer, [shape for index in mine for shape in shapes[index]]))
            for index in mine:
                found[index] = _unpacked_solution(
                    [next(pieces).to(likes[index].device) for _ in shapes[index]], num_numbers
                )
        return [each for each in found if each is not None]

    def _gather_bytes(self, own: Sequence[Tensor], sizes: Sequence[int], purpose: str) -> list[Tensor]:
        """Tensors of any kinds as bytes, from each rank along ``block``, which has so many."""
        mine = torch.zeros(max(*sizes, 1), dtype=torch.uint8, device=self._device)
        place = 0
        for tensor in own:
            raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
            mine[place : place + len(raw)] = raw
            place += _aligned(len(raw))
        if self.num_blocks == 1:
            return [mine]
        with self._sending(purpose, mine):
            found = [torch.empty_like(mine) for _ in range(self.num_blocks)]
            dist.all_gather(found, mine, group=self._along_block)
        return found

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


# What goes over the wire

_HEAD = 6
_STATUSES = list(Status)


def _packed_solution(
    solution: Solution, numbers: Sequence[float], like: Tensor, num_iterates: int
) -> list[Tensor]:
    kept = list(solution.iterates)[-num_iterates:] if num_iterates else []
    head = [
        float(_STATUSES.index(solution.status)),
        float(solution.num_steps),
        float(solution.num_products),
        solution.residual,
        solution.model,
        float(len(kept)),
        *numbers,
    ]
    steps = [each for iterate in kept for each in (float(iterate.step), iterate.model)]
    head += steps + [0.0] * (2 * num_iterates - len(steps))
    vectors = [iterate.x for iterate in kept]
    vectors += [torch.zeros_like(like)] * (num_iterates - len(vectors))
    return [torch.tensor(head, dtype=torch.float64, device=like.device), solution.x, *vectors]


def _unpacked_solution(tensors: Sequence[Tensor], num_numbers: int) -> tuple[Solution, list[float]]:
    head, x, *vectors = tensors
    status, num_steps, num_products, residual, model, num_kept, *rest = head.tolist()
    numbers, steps = rest[:num_numbers], rest[num_numbers:]
    iterates = tuple(
        Iterate(int(steps[2 * place]), vectors[place], steps[2 * place + 1]) for place in range(int(num_kept))
    )
    solution = Solution(
        x, _STATUSES[int(status)], int(num_steps), int(num_products), residual, model, iterates
    )
    return solution, numbers


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def _num_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return _aligned(torch.Size(shape).numel() * dtype.itemsize)


def _unpacked(buffer: Tensor, shapes: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    found, place = [], 0
    for dtype, shape in shapes:
        size = torch.Size(shape).numel() * dtype.itemsize
        found.append(buffer[place : place + size].view(dtype).view(shape))
        place += _aligned(size)
    return found


# Matrices


@dataclass(frozen=True, eq=False)
class Summed:
    """A matrix whose samples several ranks have between them: each has its share of every product."""

    matrix: BlockMatrix
    total: Total
    dense: Mapping[int, Tensor]

    @classmethod
    def over(cls, total: Total, matrix: BlockMatrix, blocks: Sequence[Block]) -> Summed:
        """The sum over ranks; blocks are formed where all ranks have formed their shares."""
        formed: Mapping[int, Tensor] = getattr(matrix, "dense", {})
        like = blocks[0].params[0]
        flags = [float(index in formed) for index in range(len(blocks))]
        (counted,) = total([like.new_tensor([*flags, 1.0])])
        *counts, num_ranks = counted.tolist()
        everywhere = [index for index, count in enumerate(counts) if count == num_ranks]
        sums = total([formed[index] for index in everywhere]) if everywhere else []
        return cls(matrix, total, dict(zip(everywhere, sums, strict=True)))

    @property
    def notes(self) -> Sequence[str]:
        notes: Sequence[str] = getattr(self.matrix, "notes", ())
        return notes

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        if row == column and row in self.dense:
            return self.dense[row] @ vector
        (product,) = self.total([self.matrix.product(row, column, vector)])
        return product

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        (product,) = self.total([gram(self.matrix, columns, vectors)])
        return product


# Agreement


def differences(described: Sequence[Mapping[str, Any]]) -> list[str]:
    """What ranks say otherwise than rank 0, in words; at most one line for each rank."""
    lines = []
    for rank, other in enumerate(described[1:], start=1):
        for key in {**described[0], **other}:
            first, second = described[0].get(key), other.get(key)
            if first != second:
                lines.append(f"{key} is {first!r} on rank 0 and {second!r} on rank {rank}")
                break
    return lines


def merged(states: Sequence[Any]) -> Any:
    """Nested mappings in one, with all their keys; of two values for a key, the first counts.

    >>> merged([{"steps": 3, "factors": {"a": 1}}, {"steps": 3, "factors": {"b": 2}}])
    {'steps': 3, 'factors': {'a': 1, 'b': 2}}
    """
    if not all(isinstance(state, dict) for state in states):
        return states[0]
    keys = dict.fromkeys(key for state in states for key in state)
    return {key: merged([state[key] for state in states if key in state]) for key in keys}


def without(state: Any, names: set[str]) -> Any:
    """Nested mappings without what is kept under some blocks' names, or under ``name/…``.

    >>> without({"steps": 3, "factors": {"encoder/0": 1, "decoder/0": 2}}, {"decoder"})
    {'steps': 3, 'factors': {'encoder/0': 1}}
    """
    if not isinstance(state, dict):
        return state
    return {
        key: without(value, names)
        for key, value in state.items()
        if not (isinstance(key, str) and (key in names or key.rpartition("/")[0] in names))
    }


def on_cpu(state: Any) -> Any:
    """Nested mappings and lists with their tensors on the CPU, as they travel."""
    if isinstance(state, Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    if isinstance(state, list):
        return [on_cpu(value) for value in state]
    return state
