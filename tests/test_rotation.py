"""Coordinates that follow the gradients of a block's matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockhf.blocks import Block
from blockhf.rotation import RIDGE, Rotation, Side, affordable_sides, is_refreshed, rotation_flops

SIDES = [Side(2, 6, 4, 0), Side(2, 6, 4, 1)]
SIZE = 2 + 6 * 4 + 3


def learned(draw: Any, number: int, state: dict[str, Any] | None = None, first: int = 1) -> Rotation:
    found = Rotation(SIDES, state or {}, torch.zeros(SIZE, dtype=torch.float64))
    for count in range(first, first + number):
        found.learn(draw(count), *torch.zeros(2, SIZE, dtype=torch.float64), count)
    return found


def correlated(count: int) -> Tensor:
    """A gradient whose matrix has rows and columns that are far from uncorrelated."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.diag(torch.logspace(0, -2, 6, dtype=torch.float64)) + 0.5
    columns = torch.diag(torch.logspace(0, -1, 4, dtype=torch.float64)) + 0.3
    matrix = rows @ torch.randn(6, 4, generator=generator, dtype=torch.float64) @ columns
    rest = torch.ones(5, dtype=torch.float64)
    return torch.cat([rest[:2], matrix.flatten(), rest[2:]])


def test_there_and_back_is_where_it_was() -> None:
    rotation, vector = learned(correlated, 30), correlated(99)
    turned = rotation.there_(vector.clone())
    assert not torch.allclose(turned, vector)
    torch.testing.assert_close(rotation.back_(turned.clone()), vector)
    torch.testing.assert_close(turned.norm(), vector.norm())
    assert torch.equal(turned[:2], vector[:2])  # what is in no matrix stays
    assert torch.equal(turned[-3:], vector[-3:])


def test_the_coordinates_are_the_eigenvectors_of_the_second_moments() -> None:
    rotation = learned(correlated, 400)
    for moments, basis in zip(*rotation.state().values(), strict=True):
        turned = basis.T @ moments @ basis
        off = (turned - turned.diagonal().diag()).norm() / turned.norm()
        before = (moments - moments.diagonal().diag()).norm() / moments.norm()
        assert off < 0.1 * before


def test_a_mean_goes_along_into_new_coordinates() -> None:
    rotation, mean = learned(correlated, 3), torch.zeros(SIZE, dtype=torch.float64)
    mean.copy_(rotation.there_(correlated(7)))
    rotation.learn(correlated(4), mean, torch.ones_like(mean), 4)
    assert is_refreshed(4)
    torch.testing.assert_close(rotation.back_(mean), correlated(7))


def test_the_coordinates_come_in_order_and_squares_go_along() -> None:
    """A side whose moments grow along the diagonal has its coordinates reversed, and its squares too."""
    side, steps = Side(0, 5, 3, 0), torch.arange(1.0, 6.0)
    gradient = torch.outer(steps, torch.ones(3)).flatten()
    rotation = Rotation([side], {}, gradient)
    rotation._moments = [torch.diag(steps)]
    mean, square = gradient.clone(), gradient.square()
    rotation.learn(torch.zeros(15), mean, square, 2)
    assert torch.equal(side.of(square), side.of(gradient.square()).flip(0))
    torch.testing.assert_close(side.of(mean).abs(), side.of(gradient).flip(0))
    torch.testing.assert_close(rotation.back_(mean), gradient)


def test_without_sides_nothing_is_done() -> None:
    vector = torch.randn(5)
    rotation = Rotation([], {}, vector)
    rotation.learn(vector, vector, vector, 1)
    assert rotation.there_(vector) is vector
    assert rotation.back_(vector) is vector


def test_what_was_kept_goes_on() -> None:
    whole = learned(correlated, 12)
    half = learned(correlated, 6)
    resumed = learned(correlated, 6, half.state(), first=7)
    for own, other in zip(whole.state().values(), resumed.state().values(), strict=True):
        assert all(torch.equal(*pair) for pair in zip(own, other, strict=True))


