"""What the optimizer asks of the processes that share its work; a process alone answers for itself."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from blockhf.blocks import Block
from blockhf.diagnosis import check_processes, check_wrapped
from blockhf.linalg import Solution
from blockhf.plan import Plan
from blockhf.point import Point
from blockhf.ranks import Alone, Ranks
from blockhf.samples import Structure


@dataclass(frozen=True)
class SolvedBlock:
    """A block's solution, the products that it took, a note on how these are made, and the damping."""

    solution: Solution
    num_products: int
    note: str
    damping: float


class Mesh(abc.ABC):
    """The processes that make an update together.

    Attributes:
        rank: The place of this process among all, in the order of the samples.
        everyone: All processes, which have the gradient's samples between them.
    """

    rank: int
    everyone: Ranks

    @property
    def is_alone(self) -> bool:
        """Whether there is but this process."""
        return False

    @abc.abstractmethod
    def join(self, description: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        """Make sure that all processes do the same, from rank 0's parameters.

        Raises:
            ValueError: They differ; the message says in what.
        """

    @abc.abstractmethod
    def place(self, name: str, params: Sequence[Tensor]) -> None:
        """Give a new block to one of the processes; after ``join``, from rank 0's parameters too."""

    @abc.abstractmethod
    def owns(self, name: str) -> bool:
        """Whether a block is solved here."""

    @abc.abstractmethod
    def meet(
        self, numbers: Sequence[int], batch: Any, describe: Callable[[], Mapping[str, Any]]
    ) -> list[list[int]]:
        """Begin a step: what each process has, place by place.

        Args:
            numbers: What the others are to know of this process.
            batch: Its samples; one must look like another where they are gathered.
            describe: Tells what must be the same everywhere, where there are others.

        Raises:
            ValueError: The processes differ.
        """

    @abc.abstractmethod
    def own_curvature(self, point: Point, plan: Plan) -> tuple[Point, list[int]]:
        """The curvature of the blocks that are solved here, on the samples they need, and which they are.

        Args:
            point: All blocks, on the curvature's samples that are here.
            plan: How many of these each process has.
        """

    @abc.abstractmethod
    def exchange(self, blocks: Sequence[Block], own: Mapping[int, SolvedBlock]) -> dict[int, SolvedBlock]:
        """What all processes have found, by the block's place, from what was found here."""

    @abc.abstractmethod
    def add_up(self, numbers: Sequence[float]) -> list[float]:
        """The sums of numbers over all processes."""

    @abc.abstractmethod
    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state with what each process keeps of its own blocks."""

    def check_alone(self, structure: Structure) -> None:
        """Raise or warn, at an objective's first step, where others than the mesh join processes."""
        if not structure.is_checked:
            check_wrapped(structure.modules)

    def traffic(self) -> dict[str, int]:
        """Messages and bytes of this step, by purpose."""
        return {}


class Local(Mesh):
    """One process, which owns every block and has every sample."""

    rank = 0

    def __init__(self) -> None:
        self.everyone = Alone()

    def join(self, description: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        pass

    def place(self, name: str, params: Sequence[Tensor]) -> None:
        pass

    def owns(self, name: str) -> bool:
        return True

    @property
    def is_alone(self) -> bool:
        return True

    def meet(
        self, numbers: Sequence[int], batch: Any, describe: Callable[[], Mapping[str, Any]]
    ) -> list[list[int]]:
        return [list(numbers)]

    def own_curvature(self, point: Point, plan: Plan) -> tuple[Point, list[int]]:
        return point, list(range(len(point.blocks)))

    def exchange(self, blocks: Sequence[Block], own: Mapping[int, SolvedBlock]) -> dict[int, SolvedBlock]:
        return dict(own)

    def add_up(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def check_alone(self, structure: Structure) -> None:
        if not structure.is_checked:
            check_processes(structure.modules)
