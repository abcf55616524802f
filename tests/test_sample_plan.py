"""Which samples are whose: pure decisions, tested on numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blockhf import BlockHF, blocks
from blockhf.batches import batch_size
from blockhf.plan import WITHOUT_BATCH, Plan, curvature_samples, make_plan, share_samples
from blockhf.policies import Choice, Sampling, Search, Situation
from blockhf.policy import PolicyState, State
from optimizer_tasks import Task

LAWS = settings(max_examples=100, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Holding(Search):
    """A search that wants a number of samples held out."""

    number: int

    def num_held_out(self, num_available: int, num_wanted: int) -> int:
        return min(self.number, num_available)

    def choose(self, situation: Situation, state: PolicyState) -> Choice:
        raise NotImplementedError


@dataclass(frozen=True)
class Wanting(Sampling):
    """A sampling that wants a number of samples."""

    number: int
    signal: bool = True

    @property
    def needs_signal(self) -> bool:
        return self.signal

    def size(self, num_available: int, state: State) -> int:
        return min(state.get("number", self.number), num_available)


def plan(sizes: list[int], held_out: int, wanted: int, *, signal: bool = True, **options: Any) -> Plan:
    rest: dict[str, Any] = {"curvature_batch_size": None, "largest_block": 5000, **options}
    given, state = rest.pop("given", None), rest.pop("state", {})
    return make_plan(sizes, given, Holding(held_out), Wanting(wanted, signal), state, **rest)


# --- how many ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held_out", "wanted", "signal", "expected"),
    [
        pytest.param(1000, 2000, True, 2000, id="as many as are wanted"),
        pytest.param(1000, 100, True, 600, id="no fewer than 600"),
        pytest.param(9800, 100, True, 200, id="nor more than there are left"),
        pytest.param(1000, 20_000, True, 9000, id="all but those held out"),
        pytest.param(0, 2000, True, 10_000, id="all where noise does not show"),
        pytest.param(0, 2000, False, 2000, id="as many as are wanted of one who does not ask for noise"),
    ],
)
def test_the_gradient_takes_what_the_sampling_wants_where_noise_shows(
    held_out: int, wanted: int, signal: bool, expected: int
) -> None:
    made = plan([10_000], held_out, wanted, signal=signal)
    assert (made.num_gradient, made.held_out) == (expected, [held_out])
    assert made.seen == [0]


def test_without_a_search_nothing_is_held_out_and_the_gradient_takes_all() -> None:
    made = plan([10_000], 1000, 2000, searches=False)
    assert (made.num_gradient, made.held_out) == (10_000, [0])


def test_the_sampling_decides_by_its_own_state() -> None:
    assert plan([10_000], 1000, 2000, state={"number": 3000}).num_gradient == 3000


def test_of_a_finite_set_as_many_are_seen_as_are_held_out() -> None:
    assert plan([10_000], 1000, 2000, population=20_000).seen == [1000]
    assert plan([10_000], 9500, 2000, population=20_000).seen == [500]  # or as many as the gradient has
    assert plan([10_000], 0, 2000, population=20_000).seen == [0]


def test_a_batch_that_is_larger_than_the_population_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^population is 150, but the batch alone has 200 samples\.$"):
        plan([100, 100], 0, 100, population=150)
    assert plan([100, 50], 0, 100, population=150).num_gradient == 150


@pytest.mark.parametrize(
    ("num_gradient", "expected"),
    [
        pytest.param(300, 300, id="all there are"),
        pytest.param(12_000, 600, id="the fewest"),
        pytest.param(29_000, 600, id="not yet twice as many"),
        pytest.param(31_000, 1200, id="twice as many"),
        pytest.param(58_000, 1800, id="the nearest multiple"),
    ],
)
def test_a_share_of_curvature_samples_is_taken_in_whole_steps(num_gradient: int, expected: int) -> None:
    assert curvature_samples(0.03, num_gradient, largest_block=1025) == expected


@pytest.mark.parametrize(("num_gradient", "expected"), [(200, 200), (12_000, 300), (19_000, 600)])
def test_the_steps_are_half_as_large_where_all_blocks_are_small(num_gradient: int, expected: int) -> None:
    assert curvature_samples(0.03, num_gradient, largest_block=1000) == expected


@pytest.mark.parametrize(("asked", "expected"), [(None, 7), (3, 3), (7, 7), (50, 7), (1.0, 7)])
def test_no_more_curvature_samples_than_the_gradient_has(asked: float | None, expected: int) -> None:
    assert curvature_samples(asked, 7, 1) == expected


# --- on which rank -----------------------------------------------------------------------------------

SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=5)


@LAWS
@given(sizes=SIZES, data=st.data(), compares=st.booleans())
def test_ranks_share_out_all_numbers_and_no_sample_is_both_held_out_and_the_gradient_s(
    sizes: list[int], data: st.DataObject, compares: bool
) -> None:
    held_out = data.draw(st.integers(0, sum(sizes) - 1))
    gradient = data.draw(st.integers(1, sum(sizes) - held_out))
    curvature = data.draw(st.integers(1, gradient))
    made = share_samples(sizes, held_out, gradient, curvature, compares_seen=compares)
    assert (sum(made.held_out), made.num_gradient, made.num_curvature) == (held_out, gradient, curvature)
    assert sum(made.seen) == (min(held_out, gradient) if compares else 0)
    for rank, size in enumerate(sizes):
        assert made.gradient[rank] + made.held_out[rank] <= size
        assert made.curvature[rank] <= made.gradient[rank]
        assert made.seen[rank] <= made.gradient[rank]


@LAWS
@given(sizes=SIZES, data=st.data())
def test_what_is_taken_has_the_numbers_of_the_plan_or_one_sample_of_no_weight(
    sizes: list[int], data: st.DataObject
) -> None:
    assume(sum(sizes) > 1)
    held_out = data.draw(st.integers(1, sum(sizes) - 1))
    gradient = data.draw(st.integers(1, sum(sizes) - held_out))
    made = share_samples(sizes, held_out, gradient, data.draw(st.integers(1, gradient)), compares_seen=True)
    for rank, size in enumerate(sizes):
        batch = torch.arange(size)
        takes = {
            "gradient": made.take_gradient(batch, rank),
            "curvature": made.take_curvature(batch, rank),
            "held_out": made.take_held_out(batch, rank),
            "seen": made.take_seen(batch, rank),
        }
        for name, taken in takes.items():
            number = vars(made)[name][rank]
            assert taken is not None
            own, share = taken
            assert (batch_size(own), share.own) == (max(number, 1), number)
            assert share.total == sum(vars(made)[name])
        seen, unseen = takes["gradient"], takes["held_out"]
        assert seen is not None
        assert unseen is not None
        if made.gradient[rank] and made.held_out[rank]:
            assert not set(seen[0].tolist()) & set(unseen[0].tolist())


def test_the_gradient_has_the_front_the_curvature_its_front_and_the_end_is_held_out() -> None:
    made = share_samples([10], 3, 5, 2, compares_seen=True)
    batch = torch.arange(10)
    takes = [made.take_gradient, made.take_curvature, made.take_held_out, made.take_seen]
    assert [take(batch, 0)[0].tolist() for take in takes] == [  # type: ignore[index]
        [0, 1, 2, 3, 4],
        [0, 1],
        [7, 8, 9],
        [2, 3, 4],
    ]


def test_where_all_is_the_gradient_s_the_batch_is_passed_on_as_it_is() -> None:
    batch = torch.arange(4)
    made = share_samples([4, 2], 0, 6, 6)
    assert made.take_gradient(batch, 0)[0] is batch
    assert (made.take_held_out(batch, 0), made.take_seen(batch, 0)) == (None, None)
    assert made.shares_samples


@pytest.mark.parametrize(
    ("num_curvature", "given", "expected"),
    [(6, None, True), (5, None, False), (6, [6], False)],
    ids=["the same", "fewer", "a batch of their own"],
)
def test_samples_are_shared_where_curvature_has_the_very_ones(
    num_curvature: int, given: list[int] | None, expected: bool
) -> None:
    assert share_samples([6], 0, 6, num_curvature, given).shares_samples == expected


def test_a_curvature_batch_that_is_given_is_taken_whole() -> None:
    made = plan([100, 50], 0, 100, given=[7, 9], curvature_batch_size=0.5)
    own = torch.arange(9)
    taken, share = made.take_curvature(own, 1)
    assert taken is own
    assert (share.own, share.total, share.before) == (9, 16, 7)


def test_an_objective_without_a_batch_has_one_sample_for_all() -> None:
    assert WITHOUT_BATCH.shares_samples
    assert WITHOUT_BATCH.take_gradient(None, 0)[0] is None
    assert WITHOUT_BATCH.take_held_out(None, 0) is None


# --- in the optimizer --------------------------------------------------------------------------------


def test_a_curvature_batch_without_a_batch_is_refused() -> None:
    task = Task()
    optimizer = BlockHF(blocks.by_layer(task.model))
    with pytest.raises(ValueError, match=r"^A curvature batch was given without a gradient batch\."):
        optimizer.step(task.objective, curvature_batch=task.batch)
