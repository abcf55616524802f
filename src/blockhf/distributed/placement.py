"""Who solves which block, and who has which samples: pure functions of numbers that all ranks know."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
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
        ready = known and self._num_measured > self.every
        loads = self.loads(dict(zip(sizes, costs, strict=True)))
        return ready and placement.time < (1 - self.gain) * max(loads)

    def loads(self, costs: Mapping[str, float]) -> list[float]:
        """What each coordinate has to do, from the costs of the blocks."""
        loads = [0.0] * self.num_owners
        for name, cost in costs.items():
            loads[self.owners[name]] += cost
        return loads

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
