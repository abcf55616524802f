"""How the ranks of a mesh make an update together.

Ranks with the same ``block`` coordinate own the same blocks and share the samples of their curvature; ranks
with different ones share nothing while they solve. In an update

- all ranks tell each other how many samples they have (a few numbers),
- the gradient is added up over all ranks,
- the curvature's samples are gathered along ``block``, as the owner of a block needs all of its column's,
- each product is added up along ``data``; with one rank there, nothing is sent while CG is at work,
- the directions are gathered along ``block``.

What all ranks decide by is the same on all of them to the last bit: it was gathered or reduced. Along
``data`` each rank of a row makes CG by itself, from the same sums. So that it is the same there too, ranks
must have as many threads and the same kind of processor.
"""

from __future__ import annotations

import abc
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from blockhf.batches import Share, take, tensors_of
from blockhf.blocks import Block
from blockhf.isolation import RandomState
from blockhf.linalg import BlockOperator, ForwardingOperator, Root, Solution, Status
from blockhf.meshes.base import Mesh, SolvedBlock
from blockhf.meshes.collectives import Collectives
from blockhf.meshes.placement import assign, estimated_costs
from blockhf.plan import Plan
from blockhf.point import Point
from blockhf.ranks import Ranks
from blockhf.samples import Part

_STATUSES = list(Status)


