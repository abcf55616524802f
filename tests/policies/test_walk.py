"""The walk that a run opens with, as arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from blockhf import AdamWalk, NoWalk
from blockhf.policies import Stretch


def parabola(lowest: float, bend: float = 1.0, level: float = 5.0) -> tuple[float, float, float]:
    """The losses at the start, halfway and at the end of a stretch, with the lowest at so much of it."""
    first, half, last = (level + bend * (place - lowest) ** 2 for place in (0.0, 0.5, 1.0))
    return first, half, last


@pytest.mark.parametrize(
    ("lowest", "taken", "factor"),
    [
        (5.0, True, 2.5),
        (1.5, True, 1.5),
        (1.1, True, 1.0),
        (0.8, True, 1.0),
        (0.5, True, 0.5),
        (0.3, True, 0.3),
        (0.2, False, 0.5),
        (0.1, False, 0.5),
        (-1.0, False, 0.5),
    ],
)
@pytest.mark.parametrize(("bend", "level"), [(1.0, 5.0), (1e3, 0.0), (1e-3, -7.0)])
def test_the_parabola_says_whether_to_go_on_and_how_fast(
    lowest: float, taken: bool, factor: float, bend: float, level: float
) -> None:
    """Neither the loss' unit nor its zero matters."""
    assert AdamWalk().judge(*parabola(lowest, bend, level)) == (taken, pytest.approx(factor))


def test_without_a_lowest_point_it_is_the_ends_that_count() -> None:
    walk = AdamWalk()
    assert walk.judge(3.0, 2.0, 1.0) == (True, 2.5)
    assert walk.judge(1.0, 2.0, 3.0) == (False, 0.5)
    assert walk.judge(3.0, 2.5, 1.0) == (True, 2.5)
    assert walk.judge(3.0, 3.0, 3.0) == (True, 1.0)


