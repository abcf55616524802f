"""Which samples are the gradient's, which the curvature's, and which are held out, on which rank.

Pure decisions by numbers that all ranks know. Of each rank's samples, the first are the gradient's, the first
of those the curvature's, and the last are held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockhf.batches import Share, share_out, take
from blockhf.policies import Sampling, Search
from blockhf.policy import State

FEWEST_SAMPLES = 600
"""Neither gradient nor, where a share is asked for, curvature is taken from fewer, if there are as many."""

SMALL_BLOCK = 1000
"""Where no block has more parameters, half as many samples are enough for curvature."""


@dataclass(frozen=True)
class Plan:
    """How many samples each rank has for each purpose.

    Attributes:
        sizes: Samples of each rank.
        gradient: Of these, for the gradient.
        curvature: For the curvature: from the front of the gradient's, or of a batch of their own.
        held_out: Samples that neither gradient nor curvature may see.
        seen: As many of the gradient's, to compare those held out with.
        given: Whether the curvature has a batch of its own.
    """

    sizes: Sequence[int]
    gradient: Sequence[int]
    curvature: Sequence[int]
    held_out: Sequence[int]
    seen: Sequence[int]
    given: bool = False

    @property
    def num_gradient(self) -> int:
        return sum(self.gradient)

    @property
    def num_curvature(self) -> int:
        return sum(self.curvature)

    @property
    def shares_samples(self) -> bool:
        """Whether the curvature is that of the very samples of the gradient."""
        return not self.given and self.gradient == self.curvature

    # One sample, with no weight, stands in where there is none.

    def take_gradient(self, batch: Any, rank: int) -> tuple[Any, Share]:
        end = max(self.gradient[rank], 1)
        own = batch if end == self.sizes[rank] else take(batch, 0, end)
        return own, Share.of(self.gradient, rank)

    def take_curvature(self, batch: Any, rank: int) -> tuple[Any, Share]:
        end = max(self.curvature[rank], 1)
        return batch if self.given else take(batch, 0, end), Share.of(self.curvature, rank)

    def take_held_out(self, batch: Any, rank: int) -> tuple[Any, Share] | None:
        if not any(self.held_out):
            return None
        end = self.sizes[rank]
        return take(batch, end - max(self.held_out[rank], 1), end), Share.of(self.held_out, rank)

    def take_seen(self, batch: Any, rank: int) -> tuple[Any, Share] | None:
        if not any(self.seen):
            return None
        end = max(self.gradient[rank], 1)
        return take(batch, end - max(self.seen[rank], 1), end), Share.of(self.seen, rank)


WITHOUT_BATCH = Plan([1], [1], [1], [0], [0])
"""For an objective of no arguments."""


def make_plan(
    sizes: Sequence[int],
    given: Sequence[int] | None,
    search: Search,
    sampling: Sampling,
    state: State,
    *,
    curvature_batch_size: int | float | None,
    largest_block: int,
    population: int | None = None,
    searches: bool = True,
) -> Plan:
    """Decide how many samples each rank takes for what.

    Args:
        sizes: Samples of each rank.
        given: How many curvature samples of its own each rank has, where they are given.
        search: Says how many samples are held out.
        sampling: Says how many the gradient is taken from.
        state: Of the sampling.
        curvature_batch_size: As for ``curvature_samples``.
        largest_block: The parameters of the largest block.
        population: How many samples there are in all, where that is known.
        searches: Whether the search is asked at all.
    """
    num_available, num_held_out = sum(sizes), 0
    if population is not None and num_available > population:
        raise ValueError(f"population is {population}, but the batch alone has {num_available} samples.")
    if searches:
        num_held_out = search.num_held_out(num_available, sampling.size(num_available, state))
    number = num_available - num_held_out
    if num_held_out > 0 or not sampling.needs_signal:
        number = max(sampling.size(number, state), min(FEWEST_SAMPLES, number))
    curved = curvature_samples(curvature_batch_size, number, largest_block)
    return share_samples(sizes, num_held_out, number, curved, given, compares_seen=population is not None)


def share_samples(
    sizes: Sequence[int],
    num_held_out: int,
    num_gradient: int,
    num_curvature: int,
    given: Sequence[int] | None = None,
    *,
    compares_seen: bool = False,
) -> Plan:
    """Share out numbers of samples over ranks that have so many.

    >>> share_samples([600, 400], 100, 500, 50).curvature
    [30, 20]
    """
    held_out = share_out(num_held_out, sizes)
    left = [size - number for size, number in zip(sizes, held_out, strict=True)]
    gradient = share_out(num_gradient, left)
    curvature = share_out(num_curvature, gradient) if given is None else list(given)
    seen = [0] * len(sizes)
    if compares_seen and num_held_out > 0:
        seen = share_out(min(num_held_out, num_gradient), gradient)
    return Plan(sizes, gradient, curvature, held_out, seen, given is not None)


def curvature_samples(wanted: int | float | None, num_gradient: int, largest_block: int) -> int:
    """How many samples the curvature is taken from.

    A share is rounded to a multiple of 600, or of 300 where all blocks are small, as products are traced, and
    the trace checked, anew for each new size.

    >>> curvature_samples(0.03, 60_000, 10_000), curvature_samples(0.03, 60_000, 100)
    (1800, 1800)
    """
    if wanted is None:
        return num_gradient
    if isinstance(wanted, float):
        unit = FEWEST_SAMPLES // 2 if largest_block <= SMALL_BLOCK else FEWEST_SAMPLES
        wanted = max(round(wanted * num_gradient / unit), 1) * unit
    return min(wanted, num_gradient)
