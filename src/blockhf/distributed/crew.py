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

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from blockhf.blocks import Block
from blockhf.distributed.placement import Ownership
from blockhf.distributed.team import Team
from blockhf.objective import Problem, Share, Total, take, tensors_of
from blockhf.operators import BlockMatrix, gram
from blockhf.solvers import Solved


class Crew:
    """The ranks of a mesh, as an optimizer sees them: whom it tells what, and what it does itself.

    Args:
        mesh: With the dimensions ``block`` and ``data``.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.team = Team(mesh)
        self.ownership = Ownership(self.team.num_blocks)

    @property
    def rank(self) -> int:
        return self.team.rank

    @property
    def has_rows(self) -> bool:
        """Whether different ranks solve different blocks."""
        return self.team.num_blocks > 1

    def owns(self, name: str) -> bool:
        """Whether a block is solved here."""
        # One without an owner, as it is frozen or new, has its state everywhere until it is placed.
        return self.ownership.owners.get(name, self.team.block) == self.team.block

    def join(self, description: Mapping[str, Any], blocks: Sequence[Block], params: Sequence[Tensor]) -> None:
        """Make sure that all ranks do the same, from rank 0's parameters.

        Raises:
            ValueError: They differ; the message says in what.
        """
        here = {
            "the version of torch": torch.__version__,
            "the number of threads": torch.get_num_threads(),
            "the kind of processor": torch.backends.cpu.get_cpu_capability(),
        }
        self._agree({**here, **description})
        self.team.broadcast([param.data for param in params], "parameters")
        self.ownership.begin({block.name: block.size for block in blocks})

    def meet(
        self,
        numbers: Sequence[int],
        batch: Any,
        description: Mapping[str, Any],
        blocks: Sequence[Block],
        move: Callable[[Callable[[], None]], None],
    ) -> list[list[int]]:
        """Begin a step: what each rank has, rank by rank.

        Args:
            numbers: What the others are to know of this rank.
            batch: Its samples; one must look like another where they are gathered.
            description: What must be the same on all ranks.
            blocks: All blocks.
            move: Called where blocks get other owners: carries over the state, and in between calls what it
                is given.

        Raises:
            ValueError: The ranks differ.
        """
        self.team.traffic.clear()
        kinds = [
            (str(tensor.dtype), tuple(tensor.shape[1:]) if self.has_rows else tensor.dim())
            for tensor in tensors_of(batch)
        ]
        description = {**description, "the kind of a sample": kinds}
        seconds = self.ownership.seconds
        own = [zlib.crc32(repr(description).encode()), *numbers]
        names = list(self.ownership.owners)
        met = self.team.numbers([*own, *(seconds.get(name, 0.0) for name in names)], "numbers")
        if len({each[0] for each in met}) > 1:
            self._agree(description)
        measured = {name: max(each[len(own) + place] for each in met) for place, name in enumerate(names)}
        if self.ownership.is_due({block.name: block.size for block in blocks}, measured):
            move(self.ownership.move)
        return [[int(number) for number in each[1 : len(own)]] for each in met]

    def own(self, problem: Problem, counts: Sequence[int]) -> tuple[Problem, list[int]]:
        """The curvature of the blocks that are solved here, on the samples they need, and which they are.

        Args:
            problem: All blocks, on this rank's samples.
            counts: How many of the curvature's samples each rank has.
        """
        team = self.team
        mine = [index for index, block in enumerate(problem.blocks) if self.owns(block.name)]
        column, columns = team.column(counts), team.columns(counts)
        batch = problem.batch if isinstance(problem.curvature_batch, int) else problem.curvature_batch
        # Where the column has none, one sample stands in, with no weight.
        gathered = team.gather_samples(batch, column) if any(column) else take(batch, 0, 1)
        blocks = [problem.blocks[index] for index in mine]
        return problem.restricted(blocks, gathered, Share.of(columns, team.data), team.sum_along_data), mine

    def exchange(
        self, blocks: Sequence[Block], own: Mapping[int, Solved], num_iterates: Sequence[int]
    ) -> dict[int, Solved]:
        """What all ranks have found, from what was found here.

        Args:
            blocks: All blocks.
            own: What was found here, by the block's place.
            num_iterates: How many iterates each block's solution has at most.
        """
        owners = [self.ownership.owners[block.name] for block in blocks]
        gathered = self.team.gather_solutions(
            {index: (each.solution, [each.num_products, each.seconds]) for index, each in own.items()},
            owners,
            [block.params[0].new_empty(block.size) for block in blocks],
            num_iterates,
            num_numbers=2,
        )
        self.ownership.seconds = {blocks[index].name: each.seconds for index, each in own.items()}
        return {
            index: Solved(
                solution,
                int(num_products),
                own[index].note if index in own else f"solved by {self.team.row(owners[index])}",
                seconds,
            )
            for index, (solution, (num_products, seconds)) in enumerate(gathered)
        }

    def loads(self, blocks: Sequence[Block], solved: Mapping[int, Solved]) -> list[float]:
        """How long each coordinate took to solve its blocks."""
        return self.ownership.loads({blocks[index].name: each.seconds for index, each in solved.items()})

    def add_up(self, numbers: Sequence[float]) -> list[float]:
        """The sums of numbers over all ranks."""
        return [sum(column) for column in zip(*self.team.numbers(numbers, "numbers"), strict=True)]

    def gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state with what each rank keeps of its own blocks."""
        if not self.has_rows:
            return state
        states = self.team.objects_along_block(moved(state, "cpu"), "state")
        found: dict[str, Any] = moved(merged(states), self.team.device)
        return found

    def _agree(self, own: Mapping[str, Any]) -> None:
        if lines := differences(self.team.objects(dict(own), "settings")):
            raise ValueError("The ranks do not do the same: " + "; ".join(lines) + ".")


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