@pytest.mark.parametrize("after", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_undoes_the_stretch(after: float) -> None:
    assert AdamWalk().judge(3.0, 2.0, after) == (False, 0.25)


STRETCH = Stretch(50, 64, 256, most_samples=128)


@pytest.mark.parametrize(
    ("stretch", "judged", "rate", "samples"),
    [
        (STRETCH, (True, 2.0), 0.02, 64),
        (STRETCH, (True, 1.0), 0.01, 64),
        (STRETCH, (True, 0.5), 0.01, 128),  # noise: more samples
        (Stretch(50, 128, 256, most_samples=128), (True, 0.5), 0.01 / 1.5, 128),  # as many as there may be
        (STRETCH, (True, 0.3), 0.01 / 1.5, 128),  # too far, or much noise
        (STRETCH, (False, 0.5), 0.005, 64),
    ],
)
def test_noise_is_met_by_samples_and_steps_that_are_too_far_by_the_rate_as_well(
    stretch: Stretch, judged: tuple[bool, float], rate: float, samples: int
) -> None:
    state: dict[str, Any] = {"num_samples": stretch.num_samples, "rate": 0.01}
    AdamWalk().update(stretch, 0.01, judged, state)
    assert (state["rate"], state["num_samples"]) == (pytest.approx(rate), samples)


def test_a_rate_stays_where_the_mean_of_small_steps_gains_in_spite_of_noise() -> None:
    walk, noise = AdamWalk(), (True, 0.5)
    assert walk.gains(before=3.0, mean=2.0, after=3.9)
    assert not walk.gains(before=3.0, mean=2.0, after=4.1)
    for stretch, judged, rate in (
        (Stretch(50, 128, 256, most_samples=128), noise, 0.01),
        (Stretch(50, 128, 256, most_samples=128), (True, 0.3), 0.01 / 1.5),  # too far
        (STRETCH, noise, 0.01),
    ):
        state: dict[str, Any] = {"num_samples": stretch.num_samples}
        walk.update(stretch, 0.01, judged, state, gains=True)
        assert state["rate"] == pytest.approx(rate)
        assert state["num_samples"] == min(2 * stretch.num_samples, stretch.most_samples)


@pytest.mark.parametrize(("num_samples", "checked"), [(64, 256), (256, 400), (2048, 3200), (4096, 6400)])
def test_a_stretch_is_checked_with_a_share_of_its_samples(num_samples: int, checked: int) -> None:
    state = {"num_steps": 50, "num_samples": num_samples}
    stretch = AdamWalk().stretch(600_000, 1e6, 1000, 1, state)
    assert stretch is not None
    assert (stretch.num_steps, stretch.num_samples, stretch.num_checked) == (50, num_samples, checked)


def test_a_loss_that_only_rises_undoes_the_stretch() -> None:
    """With noise the middle is below the ends, so that this is none; the next stretch is no longer."""
    walk, state = AdamWalk(), {"num_steps": 14}
    assert walk.judge(2.0, 2.3, 3.1) == walk.judge(2.0, 2.0, 3.1) == (False, 0.5)
    assert walk.judge(2.0, 1.9, 3.1)[0]
    walk.update(Stretch(14, 32, 64, most_samples=64), 0.01, (False, 0.5), state)
    assert (state["num_steps"], state["num_samples"], state["rate"]) == (14, 32, 0.005)


def test_stretches_grow_from_short_ones() -> None:
    walk, state, found = AdamWalk(), dict[str, Any](), []
    for _ in range(10):
        stretch = walk.stretch(60_000, 1e6, 1000, 1, state)
        assert stretch is not None
        found.append(stretch.num_steps)
        walk.update(stretch, 0.01, (True, 1.0), state)
    assert found == [5, 7, 10, 14, 20, 28, 40, 50, 50, 50]


def walked(walk: AdamWalk, gain: float, number: int = 8) -> dict[str, Any]:
    """The state after some stretches from a loss of 1, with a cost of 100 each."""
    state: dict[str, Any] = {}
    for _ in range(number):
        walk.note_stretch(1.0, gain, 100.0, 10, state)
    return state


@pytest.mark.parametrize("unit", [1.0, 1e3, 1e-3])
def test_gauss_newton_steps_are_tried_where_the_walk_gains_little_of_the_loss(unit: float) -> None:
    walk = AdamWalk()
    for gain, is_slow in ((0.03, True), (0.04, False)):
        state: dict[str, Any] = {}
        for number in range(8):
            assert not walk.is_trying(state), number
            walk.note_stretch(unit, gain * unit, 100.0, 10, state)
        assert walk.is_trying(state) == is_slow
        assert (walk.stretch(60_000, 1e6, 1000, 1, state) is None) == is_slow


@pytest.mark.parametrize(("gain", "is_over"), [(0.1, True), (0.014, True), (0.013, False)])
def test_the_walk_is_over_where_they_gain_enough_for_their_cost(gain: float, is_over: bool) -> None:
    """The walk has 0.02 for 100, and they have to gain two thirds of it. Their first one does not count."""
    walk = AdamWalk()
    state = walked(walk, 0.02)
    for own in (1e6, gain, gain, gain):
        assert walk.is_trying(state)
        walk.note_step(own, 100.0, state)
    assert not walk.is_trying(state)
    assert state["is_over"] == is_over
    assert (walk.stretch(60_000, 1e6, 1000, 1, state) is None) == is_over


@pytest.mark.parametrize("gain", [0.002, 0.0])
def test_they_are_tried_again_once_the_walk_has_cost_several_times_as_much(gain: float) -> None:
    """Not sooner where it gains nothing: it may have to find its way from where they have led."""
    walk = AdamWalk()
    state = walked(walk, 0.02)
    for own in (0.0, 0.012, 0.012, 0.012):
        walk.note_step(own, 100.0, state)
    found = 0
    while not walk.is_trying(state):
        walk.note_stretch(1.0, gain, 100.0, 10, state)
        found += 1
    assert found == 20


def test_what_counts_is_the_gain_while_the_cost_doubles() -> None:
    """Stretches that grow dear are not slow for that, as long as they gain enough."""
    walk, state = AdamWalk(), dict[str, Any]()
    for _ in range(10):
        walk.note_stretch(1.0, 0.045, 100.0, 1, state)
    for number in range(8):  # the last half of the cost has 0.23 at first, and with the eighth 0.13
        assert not walk.is_trying(state), number
        walk.note_stretch(1.0, 0.005, 80.0, 1, state)
    assert walk.is_trying(state)


def test_after_a_long_walk_four_stretches_that_gain_little_are_slow_too() -> None:
    """Or else a walk that takes ever longer for the same part of the loss would never be over."""
    walk, state = AdamWalk(), dict[str, Any]()
    for number in range(100):
        walk.note_stretch(1.0, 0.05 if number < 8 else 0.026, 100.0, 50, state)  # a tenth in four of them
        assert not walk.is_trying(state)
    for _ in range(3):
        walk.note_stretch(1.0, 0.0, 100.0, 50, state)
    assert walk.is_trying(state)


def test_what_a_long_walk_keeps_of_its_past_is_bounded() -> None:
    walk, state = AdamWalk(), dict[str, Any]()
    for number in range(1, 1000):
        walk.note_stretch(1.0, 1.0, 1.0, 1, state)
        kept = sum(cost for _, cost, _ in state["gains"])
        assert len(state["gains"]) <= 17
        assert kept == sum(gain for gain, *_ in state["gains"])
        assert kept >= min(number, number / 2)


def test_no_gauss_newton_step_is_tried_on_few_samples() -> None:
    walk, state = AdamWalk(), dict[str, Any]()
    for _ in range(50):
        walk.note_stretch(1.0, 0.0, 100.0, 10, state, is_enough=False)
        assert not walk.is_trying(state)
    walk.note_stretch(1.0, 0.0, 100.0, 10, state)
    assert walk.is_trying(state)


def test_what_gauss_newton_steps_gain_is_of_no_interest_without_a_trial() -> None:
    state: dict[str, Any] = {}
    AdamWalk().note_step(1.0, 1.0, state)
    assert state == {}


def test_small_steps_have_samples_by_what_a_sample_costs() -> None:
    def sizes(*arguments: Any) -> tuple[int, int, int]:
        found = AdamWalk().stretch(*arguments, {})
        assert found is not None
        return found.num_steps, found.num_samples, found.num_checked

    assert sizes(60_000, 1e8, 10**6, 1) == (5, 32, 32)
    assert sizes(60_000, 1e8, 10**6, 49) == (5, 32, 16)
    assert sizes(1000, 1e3, 10**3, 1) == (5, 128, 32)  # fewer, so that there are enough of them
    assert sizes(60_000, 1e3, 10**3, 1) == (5, 512, 256)
    assert sizes(60_000, 0.0, 10**3, 1) == (5, 512, 256)  # an embedding: nothing counted
    assert sizes(60_000, 1e3, 10**3, 10_000) == (5, 512, 64)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("number", [20, 128, 160, 240, 400, 1000, 5000])
def test_a_stretch_goes_through_the_batch_a_few_times_at_most(number: int, again: bool) -> None:
    state = {"num_steps": 50}
    passes = 16 if again else 2
    found = AdamWalk().stretch(number, 1e8, 10**6, 1, state, again=again)
    if found is None:
        assert number < 224  # too few for ten small steps of 32 in two passes
    else:
        assert found.num_steps * found.num_samples <= passes * number
        assert found.num_samples <= number
        assert found.is_set == again


def test_no_walk_has_no_stretch() -> None:
    assert NoWalk().stretch(60_000, 1e6, 1000, 1, {}) is None


def test_the_small_steps_are_those_of_adam() -> None:
    torch.manual_seed(0)
    walk, param = AdamWalk(), torch.nn.Parameter(torch.randn(7))
    value = param.detach().clone()
    mean, square = torch.zeros(7), torch.zeros(7)
    adam = torch.optim.Adam([param], lr=0.01, betas=walk.betas, eps=0.0)
    for count in range(1, 60):
        gradient = 10.0 ** (count % 5) * torch.randn(7)
        param.grad = gradient.clone()
        adam.step()
        value.add_(walk.direction(gradient, mean, square, count), alpha=0.01)
    torch.testing.assert_close(value, param.detach())


def test_a_mean_that_has_been_turned_into_new_coordinates_makes_no_long_step() -> None:
    found = AdamWalk().direction(torch.zeros(2), torch.tensor([1.0, -1.0]), torch.zeros(2), 5)
    assert 1 < found.abs().max() < 3


@pytest.mark.parametrize(
    "settings",
    [
        {"length": 0},
        {"betas": (0.9, 1)},
        {"first_steps": 1},
        {"max_steps": 4},
        {"change": 1},
        {"rise": 0.5},
        {"max_samples": 0},
        {"rotation": -1},
        {"slow": math.nan},
        {"trials": 1},
        {"damping": 0},
    ],
)
def test_settings_out_of_bounds_are_told(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="but must be"):
        AdamWalk(**settings)  # type: ignore[arg-type]
