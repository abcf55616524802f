"""A run with default settings opens with small steps, and goes over to Gauss-Newton steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockhf import AdamWalk, AllSamples, BlockHF, NoWalk, blocks

Batch = tuple[Tensor, Tensor]
NUMBER = 24_000


TRIES = AdamWalk(slow=1e9)
"""Tries Gauss-Newton steps as soon as it may."""


def make(*, norm: bool = False) -> tuple[nn.Module, Callable[[Batch], tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    hidden: list[nn.Module] = [nn.Linear(5, 16), nn.BatchNorm1d(16)] if norm else [nn.Linear(5, 16)]
    model = nn.Sequential(*hidden, nn.Tanh(), nn.Linear(16, 3))

    def objective(batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, F.cross_entropy(outputs, batch[1])

    return model, objective


def draw(seed: int, number: int = NUMBER) -> Batch:
    inputs = torch.randn(number, 5, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs[:, 0] * inputs[:, 1] > 0).long() + (inputs[:, 2] > 1).long()


def run(
    optimizer: BlockHF, objective: Any, num_steps: int, *, first: int = 0, scale: float = 1.0
) -> list[bool]:
    """Steps on new samples; of each whether it was a stretch of small ones."""

    def scaled(batch: Batch) -> tuple[Tensor, Tensor]:
        outputs, loss = objective(batch)
        return outputs, scale * loss

    found = []
    for number in range(first, first + num_steps):
        optimizer.step(objective if scale == 1.0 else scaled, draw(number))
        assert optimizer.report is not None
        found.append("small_steps" in optimizer.report.work)
    return found


def values(model: nn.Module) -> Tensor:
    return torch.cat([own.detach().flatten() for own in (*model.parameters(), *model.buffers())])


def until_tried(optimizer: BlockHF, objective: Any, draw_number: Callable[[int], Batch] = draw) -> int:
    """Steps until the first one that is not of the walk; their number."""
    for number in range(100):
        optimizer.step(objective, draw_number(number))
        assert optimizer.report is not None
        if "small_steps" not in optimizer.report.work:
            return number + 1
    raise AssertionError("no Gauss-Newton step was tried")


def test_it_opens_with_small_steps_and_ends_with_large_ones_where_these_gain_more() -> None:
    model, objective = make()
    optimizer = BlockHF(blocks.by_layer(model), walk=TRIES)
    first = until_tried(optimizer, objective)
    assert first > 8
    optimizer.policy_state["walk"].shared["gains"] = [[0.0, 1.0, 50]] * 4  # as if the walk stood still
    assert not any(run(optimizer, objective, 10, first=first))  # once it is over, it is over
    assert objective(draw(99))[1].item() < 0.2
    state = optimizer.state_dict()["policies"]["walk"]
    assert state["blocks"] == {}  # the averages are let go
    assert state["shared"]["is_over"]


def test_the_report_and_the_state_count_a_stretch_as_a_step() -> None:
    model, objective = make()
    optimizer = BlockHF(blocks.by_layer(model))
    before = values(model)
    loss = optimizer.step(objective, draw(0))
    report = optimizer.report
    assert report is not None
    assert report.accepted
    assert report.step == 1
    assert report.loss_after is not None
    assert report.loss_after < report.loss == pytest.approx(float(loss))
    assert "5 small steps of 512 samples at a rate of 0.032" in str(report)
    assert report.work["num_gradients"] == report.work["small_steps"] == 5
    assert report.work["gradient_samples"] == 5 * 512
    assert report.work["rotation_flops"] > 0
    assert not torch.equal(values(model), before)
    assert all(own["step"] == 1 for own in optimizer.state.values())


@pytest.mark.parametrize("scale", [1024, 1 / 1024])
def test_the_unit_of_the_loss_does_not_matter(scale: float) -> None:
    """To the last bit where it is a power of two, stretches, trials and Gauss-Newton steps alike."""
    found = []
    for own in (1.0, scale):
        model, objective = make()
        optimizer = BlockHF(blocks.by_layer(model), walk=TRIES)
        assert not all(run(optimizer, objective, 14, scale=own))
        found.append(values(model))
    assert torch.equal(*found)


@pytest.mark.parametrize("scale", [1e3, 1e-3])
@pytest.mark.parametrize(("rotation", "rtol"), [(0.0, 1e-4), (1.0, 1e-2)])
def test_any_other_unit_changes_rounding_alone(scale: float, rotation: float, rtol: float) -> None:
    """Rotations let rounding grow, where there were no gradients yet."""
    found, rates = [], []
    for own in (1.0, scale):
        model, objective = make()
        optimizer = BlockHF(blocks.by_layer(model), walk=AdamWalk(rotation=rotation))
        assert all(run(optimizer, objective, 4, scale=own))
        found.append(objective(draw(99))[1].item())
        rates.append(optimizer.policy_state["walk"].shared["rate"])
    assert found[1] == pytest.approx(found[0], rel=rtol)
    assert rates[1] == pytest.approx(rates[0], rel=rtol)


def test_a_sorted_batch_is_as_good_as_a_shuffled_one() -> None:
    losses = []
    for is_sorted in (False, True):
        model, objective = make()
        optimizer = BlockHF(blocks.by_layer(model))
        for number in range(6):
            batch = draw(number)
            order = batch[1].argsort() if is_sorted else torch.randperm(NUMBER)
            optimizer.step(objective, (batch[0][order], batch[1][order]))
            assert optimizer.report is not None
            assert "small_steps" in optimizer.report.work
        losses.append(objective(draw(99))[1].item())
    assert max(losses) < 0.2  # from above 1
    assert losses[1] == pytest.approx(losses[0], rel=0.2)


def test_a_resumed_walk_goes_on_bit_for_bit() -> None:
    model, objective = make(norm=True)
    optimizer = BlockHF(blocks.by_layer(model), walk=TRIES)
    assert all(run(optimizer, objective, 7))
    assert any("offset" in own for own in optimizer.policy_state["walk"].blocks.values())
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run(optimizer, objective, 12, first=7)
    expected = values(model)
    model, objective = make(norm=True)
    optimizer = BlockHF(blocks.by_layer(model), walk=TRIES)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert not all(run(optimizer, objective, 12, first=7))  # tries large steps on its way
    assert torch.equal(values(model), expected)


def test_a_stretch_uphill_moves_nothing() -> None:
    model, objective = make(norm=True)
    optimizer = BlockHF(blocks.by_layer(model), walk=AdamWalk(length=1e5))
    before = values(model)
    optimizer.step(objective, draw(0))
    assert optimizer.report is not None
    assert not optimizer.report.accepted
    assert "led uphill" in optimizer.report.reason
    assert torch.equal(values(model), before)
    assert optimizer.policy_state["walk"].shared["rate"] < 1e4


def test_an_error_on_the_way_leaves_all_as_it_was() -> None:
    model, objective = make(norm=True)
    optimizer = BlockHF(blocks.by_layer(model))
    before, calls = values(model), 0

    def failing(batch: Batch) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        if calls > 9:
            raise RuntimeError("the tenth")
        return objective(batch)

    with pytest.raises(RuntimeError, match="the tenth"):
        optimizer.step(failing, draw(0))
    assert torch.equal(values(model), before)
    assert not optimizer.policy_state["walk"].shared
    assert not optimizer.state


def test_a_loss_that_is_not_finite_is_told_by_a_rejected_step() -> None:
    model, objective = make()
    inputs, labels = draw(0)
    before = values(model)
    optimizer = BlockHF(blocks.by_layer(model))
    optimizer.step(objective, (inputs * torch.nan, labels))
    assert optimizer.report is not None
    assert optimizer.report.reason == "the loss is not finite"
    assert torch.equal(values(model), before)


def test_a_block_of_rate_zero_stays_and_decay_shrinks() -> None:
    model, objective = make()
    groups = blocks.by_layer(model)
    groups[0]["lr"] = 0.0
    first = model[0].weight.detach().clone()
    optimizer = BlockHF(groups, weight_decay=0.1, decoupled_weight_decay=True)
    assert run(optimizer, objective, 1) == [True]
    assert torch.equal(model[0].weight, first)
    other, objective = make()
    groups = blocks.by_layer(other)
    groups[0]["lr"] = 0.0
    run(BlockHF(groups), objective, 1)
    start = make()[0]
    shrunk = other[2].weight - 0.1 * start[2].weight  # type: ignore[operator, union-attr]
    torch.testing.assert_close(model[2].weight, shrunk)


@pytest.mark.parametrize(
    "options",
    [{"walk": NoWalk()}, {"max_cg_steps": 2, "damping": 0.1}, {"sampling": AllSamples()}],
    ids=["none", "damping", "all samples"],
)
def test_there_is_none_where_the_method_is_chosen_by_hand(options: dict[str, Any]) -> None:
    model, objective = make()
    assert run(BlockHF(blocks.by_layer(model), **options), objective, 1) == [False]


@pytest.mark.parametrize(
    ("dtype", "walks"), [(torch.float32, True), (torch.float64, True), (torch.bfloat16, False)]
)
def test_it_is_in_single_and_in_double_precision(dtype: torch.dtype, walks: bool) -> None:
    model, objective = make()
    model.to(dtype)
    optimizer = BlockHF(blocks.by_layer(model))
    inputs, labels = draw(0)
    optimizer.step(objective, (inputs.to(dtype), labels))
    assert optimizer.report is not None
    assert ("small_steps" in optimizer.report.work) == walks


def test_few_samples_that_come_again_are_walked_on_and_then_solved_exactly() -> None:
    model, objective = make()
    optimizer = BlockHF(blocks.by_layer(model))
    reports = []
    for _ in range(15):
        optimizer.step(objective, draw(0, 3000))
        reports.append(optimizer.report)
    kinds = [("small_steps" in own.work, bool(own.complete)) for own in reports if own]
    number = kinds.count((True, False))
    assert kinds == [(True, False)] * number + [(False, True)] * (15 - number)
    assert 2 <= number <= 8


def test_a_trial_that_gains_less_lets_the_walk_go_on_from_where_it_has_got_to() -> None:
    model, objective = make()
    optimizer = BlockHF(blocks.by_layer(model), walk=TRIES)
    first = until_tried(optimizer, objective)
    state = optimizer.policy_state["walk"]
    state.shared["gains"] = [[1e9, 1.0, 50]] * 4  # no step gains as much
    before = {name: own["waits"].clone() for name, own in state.blocks.items()}
    assert run(optimizer, objective, 3, first=first) == [False] * 3
    for block in optimizer._blocks():
        own = state.of(block.name)
        assert "waits" not in own
        assert float(own["offset"].norm()) > 0  # the steps have moved what is shown, and not the walk
        torch.testing.assert_close(block.values() + own["offset"], before[block.name])
    assert run(optimizer, objective, 2, first=first + 3) == [True] * 2
    assert not state.shared["is_over"]
    assert set(state.blocks) == {"0", "2"}


def test_the_parameters_are_an_average_where_noise_has_a_part_in_it() -> None:
    model, objective = make()
    optimizer = BlockHF(blocks.by_layer(model), walk=AdamWalk(slow=0.0))
    offsets = []
    for number in range(8):  # the last one ends a stretch
        run(optimizer, objective, 1, first=number)
        state = optimizer.policy_state["walk"].of("0")
        offsets.append(float(state["offset"].norm()) if "offset" in state else 0.0)
    assert offsets[0] == 0.0
    assert max(offsets) > 0.01
    loss, number = objective(draw(99))[1].item(), int(offsets[-1] == 0.0)
    assert not number
    for block in optimizer._blocks():  # where the small steps are
        block.assign_(block.values() + optimizer.policy_state["walk"].of(block.name)["offset"])
    assert loss < objective(draw(99))[1].item()


def test_without_averages_the_parameters_are_where_small_steps_end_or_what_they_were() -> None:
    model, objective = make()
    optimizer = BlockHF(blocks.by_layer(model), walk=AdamWalk(slow=0.0, averages=False))
    for number in range(7):  # then stretches go over several batches
        before = values(model)
        run(optimizer, objective, 1, first=number)
        is_elsewhere = "offset" in optimizer.policy_state["walk"].of("0")
        assert is_elsewhere == torch.equal(values(model), before)


@pytest.mark.parametrize(("again", "words"), [(True, "of the whole set"), (False, "held out")])
def test_a_large_batch_that_comes_again_is_the_population(again: bool, words: str) -> None:
    model, objective = make()
    optimizer = BlockHF(blocks.by_layer(model), walk=TRIES)
    until_tried(optimizer, objective, lambda number: draw(0 if again else number))
    assert optimizer.report is not None
    assert not optimizer.report.complete
    assert words in str(optimizer.report)


@pytest.mark.parametrize(("rotation", "rtol"), [(0.0, 1e-5), (1.0, 1e-2)])
def test_micro_batches_walk_the_same_way(rotation: float, rtol: float) -> None:
    found = []
    for size in (None, 100):
        model, objective = make()
        walk = AdamWalk(rotation=rotation)
        optimizer = BlockHF(blocks.by_layer(model), micro_batch_size=size, walk=walk)
        assert all(run(optimizer, objective, 2))
        found.append(objective(draw(99))[1].item())
    assert found[1] == pytest.approx(found[0], rel=rtol)


def test_parameters_may_be_frozen_on_the_way() -> None:
    model, objective = make()
    optimizer = BlockHF(blocks.single(model))
    assert run(optimizer, objective, 1) == [True]
    model[0].weight.requires_grad_(False)  # type: ignore[operator, union-attr]
    first = model[0].weight.detach().clone()  # type: ignore[operator, union-attr]
    assert run(optimizer, objective, 1, first=1) == [True]
    assert torch.equal(model[0].weight, first)


# Small batches


def test_batches_that_are_too_small_for_a_stretch_are_walked_on_together() -> None:
    """The first one might come again; from the second on it is known that they differ."""
    model, objective = make()
    optimizer = BlockHF(blocks.by_layer(model))
    reports, shown = [], []
    for number in range(60):
        shown.append(values(model))
        optimizer.step(objective, draw(number, 64))
        assert optimizer.report is not None
        reports.append(optimizer.report)
    assert "small_steps" not in reports[0].work
    assert "1 small step of 64 samples" in str(reports[1])
    assert "1 of 5 until they show" in str(reports[1])
    assert "checked, with 64 of 128 samples" in str(reports[6])
    # After 5, 7, 10 and 14 small steps a batch for the check alone, and one that has a small step too.
    only_checks = [number for number in range(1, 60) if reports[number].work["small_steps"] == 0]
    assert only_checks == [6, 14, 25, 40]
    assert {reports[number].work["small_steps"] for number in range(1, 60)} == {0, 1}
    moved = [number for number in range(1, 59) if not torch.equal(shown[number], shown[number + 1])]
    assert set(moved) <= {7, 15, 26, 41}
    assert len(moved) >= 3
    assert reports[7].loss_after is not None
    assert reports[7].loss_after <= reports[7].loss
    assert objective(draw(99))[1] < 0.7


def test_several_small_batches_tell_what_all_their_samples_tell() -> None:
    """The losses that judge a stretch are means over the samples of the batches that check it."""
    model, objective = make()
    optimizer = BlockHF(blocks.by_layer(model))
    for number in range(7):
        optimizer.step(objective, draw(number, 64))
    state = optimizer.policy_state["walk"].shared
    ((num_samples, shown, *_),) = state["told"]
    assert num_samples == 64
    assert shown == pytest.approx(objective(draw(6, 64))[1].item())
    before = objective(draw(6, 64))[1] / 2 + objective(draw(7, 64))[1] / 2
    optimizer.step(objective, draw(7, 64))
    assert optimizer.report is not None
    assert optimizer.report.loss == pytest.approx(before.item())
    assert "told" not in state


@pytest.mark.parametrize("size", [32, 64, 256])
def test_small_batches_train(size: int) -> None:
    model, objective = make()
    optimizer = BlockHF(blocks.by_layer(model))
    first = objective(draw(999))[1].item()
    for number in range(500):
        optimizer.step(objective, draw(number, size))
    assert first > 1
    assert objective(draw(999))[1].item() < 0.3


def test_small_batches_may_be_of_any_sizes() -> None:
    model, objective = make()
    optimizer = BlockHF(blocks.by_layer(model))
    for number in range(300):
        optimizer.step(objective, draw(number, (64, 7, 200, 33)[number % 4]))
    assert objective(draw(999))[1].item() < 0.5


@pytest.mark.parametrize("num_before", [31, 41], ids=["in a stretch", "in its check"])
def test_a_resumed_walk_over_small_batches_goes_on_bit_for_bit(num_before: int) -> None:
    def go(optimizer: BlockHF, objective: Any, first: int, last: int) -> None:
        for number in range(first, last):
            optimizer.step(objective, draw(number, 64))

    model, objective = make(norm=True)
    optimizer = BlockHF(blocks.by_layer(model))
    go(optimizer, objective, 0, num_before)
    assert optimizer.policy_state["walk"].shared["num_taken"] > 0
    assert ("told" in optimizer.policy_state["walk"].shared) == (num_before == 41)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    go(optimizer, objective, num_before, 80)
    expected = values(model)
    model, objective = make(norm=True)
    optimizer = BlockHF(blocks.by_layer(model))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    go(optimizer, objective, num_before, 80)
    assert torch.equal(values(model), expected)


def test_a_stretch_of_small_batches_that_leads_uphill_is_undone() -> None:
    model, objective = make()
    optimizer = BlockHF(blocks.by_layer(model), walk=AdamWalk(length=1e5))
    optimizer.step(objective, draw(0, 64))
    before = values(model)
    for number in range(1, 8):
        optimizer.step(objective, draw(number, 64))
    assert optimizer.report is not None
    assert "led uphill" in optimizer.report.reason
    assert torch.equal(values(model), before)
    assert optimizer.policy_state["walk"].shared["rate"] < 3e3


def test_a_small_batch_that_is_not_finite_leaves_the_walk_as_it_was() -> None:
    found = []
    for is_broken in (False, True):
        model, objective = make()
        optimizer = BlockHF(blocks.by_layer(model))
        for number in range(20):
            if is_broken and number == 9:
                inputs, labels = draw(500, 64)
                before, state = values(model), copy.deepcopy(optimizer.policy_state["walk"].to_dict())
                optimizer.step(objective, (inputs * torch.nan, labels))
                assert optimizer.report is not None
                assert optimizer.report.reason == "the loss is not finite"
                assert torch.equal(values(model), before)
                assert optimizer.policy_state["walk"].to_dict()["shared"] == state["shared"]
            optimizer.step(objective, draw(number, 64))
        found.append(objective(draw(99))[1].item())
    assert found[1] == pytest.approx(found[0], rel=0.1)


def test_cheap_exact_solutions_take_over_once_the_walk_has_cost_as_much() -> None:
    """A set of 1,000 samples and a network of 41 parameters: far fewer small steps than a walk has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1))
    inputs = torch.randn(1000, 2)
    targets = torch.sin(inputs[:, :1])

    def objective(batch: Any) -> Any:
        outputs = model(batch[0])
        return outputs, (outputs - batch[1]).square().mean()

    optimizer = BlockHF(blocks.single(model))
    is_over = False
    for _ in range(12):
        optimizer.step(objective, (inputs, targets))
        assert optimizer.report is not None
        assert ("small_steps" in optimizer.report.work, bool(optimizer.report.complete)) == (
            not is_over,
            is_over,
        )
        walked = optimizer.policy_state["walk"].shared["total"]
        is_over = walked >= optimizer.policy_state["plan"].shared["exact_cost"]
    assert is_over


def test_few_samples_that_come_again_are_solved_exactly_at_once() -> None:
    model, objective = make()
    optimizer = BlockHF(blocks.by_layer(model))
    for _ in range(3):
        optimizer.step(objective, draw(0, 64))
    assert optimizer.report is not None
    assert optimizer.report.complete
