"""Which samples are the gradient's, which the curvature's, and which are held out, on which rank.

Pure decisions by numbers that all ranks know. Samples have places, rank by rank (on a mesh of two dimensions
column by column). Which of them are taken for what is drawn at random from all places, so it is the same for
any number of processes, and a batch in any order will do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockhf.batches import Share, select, stratified, take, without
from blockhf.policies import Sampling, Search
from blockhf.policy import State

FEWEST_SAMPLES = 600
"""Where a share is asked for, curvature is taken from no fewer, if the gradient has as many."""

FEW_SAMPLES = 5000
"""Up to so many samples a batch that is all there is has all of them taken for everything at each step."""

SMALL_BLOCK = 1000
"""Where no block has more parameters, half as many samples are enough for curvature."""


@dataclass(frozen=True)
class Sizes:
    """How many samples are taken for what."""

    gradient: int
    curvature: int
    held_out: int = 0
    seen: int = 0


@dataclass(frozen=True, eq=False)
class Role:
    """The samples of all ranks that are taken for one purpose.

    Attributes:
        sizes: How many samples each rank has.
        places: Which of all are taken, in order; ``None`` stands for all of them.
    """

    sizes: Sequence[int]
    places: Tensor | None = None

    @property
    def counts(self) -> list[int]:
        """How many of them each rank has."""
        if self.places is None:
            return list(self.sizes)
        if len(self.sizes) == 1:
            return [len(self.places)]
        ends = torch.tensor(self.sizes, device="cpu").cumsum(0)
        before = [0, *torch.searchsorted(self.places, ends).tolist()]
        return [end - start for start, end in itertools.pairwise(before)]

    def take(self, batch: Any, rank: int) -> tuple[Any, Share]:
        """A rank's own of them; one sample, with no weight, stands in where there is none."""
        share = Share.of(self.counts, rank)
        if share.own == 0:
            return take(batch, 0, 1), share
        if self.places is None or share.own == self.sizes[rank]:
            return batch, share
        own = self.places[share.before : share.before + share.own] - sum(self.sizes[:rank])
        return select(batch, own), share


@dataclass(frozen=True, eq=False)
class Plan:
    """Which samples are taken for what.

    Attributes:
        gradient: For the gradient.
        curvature: For the curvature: some of the gradient's, or a batch of their own.
        held_out: Those that neither gradient nor curvature may see, if there are any.
        seen: As many of the gradient's, to compare those held out with.
        given: Whether the curvature has a batch of its own.
        complete: Why the samples are all there are, so that there is no noise; empty if they are not.
    """

    gradient: Role
    curvature: Role
    held_out: Role | None = None
    seen: Role | None = None
    given: bool = False
    complete: str = ""

    @property
    def num_gradient(self) -> int:
        return sum(self.gradient.counts)

    @property
    def num_curvature(self) -> int:
        return sum(self.curvature.counts)

    @property
    def num_held_out(self) -> int:
        return 0 if self.held_out is None else sum(self.held_out.counts)

    @property
    def shares_samples(self) -> bool:
        """Whether the curvature is that of the very samples of the gradient."""
        return self.curvature is self.gradient


WITHOUT_BATCH = Plan(role := Role([1]), role)
"""For an objective of no arguments."""


@dataclass(frozen=True)
class Batch:
    """What is known of the samples of a step before any of them is looked at closely.

    Attributes:
        num_samples: How many there are; ``None`` without a batch.
        population: How many there are in all, where the user has said so.
        takes_all: Whether the user asked for all samples everywhere, and has none held out.
        looks_for_noise: Whether the user asked for a rule that goes by noise.
        is_random: Whether the model draws random numbers, or its samples see each other.
        again: Whether the very same samples were there in the step before.
        is_drawn: Whether they are drawn anew for each step, as many as are wanted.
    """

    num_samples: int | None
    population: int | None = None
    takes_all: bool = False
    looks_for_noise: bool = False
    is_random: bool = False
    again: bool = False
    is_drawn: bool = False


