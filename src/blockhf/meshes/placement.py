"""Who solves which block: pure functions of numbers that all ranks know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


def estimated_costs(sizes: Sequence[int], firsts: Sequence[int] | None = None) -> list[float]:
    """What a product with each block costs, in the units of one pass through its parameters.

    Blocks come in the network's order. A tangent begins at the block and goes through all that come after;
    a cotangent comes back the same way. In the block itself there are also the change of its parameters and
    the gradient by them.

    Args:
        sizes: How many parameters each block has.
        firsts: How many of these its first tensor has, which tangents begin behind and cotangents do not
            pass. Without it, blocks are taken to be of many small layers.

    >>> estimated_costs([10, 10]), estimated_costs([10, 10], [10, 10])
    ([60.0, 40.0], [40.0, 20.0])
    """
    after = [sum(sizes[index + 1 :]) for index in range(len(sizes))]
    return [
        4.0 * size - 2.0 * first + 2.0 * rest
        for size, first, rest in zip(sizes, firsts or [0] * len(sizes), after, strict=True)
    ]


def best_shape(costs: Sequence[float], num_ranks: int) -> tuple[int, int]:
    """The mesh of so many ranks, ``(block, data)``, on which the dearest coordinate is done first.

    Ranks along ``block`` send nothing while they solve, so they are preferred until sharing samples along
    ``data`` would be faster by a quarter: where one block is dearer than all others, several ranks share it,
    while the small ones are grouped on one coordinate.

    >>> best_shape([6.0, 4.0], 2), best_shape([9.0, 1.0, 1.0], 2), best_shape([1.0, 1.0], 4)
    ((2, 1), (1, 2), (2, 2))
    """
    best, least = (num_ranks, 1), assign(costs, num_ranks).time
    for block in range(num_ranks - 1, 0, -1):
        if num_ranks % block == 0:
            time = assign(costs, block).time / (num_ranks // block)
            if time < 0.75 * least:
                best, least = (block, num_ranks // block), time
    return best
