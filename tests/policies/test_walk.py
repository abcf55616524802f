"""The walk that a run opens with, as arithmetic."""

from __future__ import annotations

import math

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
        (5.0, True, 2.0),
        (1.5, True, 1.5),
        (1.1, True, 1.0),
        (0.8, True, 1.0),
        (0.5, True, 1 / 1.5),
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
    assert walk.judge(3.0, 2.0, 1.0) == (True, 2.0)
    assert walk.judge(1.0, 2.0, 3.0) == (False, 0.5)
    assert walk.judge(3.0, 2.5, 1.0) == (True, 2.0)


@pytest.mark.parametrize("after", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_undoes_the_stretch(after: float) -> None:
    assert AdamWalk().judge(3.0, 2.0, after) == (False, 0.25)


def test_the_walk_is_over_once_the_rate_has_fallen_from_its_highest() -> None:
    walk, state = AdamWalk(), dict[str, float]()
    assert walk.rate_of(10_000, state) == 0.005
    for factor in (1.5, 1.0, 1 / 1.5):
        walk.update(walk.rate_of(10_000, state), factor, state)
        assert not state["is_over"]
    assert walk.rate_of(10_000, state) == pytest.approx(0.005)
    walk.update(walk.rate_of(10_000, state), 1 / 1.5, state)
    assert state["is_over"]
    assert walk.stretch(60_000, 1e6, 1000, 1, state) is None


def test_small_steps_have_samples_by_what_a_sample_costs() -> None:
    walk = AdamWalk()
    assert walk.stretch(60_000, 1e8, 10**6, 1, {}) == Stretch(50, 32, 256)
    assert walk.stretch(60_000, 1e3, 10**3, 1, {}) == Stretch(50, 512, 256)
    assert walk.stretch(60_000, 0.0, 10**3, 1, {}) == Stretch(50, 512, 256)  # an embedding: nothing counted
    assert walk.stretch(60_000, 1e8, 10**6, 10_000, {}) == Stretch(50, 32, 64)


@pytest.mark.parametrize("number", [20, 128, 400, 1000, 5000])
def test_a_stretch_goes_through_the_batch_four_times_at_most(number: int) -> None:
    walk = AdamWalk()
    found = walk.stretch(number, 1e8, 10**6, 1, {})
    if found is None:
        assert 4 * number / 32 < 20
    else:
        assert found.num_steps >= walk.min_steps
        assert found.num_steps * found.num_samples + found.num_checked <= 4 * number


def test_no_walk_has_no_stretch() -> None:
    assert NoWalk().stretch(60_000, 1e6, 1000, 1, {}) is None


def test_the_small_steps_are_those_of_adam() -> None:
    torch.manual_seed(0)
    walk, param = AdamWalk(), torch.nn.Parameter(torch.randn(7))
    value = param.detach().clone()
    mean, square = torch.zeros(7), torch.zeros(7)
    adam = torch.optim.Adam([param], lr=0.01, betas=walk.betas, eps=0.0)
    for count in range(1, 6):
        gradient = torch.randn(7)
        param.grad = gradient.clone()
        adam.step()
        walk.move(value, gradient, mean, square, 0.01, count)
    torch.testing.assert_close(value, param.detach())


@pytest.mark.parametrize(
    "settings",
    [
        {"length": 0},
        {"betas": (0.9, 1)},
        {"min_steps": 0},
        {"max_steps": 5},
        {"change": 1},
        {"fall": 0.5},
        {"damping": 0},
    ],
)
def test_settings_out_of_bounds_are_told(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="but must be"):
        AdamWalk(**settings)  # type: ignore[arg-type]