def why_complete(batch: Batch) -> str:
    """Why a batch is all there is, so that its loss has no noise; empty where it is a sample, or a large one.

    A large set is better met with some of its samples at a time.

    >>> why_complete(Batch(300, population=300)), why_complete(Batch(64))
    ('the batch is the population', '')
    """
    if batch.is_random or batch.looks_for_noise:
        return ""
    if batch.is_drawn:
        return "as many points as are wanted are drawn for each step"
    if batch.num_samples is None:
        return "the objective has no batch"
    if batch.takes_all:
        return "all samples are asked for"
    if batch.num_samples > FEW_SAMPLES:
        return ""
    if batch.population is not None:
        return "the batch is the population" if batch.num_samples == batch.population else ""
    return "the batch is the same again" if batch.again else ""


def check_population(population: int | None, num_available: int) -> None:
    """Refuse a number of all samples that is below that of a batch."""
    if population is not None and num_available > population:
        raise ValueError(
            f"population is {population}, but the batch alone has {num_available} samples. Pass the number "
            "of all samples that batches are drawn from, len(dataset), or None."
        )


def choose_sizes(
    num_available: int,
    search: Search,
    sampling: Sampling,
    state: State,
    *,
    curvature_batch_size: int | float | None,
    largest_block: int,
    population: int | None = None,
    searches: bool = True,
    positions: int = 1,
) -> Sizes:
    """Decide how many samples are taken for what.

    A sample of several predictions, like a sequence, tells more than one of a single prediction, and less
    than as many, as they are alike: for sizes it counts as the square root of their number.

    Args:
        num_available: Samples of all ranks.
        search: Says how many samples are held out.
        sampling: Says how many the gradient is taken from.
        state: Of the sampling.
        curvature_batch_size: As for ``curvature_samples``.
        largest_block: The parameters of the largest block.
        population: How many samples there are in all, where that is known.
        searches: Whether the search is asked at all.
        positions: Predictions of a sample.
    """
    num_held_out, weight = 0, math.sqrt(positions)
    counted = int(num_available * weight)
    check_population(population, num_available)
    if searches:
        num_held_out = math.ceil(search.num_held_out(counted, sampling.size(counted, state)) / weight)
    number = num_available - num_held_out
    if num_held_out > 0 or not sampling.needs_signal:
        number = min(math.ceil(sampling.size(int(number * weight), state) / weight), number)
    seen = 0 if population is None else min(num_held_out, number)
    curvature = curvature_samples(curvature_batch_size, number, largest_block, positions)
    return Sizes(number, curvature, num_held_out, seen)


def draw_plan(sizes: Sequence[int], wanted: Sizes, seed: int, given: Sequence[int] | None = None) -> Plan:
    """Draw samples for each purpose.

    Args:
        sizes: Samples of each rank.
        wanted: How many of all to take for what.
        seed: Another one in each step.
        given: How many curvature samples of its own each rank has, where they are given.

    >>> plan = draw_plan([600, 400], Sizes(gradient=500, curvature=50, held_out=100), seed=0)
    >>> plan.gradient.counts, plan.curvature.counts, plan.held_out.counts
    ([300, 200], [30, 20], [60, 40])
    """
    total = sum(sizes)
    generator = torch.Generator("cpu").manual_seed(seed)
    held_out = None
    left = torch.arange(total, device="cpu")
    if wanted.held_out > 0:
        held_out = Role(sizes, stratified(wanted.held_out, total, generator))
        assert held_out.places is not None
        left = without(held_out.places, total)
    chosen = left if wanted.gradient == len(left) else left[stratified(wanted.gradient, len(left), generator)]
    gradient = Role(sizes, None if len(chosen) == total else chosen)
    curvature = seen = gradient
    if given is not None:
        curvature = Role(given)
    elif wanted.curvature < wanted.gradient:
        curvature = Role(sizes, chosen[stratified(wanted.curvature, len(chosen), generator)])
    if 0 < wanted.seen < len(chosen):
        seen = Role(sizes, chosen[stratified(wanted.seen, len(chosen), generator)])
    return Plan(gradient, curvature, held_out, seen if wanted.seen else None, given is not None)


def curvature_samples(
    wanted: int | float | None, num_gradient: int, largest_block: int, positions: int = 1
) -> int:
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
        unit = math.ceil(unit / math.sqrt(positions))
        wanted = max(round(wanted * num_gradient / unit), 1) * unit
    return min(wanted, num_gradient)