class Distributed(Mesh):
    """The ranks of a ``DeviceMesh``.

    Args:
        mesh: With the dimensions ``block`` and ``data``, from ``blockhf.mesh``.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ranks = Collectives(mesh)
        self._order = self.ranks.by_column
        self.rank = self._order.index(self.ranks.rank)
        self.everyone = _Everyone(self.ranks)
        self._sizes: dict[str, list[int]] = {}  # of each block's tensors
        self._owners: dict[str, int] = {}

    def __reduce__(self) -> Any:
        raise TypeError("An optimizer on a mesh cannot be copied. Copy its state_dict().")

    def join(self, description: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        here = {
            "the version of torch": torch.__version__,
            "the number of threads": torch.get_num_threads(),
            "the kind of processor": torch.backends.cpu.get_cpu_capability(),
        }
        self._agree({**here, **description})
        self.ranks.broadcast([param.data for param in params], "parameters")
        costs = self._costs()
        owners = assign(list(costs.values()), self.ranks.num_blocks).owners
        self._owners = dict(zip(costs, owners, strict=True))

    def place(self, name: str, params: Sequence[Tensor]) -> None:
        self._sizes[name] = [param.numel() for param in params]
        if not self._owners:  # all are placed at once by ``join``
            return
        kinds = [(tuple(param.shape), str(param.dtype)) for param in params]
        self._agree({"the new block": name, f"the parameters of block {name!r}": kinds})
        self.ranks.broadcast([param.data for param in params], "parameters")
        # It goes where there is least to do; the others keep their state and stay.
        loads, costs = [0.0] * self.ranks.num_blocks, self._costs()
        for other, owner in self._owners.items():
            loads[owner] += costs[other]
        self._owners[name] = loads.index(min(loads))

    def _costs(self) -> dict[str, float]:
        """What a product with each block costs, by the blocks' names."""
        costs = estimated_costs(
            [sum(own) for own in self._sizes.values()], [own[0] for own in self._sizes.values()]
        )
        return dict(zip(self._sizes, costs, strict=True))

    def owns(self, name: str) -> bool:
        return self._owners[name] == self.ranks.block

    def meet(
        self, numbers: Sequence[int], batch: Any, describe: Callable[[], Mapping[str, Any]]
    ) -> list[list[int]]:
        self.ranks.traffic.clear()
        alike = self.ranks.num_blocks > 1
        kinds = [
            (str(tensor.dtype), tuple(tensor.shape[1:]) if alike else tensor.dim())
            for tensor in tensors_of(batch)
        ]
        if not kinds:
            raise ValueError("On a mesh the samples are shared out: pass them to step() as the batch.")
        description = {**describe(), "the kind of a sample": kinds}
        met = self.ranks.numbers([zlib.crc32(repr(description).encode()), *numbers], "numbers")
        if len({each[0] for each in met}) > 1:
            self._agree(description)
        return [[int(number) for number in met[rank][1:]] for rank in self._order]

    def own_curvature(self, point: Point, plan: Plan) -> tuple[Point, list[int]]:
        ranks, batch = self.ranks, point.samples.batch
        mine = [index for index, block in enumerate(point.blocks) if self.owns(block.name)]
        counts, height = plan.curvature.counts, ranks.num_blocks
        columns = [counts[start : start + height] for start in range(0, len(counts), height)]
        column = columns[ranks.data]
        # Where the column has none, one sample stands in, with no weight.
        gathered = ranks.gather_samples(batch, column) if any(column) else take(batch, 0, 1)
        if not mine:
            return point, []
        own = point.on(
            gathered,
            Share.of([sum(each) for each in columns], ranks.data),
            blocks=[point.blocks[index] for index in mine],
            ranks=_AlongData(ranks),
            like=[Part(None, start=RandomState(point.samples.devices))],  # the gradient's had other samples
        )
        return own, mine

    def exchange(self, blocks: Sequence[Block], own: Mapping[int, SolvedBlock]) -> dict[int, SolvedBlock]:
        if self.ranks.num_blocks == 1:
            return dict(own)
        owners = [self._owners[block.name] for block in blocks]
        heads = self._exchange_numbers(len(blocks), own)
        vectors: dict[int, Tensor] = {}
        for dtype in sorted({block.params[0].dtype for block in blocks}, key=str):
            members = [index for index, block in enumerate(blocks) if block.params[0].dtype == dtype]
            vectors |= self._exchange_vectors(blocks, owners, members, own)
        found = {}
        for index, owner in enumerate(owners):
            status, num_steps, num_products, residual, model, counted, damping = heads[owner][index]
            solution = Solution(
                vectors[index], _STATUSES[int(status)], int(num_steps), int(num_products), residual, model
            )
            note = own[index].note if index in own else f"solved by {self.ranks.row(owner)}"
            found[index] = SolvedBlock(solution, int(counted), note, damping)
        return found

    def _exchange_numbers(self, num_blocks: int, own: Mapping[int, SolvedBlock]) -> list[list[list[float]]]:
        """What each coordinate says of each block's solution; what it says of others' is zero."""
        head = torch.zeros(num_blocks, 7, dtype=torch.float64, device="cpu")
        for index, each in own.items():
            found = each.solution
            numbers = (_STATUSES.index(found.status), found.num_steps, found.num_products, found.residual)
            head[index] = head.new_tensor([*numbers, found.model, each.num_products, each.damping])
        shapes = [tuple(head.shape)] * self.ranks.num_blocks
        return [
            each.tolist()
            for each in self.ranks.gather_along_block(head.to(self.ranks.device), shapes, "directions")
        ]

    def _exchange_vectors(
        self,
        blocks: Sequence[Block],
        owners: Sequence[int],
        members: Sequence[int],
        own: Mapping[int, SolvedBlock],
    ) -> dict[int, Tensor]:
        """The solutions of blocks whose parameters are of one type."""
        like = blocks[members[0]].params[0]
        mine = [own[index].solution.x for index in members if index in own]
        places = [
            [index for index in members if owners[index] == row] for row in range(self.ranks.num_blocks)
        ]
        shapes = [[sum(blocks[index].size for index in row)] for row in places]
        flat = torch.cat([like.new_empty(0), *mine]).to(self.ranks.device)
        found: dict[int, Tensor] = {}
        gathered = self.ranks.gather_along_block(flat, shapes, "directions")
        for row, vector in zip(places, gathered, strict=True):
            pieces = torch.split(vector, [blocks[index].size for index in row])
            for index, piece in zip(row, pieces, strict=True):
                found[index] = piece.to(blocks[index].params[0].device)
        return found

    def add_up(self, numbers: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self.ranks.numbers(numbers, "numbers"), strict=True)]

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        if self.ranks.num_blocks == 1:
            return state
        states = self.ranks.objects_along_block(moved(state, "cpu"), "state")
        found: dict[str, Any] = moved(merged(states), self.ranks.device)
        return found

    def traffic(self) -> dict[str, int]:
        return self.ranks.traffic.summary()

    def _agree(self, own: Mapping[str, Any]) -> None:
        if lines := differences(self.ranks.objects(dict(own), "settings")):
            raise ValueError("The ranks do not do the same: " + "; ".join(lines) + ".")


