"""Which samples are whose: pure decisions, tested on numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockhf import BlockHF, blocks
from blockhf.batches import batch_size
from blockhf.plan import WITHOUT_BATCH, Plan, Role, Sizes, choose_sizes, curvature_samples, draw_plan
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


def chosen(number: int, held_out: int, wanted: int, *, signal: bool = True, **options: Any) -> Sizes:
    rest: dict[str, Any] = {"curvature_batch_size": None, "largest_block": 5000, **options}
    return choose_sizes(number, Holding(held_out), Wanting(wanted, signal), rest.pop("state", {}), **rest)


# --- how many ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held_out", "wanted", "signal", "expected"),
    [
        pytest.param(1000, 2000, True, 2000, id="as many as are wanted"),
        pytest.param(1000, 100, True, 100, id="be they few"),
        pytest.param(9800, 300, True, 200, id="no more than there are left"),
        pytest.param(1000, 20_000, True, 9000, id="all but those held out"),
        pytest.param(0, 2000, True, 10_000, id="all where noise does not show"),
        pytest.param(0, 2000, False, 2000, id="as many as are wanted of one who does not ask for noise"),
    ],
)
def test_the_gradient_takes_what_the_sampling_wants_where_noise_shows(
    held_out: int, wanted: int, signal: bool, expected: int
) -> None:
    sizes = chosen(10_000, held_out, wanted, signal=signal)
    assert sizes == Sizes(gradient=expected, curvature=expected, held_out=held_out, seen=0)


def test_a_sample_of_many_predictions_counts_as_the_root_of_their_number() -> None:
    sizes = chosen(10_000, 512, 1024, curvature_batch_size=0.03, positions=64)
    assert sizes == Sizes(gradient=128, curvature=75, held_out=64)


def test_without_a_search_nothing_is_held_out_and_the_gradient_takes_all() -> None:
    assert chosen(10_000, 1000, 2000, searches=False) == Sizes(10_000, 10_000)


def test_the_sampling_decides_by_its_own_state() -> None:
    assert chosen(10_000, 1000, 2000, state={"number": 3000}).gradient == 3000


def test_of_a_finite_set_as_many_are_seen_as_are_held_out() -> None:
    assert chosen(10_000, 1000, 2000, population=20_000).seen == 1000
    assert chosen(10_000, 9500, 2000, population=20_000).seen == 500  # or as many as the gradient has
    assert chosen(10_000, 0, 2000, population=20_000).seen == 0


def test_a_batch_that_is_larger_than_the_population_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^population is 150, but the batch alone has 200 samples\."):
        chosen(200, 0, 100, population=150)
    assert chosen(150, 0, 100, population=150).gradient == 150


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


# --- which, and on which rank -------------------------------------------------------------------------

RANKS = st.lists(st.integers(1, 60), min_size=1, max_size=5)
SEEDS = st.integers(0, 2**40)


@st.composite
def numbers(draw: st.DrawFn, total: int) -> Sizes:
    """How many samples may be wanted of so many."""
    held_out = draw(st.integers(0, total - 1))
    gradient = draw(st.integers(1, total - held_out))
    seen = min(held_out, gradient) if draw(st.booleans()) else 0
    return Sizes(gradient, draw(st.integers(1, gradient)), held_out, seen)


def roles(plan: Plan) -> dict[str, Role]:
    found = {name: vars(plan)[name] for name in ("gradient", "curvature", "held_out", "seen")}
    return {name: role for name, role in found.items() if role is not None}


def places(role: Role) -> list[int]:
    return list(range(sum(role.sizes))) if role.places is None else role.places.tolist()


@LAWS
@given(sizes=RANKS, data=st.data(), seed=SEEDS)
def test_there_are_as_many_as_are_wanted_none_twice_and_none_both_seen_and_held_out(
    sizes: list[int], data: st.DataObject, seed: int
) -> None:
    wanted = data.draw(numbers(sum(sizes)))
    made = roles(draw_plan(sizes, wanted, seed))
    assert set(made) == {"gradient", "curvature"} | {
        name for name in ("held_out", "seen") if vars(wanted)[name]
    }
    for name, role in made.items():
        assert len(set(places(role))) == len(places(role)) == sum(role.counts) == vars(wanted)[name]
        assert places(role) == sorted(places(role))
        assert all(0 <= count <= size for count, size in zip(role.counts, sizes, strict=True))
    gradient = set(places(made["gradient"]))
    assert set(places(made["curvature"])) <= gradient
    if "held_out" in made:
        assert not set(places(made["held_out"])) & gradient
    if "seen" in made:
        assert set(places(made["seen"])) <= gradient


@LAWS
@given(sizes=RANKS, data=st.data(), seed=SEEDS)
def test_what_the_ranks_take_is_what_one_process_takes(
    sizes: list[int], data: st.DataObject, seed: int
) -> None:
    wanted, total = data.draw(numbers(sum(sizes))), sum(sizes)
    alone, together = roles(draw_plan([total], wanted, seed)), roles(draw_plan(sizes, wanted, seed))
    assert alone.keys() == together.keys()
    batch = torch.arange(total)
    for name, role in together.items():
        (everything, whole), pieces = alone[name].take(batch, 0), []
        assert (whole.own, whole.total, whole.before) == (vars(wanted)[name], vars(wanted)[name], 0)
        for rank, own in enumerate(torch.split(batch, sizes)):
            taken, share = role.take(own, rank)
            assert (share.own, share.total) == (role.counts[rank], whole.total)
            assert share.before == sum(map(len, pieces))
            assert batch_size(taken) == max(share.own, 1), "one of no weight stands in for none"
            pieces.append(taken[: share.own])
        assert torch.equal(torch.cat(pieces), everything)


@LAWS
@given(num_ranks=st.integers(1, 5), own=st.integers(1, 20), rest=st.integers(1, 20), seed=SEEDS)
def test_ranks_with_as_many_samples_take_as_many(num_ranks: int, own: int, rest: int, seed: int) -> None:
    wanted = Sizes(num_ranks * own, num_ranks * own, num_ranks * rest)
    made = draw_plan([own + rest] * num_ranks, wanted, seed)
    assert made.gradient.counts == [own] * num_ranks
    assert made.held_out is not None
    assert made.held_out.counts == [rest] * num_ranks


@pytest.mark.parametrize("name", ["gradient", "curvature", "held_out", "seen"])
def test_every_sample_is_as_likely_as_any_other(name: str) -> None:
    wanted, num_draws = Sizes(gradient=9, curvature=5, held_out=7, seen=7), 3000
    counts = torch.zeros(20)
    for seed in range(num_draws):
        counts[places(roles(draw_plan([20], wanted, seed))[name])] += 1
    chance = vars(wanted)[name] / 20
    deviation = (num_draws * chance * (1 - chance)) ** 0.5
    assert float((counts - num_draws * chance).abs().max()) <= 4 * deviation


def test_another_seed_draws_others_and_the_same_seed_the_same() -> None:
    wanted = Sizes(gradient=50, curvature=10, held_out=20, seen=20)
    one, same, other = (roles(draw_plan([100], wanted, seed)) for seed in (3, 3, 4))
    for name in one:
        assert places(one[name]) == places(same[name])
        assert places(one[name]) != places(other[name])


def test_of_sorted_samples_each_kind_is_represented_by_its_share() -> None:
    """Classes one after the other, of different sizes: the tail alone would be the last class."""
    classes = torch.repeat_interleave(torch.arange(4), torch.tensor([400, 300, 200, 100]))
    made = roles(draw_plan([1000], Sizes(gradient=600, curvature=60, held_out=250, seen=250), seed=0))
    for name, role in made.items():
        counts = torch.bincount(role.take(classes, 0)[0], minlength=4)
        expected = counts.sum() * torch.tensor([0.4, 0.3, 0.2, 0.1])
        assert float((counts - expected).abs().max()) < 0.02 * float(counts.sum()) + 3, name


def test_where_all_is_the_gradient_s_the_batch_is_passed_on_as_it_is() -> None:
    batch = torch.arange(4)
    made = draw_plan([4, 2], Sizes(6, 6), seed=0)
    assert made.gradient.take(batch, 0)[0] is batch
    assert (made.held_out, made.seen) == (None, None)
    assert made.shares_samples


@pytest.mark.parametrize(
    ("num_curvature", "given", "expected"),
    [(6, None, True), (5, None, False), (6, [6], False)],
    ids=["the same", "fewer", "a batch of their own"],
)
def test_samples_are_shared_where_curvature_has_the_very_ones(
    num_curvature: int, given: list[int] | None, expected: bool
) -> None:
    assert draw_plan([6], Sizes(6, num_curvature), 0, given).shares_samples == expected


def test_a_curvature_batch_that_is_given_is_taken_whole() -> None:
    made = draw_plan([100, 50], Sizes(150, 75), 0, given=[7, 9])
    own = torch.arange(9)
    taken, share = made.curvature.take(own, 1)
    assert made.given
    assert taken is own
    assert (share.own, share.total, share.before) == (9, 16, 7)


def test_an_objective_without_a_batch_has_one_sample_for_all() -> None:
    assert WITHOUT_BATCH.shares_samples
    assert WITHOUT_BATCH.gradient.take(None, 0)[0] is None
    assert WITHOUT_BATCH.held_out is None


# --- in the optimizer --------------------------------------------------------------------------------


def test_a_curvature_batch_without_a_batch_is_refused() -> None:
    task = Task()
    optimizer = BlockHF(blocks.by_layer(task.model))
    with pytest.raises(ValueError, match=r"^A curvature batch was given without a gradient batch\."):
        optimizer.step(task.objective, curvature_batch=task.batch)