def test_what_is_but_rounding_is_zero_there() -> None:
    """A gradient of rank one has one entry in its own coordinates."""
    matrix = torch.outer(torch.randn(6), torch.randn(4)).flatten()
    gradient = torch.cat([torch.ones(2), matrix, torch.ones(3)])
    rotation = Rotation(SIDES, {}, gradient)
    for count in (1, 2, 4, 8):
        rotation.learn(gradient, *torch.zeros(2, SIZE), count)
    turned = SIDES[0].of(rotation.there_(gradient))
    assert (turned != 0).sum() <= 6
    assert turned.abs().max() > 0.99 * matrix.norm()


def test_directions_without_gradients_do_not_hang_on_rounding() -> None:
    """The unit of the loss changes the rounding, and nothing else."""
    torch.manual_seed(0)
    gradient = torch.cat(
        [torch.ones(2), torch.outer(torch.randn(6), torch.randn(4)).flatten(), torch.ones(3)]
    )
    found = []
    for scale in (1.0, 1000.0, 0.001):
        rotation = Rotation(SIDES, {}, gradient)
        rotation.learn(scale * gradient, *torch.zeros(2, SIZE), 1)
        found.append(rotation.state()["bases"])
    for other in found[1:]:
        for own, same in zip(found[0], other, strict=True):
            torch.testing.assert_close(own, same, rtol=0, atol=100 * torch.finfo(torch.float32).eps / RIDGE)


def test_a_gradient_that_is_not_finite_raises_nothing() -> None:
    rotation = Rotation(SIDES, {}, torch.zeros(SIZE))
    rotation.learn(torch.full((SIZE,), torch.nan), *torch.zeros(2, SIZE), 1)
    assert all(own.isfinite().all() for own in rotation.state()["bases"])


def test_the_smallest_sides_are_turned_first() -> None:
    model = nn.Sequential(nn.Linear(50, 20), nn.Linear(20, 3), nn.Conv2d(2, 4, 3))
    blocks = [Block(str(index), tuple(layer.parameters())) for index, layer in enumerate(model)]
    everything = affordable_sides(blocks, 1e9)
    assert [[side.size for side in own] for own in everything] == [[20, 50], [3, 20], [4, 18]]
    total = sum(side.price for own in everything for side in own)
    for budget in (0.0, 1e3, 1e4, 1e5):
        found = affordable_sides(blocks, budget)
        assert sum(side.price for own in found for side in own) <= budget < total
    assert [side.size for own in affordable_sides(blocks, 3000.0) for side in own] == [3, 4]


def test_vectors_and_single_rows_have_no_sides() -> None:
    block = Block(
        "b", (nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.ones(0, 3)))
    )
    assert affordable_sides([block], 1e9) == [[Side(5, 1, 4, 1)]]


@pytest.mark.parametrize(
    ("first", "last", "counted", "refreshed"),
    [(1, 10, 10, 5), (11, 19, 9, 0), (11, 30, 15, 1), (21, 60, 20, 2)],
)
def test_operations_are_counted(first: int, last: int, counted: int, refreshed: int) -> None:
    """There and back in each small step; after the first twenty every second gradient is taken in."""
    expected = (last - first + 1) * 4 * 75 + counted * 2 * 75 + refreshed * 4 * 125
    assert rotation_flops([Side(0, 3, 5, 1)], first, last) == expected


def test_a_gradient_that_counts_for_two_takes_two_steps_of_the_average() -> None:
    """After the first twenty small steps every second gradient is seen, with the weight of two alike."""
    torch.manual_seed(0)
    vector, moments = torch.randn(SIZE, dtype=torch.float64), []
    for counts in ((22,), (19, 20)):
        rotation = Rotation(SIDES, {}, vector)
        rotation.learn(torch.ones_like(vector), *torch.zeros(2, SIZE, dtype=vector.dtype), 1)
        for count in counts:
            rotation.learn(vector, *torch.zeros(2, SIZE, dtype=vector.dtype), count)
        moments.append(rotation.state()["moments"])
    for own, other in zip(*moments, strict=True):
        torch.testing.assert_close(own, other)
    rotation = Rotation(SIDES, {}, vector)
    rotation.learn(vector, *torch.zeros(2, SIZE, dtype=vector.dtype), 21)
    assert all(not own.any() for own in rotation.state()["moments"])