class _Summing(Ranks):
    """Ranks whose sums go over the wire."""

    def __init__(self, ranks: Collectives) -> None:
        self.ranks = ranks

    @property
    @abc.abstractmethod
    def place(self) -> tuple[int, int]:
        """The place of this process among them, and how many they are."""

    def gather(self, tensor: Tensor) -> Tensor:
        place, number = self.place
        counts = torch.zeros(number, dtype=torch.long, device=self.ranks.device)
        counts[place] = len(tensor)
        lengths = self.sum([counts])[0].tolist()
        before = sum(lengths[:place])
        rows = tensor.new_zeros(sum(lengths), *tensor.shape[1:])
        rows[before : before + len(tensor)] = tensor
        return self.sum([rows])[0]

    def sum_operator(self, operator: BlockOperator) -> BlockOperator:
        return SumOverRanks(operator, self, self.ranks.device)


class _Everyone(_Summing):
    @property
    def place(self) -> tuple[int, int]:
        return self.ranks.by_column.index(self.ranks.rank), self.ranks.num_ranks

    def sum(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.ranks.sum(tensors)


class _AlongData(_Summing):
    @property
    def place(self) -> tuple[int, int]:
        return self.ranks.data, self.ranks.num_data

    def sum(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.ranks.sum_along_data(tensors)


class SumOverRanks(ForwardingOperator):
    """A matrix whose samples several ranks have between them: each has its share of every product.

    Blocks are stored where all ranks have stored their shares. Roots are gathered: each rank made the rows of
    its own samples, and then has all of them.
    """

    def __init__(self, operator: BlockOperator, ranks: Ranks, device: torch.device) -> None:
        super().__init__(operator)
        self.ranks = ranks
        stored = [operator.dense(index) for index in range(len(operator.sizes))]
        has_root = operator.scaled_outputs() is not None
        flags = [*(float(own is not None) for own in stored), float(has_root), 1.0]
        (counted,) = ranks.sum([torch.tensor(flags, device=device)])
        *counts, num_roots, num_ranks = counted.tolist()
        self._has_roots = num_roots == num_ranks
        self._roots: dict[int, Root | None] = {}
        shares = {
            index: own
            for index, (own, count) in enumerate(zip(stored, counts, strict=True))
            if own is not None and count == num_ranks
        }
        sums = ranks.sum(list(shares.values())) if shares else []
        self._stored = dict(zip(shares, sums, strict=True))

    def dense(self, block: int) -> Tensor | None:
        return self._stored.get(block)

    def root(self, block: int) -> Root | None:
        if self._has_roots and block not in self._roots:
            own = super().root(block)
            gather = self.ranks.gather
            self._roots[block] = own and Root(gather(own.rows), gather(own.slopes))
        return self._roots.get(block)

    def scaled_outputs(self, outputs: Sequence[Sequence[Tensor]] | None = None) -> Tensor | None:
        own = super().scaled_outputs(outputs) if self._has_roots else None
        return None if own is None else self.ranks.gather(own)

    def mean_diagonal(self, block: int, like: Tensor) -> float:
        own = torch.tensor(super().mean_diagonal(block, like), dtype=torch.float64, device=like.device)
        (total,) = self.ranks.sum([own])
        return float(total)

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        if row == column and row in self._stored:
            return self._stored[row] @ vector
        (product,) = self.ranks.sum([self.operator.product(row, column, vector)])
        return product

    def products(self, row: int, column: int, vectors: Tensor) -> Tensor:
        if row == column and row in self._stored:
            return self._stored[row] @ vectors
        (product,) = self.ranks.sum([self.operator.products(row, column, vectors)])
        return product

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        (product,) = self.ranks.sum([self.operator.gram(columns, vectors)])
        return product


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
    if all(isinstance(state, int) for state in states):  # steps, which not all ranks have to make
        return max(states)
    if not all(isinstance(state, dict) for state in states):
        return states[0]
    keys = dict.fromkeys(key for state in states for key in state)
    return {key: merged([state[key] for state in states if key in state]) for key in keys}


def moved(state: Any, device: torch.device | str) -> Any:
    """Nested mappings and lists with their tensors on a device."""
    if isinstance(state, Tensor):
        return state.detach().to(device)
    if isinstance(state, dict):
        return {key: moved(value, device) for key, value in state.items()}
    if isinstance(state, list):
        return [moved(value, device) for value in state]
    return state
