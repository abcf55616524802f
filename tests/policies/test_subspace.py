"""The search in a subspace, against dense matrices."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockhf import BlockHF, NoWalk, Subspace, blocks
from blockhf.batches import Share
from blockhf.curvature import DoubleBackward, GaussNewton
from blockhf.point import Linearizer, Point
from blockhf.policies import Choice, Proposal, Situation
from blockhf.policy import PolicyState
from blockhf.samples import Samples
from cases import as_blocks
from optimizer_tasks import (
    Task,
    dense_gauss_newton,
    dense_gradient,
    dense_loss,
    equal,
    slices,
    through_a_file,
    values,
)


class Searched:
    """A search on a task whose last samples are held out, with random descent directions."""

    def __init__(
        self, num_held_out: int = 40, partition: Any = blocks.by_layer, share: float = 0.0, **options: Any
    ) -> None:
        self.share = share
        self.task = Task("cross_entropy", num_samples=120, **options)
        inputs, targets = self.task.batch
        self.seen, self.unseen = self.task.front(80), (inputs[80:], targets[80:])
        self.again = (inputs[20:80], targets[20:80])
        groups = partition(self.task.model)
        self.slices = slices(groups)
        samples = Samples(self.objective, self.seen, as_blocks(groups))
        linearizer = Linearizer(GaussNewton(), DoubleBackward(), PolicyState())
        self.point = Point(samples, linearizer)
        self.point.keeps_graph = True
        self.held_out = self.point.apart((self.unseen, Share(40, 40))) if num_held_out else None
        self.compared = self.point.apart((self.again, Share(60, 60))) if share else None
        self.state = PolicyState()
        self.bad: Callable[[Tensor], Tensor] = lambda loss: loss

    def objective(self, batch: Any) -> tuple[Tensor, Tensor]:
        outputs, loss = self.task.objective(batch)
        return outputs, self.bad(loss)

    @property
    def damping(self) -> float:
        """What the search has learned it to be."""
        return float(self.state.shared.get("damping", 1e-3))

    @property
    def samples(self) -> Any:
        return self.seen if self.held_out is None else self.unseen

    def proposals(self, lrs: Sequence[float] | None = None, seed: int = 0) -> list[Proposal]:
        gradient = dense_gradient(self.task, self.seen)
        generator = torch.Generator().manual_seed(seed)
        found = []
        for index, own in enumerate(self.slices):
            noise = torch.randn(len(gradient[own]), generator=generator, dtype=torch.float64)
            direction = -gradient[own] + 0.02 * noise
            found.append(Proposal(gradient[own], direction, -1.0, 0.0, lrs[index] if lrs else 1.0))
        return found

    def situation(self, loss: float, proposals: Sequence[Proposal]) -> Situation:
        return Situation(
            loss, proposals, self.point, self.point, self.held_out, self.compared, seen_share=self.share
        )

    def choose(
        self, search: Subspace, proposals: Sequence[Proposal], state: PolicyState | None = None
    ) -> Choice:
        before = values(self.task.model)
        loss, _ = self.point.gradient()
        choice = search.choose(self.situation(float(loss), proposals), self.state if state is None else state)
        assert torch.equal(values(self.task.model), before)
        return choice

    def dense(self, proposals: Sequence[Proposal], last: Sequence[Tensor] = (), damping: float = 1e-3) -> Any:
        """The combination, its coefficients and the change that it promises."""
        G = dense_gauss_newton(self.task, self.samples)
        unseen, seen = (dense_gradient(self.task, own) for own in (self.samples, self.seen))
        g = self.share * seen + (1 - self.share) * unseen
        columns = []
        vectors = [*(proposal.direction for proposal in proposals), *last]
        for own, vector in zip(itertools.cycle(self.slices), vectors, strict=False):
            columns.append(torch.zeros_like(g))
            columns[-1][own] = vector
        D = torch.stack(columns, 1)
        A = D.T @ G @ D
        A = A + damping * torch.diag(A.diagonal())
        A = A + 1e-6 * torch.diag(A.diagonal())  # the ridge
        c = torch.linalg.solve(A, -D.T @ g)
        return D @ c, c, float(g @ D @ c + 0.5 * c @ D.T @ G @ D @ c)


@pytest.mark.parametrize(
    ("num_held_out", "share"), [(40, 0.0), (0, 0.0), (40, 0.3)], ids=["held out", "in sample", "finite set"]
)
@pytest.mark.parametrize("partition", [blocks.single, blocks.by_layer])
def test_the_coefficients_are_those_of_the_dense_system(
    partition: Any, num_held_out: int, share: float
) -> None:
    searched = Searched(num_held_out, partition, share)
    search, last = Subspace(), []
    for seed in range(2):  # the second with the last update
        proposals = searched.proposals(seed=seed)
        update, coefficients, change = searched.dense(proposals, last, searched.damping)
        choice = searched.choose(search, proposals)
        assert choice.update is not None
        last = list(choice.update)
        scale = float(choice.reason.split()[-1]) if "shrunk" in choice.reason else 1.0
        torch.testing.assert_close(torch.cat(last), scale * update, rtol=1e-9, atol=1e-12)
        shares = (scale * coefficients[: len(proposals)]).tolist()
        assert choice.coefficients == pytest.approx(shares, rel=1e-8)
        if scale == 1.0:
            assert choice.change == pytest.approx(change, rel=1e-8)
        assert (choice.before is None, choice.signal is None) == (not num_held_out, not num_held_out)


def test_the_signal_is_the_slope_on_the_held_out_samples_over_that_on_the_seen_ones() -> None:
    searched = Searched()
    proposals = searched.proposals()
    direction = torch.cat([proposal.direction for proposal in proposals])
    unseen, seen = (
        dense_gradient(searched.task, own) @ direction for own in (searched.unseen, searched.seen)
    )
    choice = searched.choose(Subspace(), proposals)
    assert choice.signal == pytest.approx(float(unseen / seen))
    assert choice.before == pytest.approx(float(dense_loss(searched.task, searched.unseen)))


def test_of_a_finite_set_the_loss_is_that_of_the_seen_and_of_the_held_out_samples_by_their_shares() -> None:
    searched = Searched(share=0.3)

    def mixed() -> float:
        seen, unseen = (float(dense_loss(searched.task, own)) for own in (searched.again, searched.unseen))
        return 0.3 * seen + 0.7 * unseen

    proposals = searched.proposals()
    choice = searched.choose(Subspace(), proposals)
    assert choice.update is not None
    assert choice.before == pytest.approx(mixed())
    assert choice.signal == pytest.approx(Searched().choose(Subspace(), proposals).signal)
    searched.point.commit(choice.update)
    assert choice.loss == pytest.approx(mixed())


@pytest.mark.parametrize("num_bad", [0, 1])
def test_the_lengths_are_what_curvature_on_the_held_out_samples_leaves_of_each_block_s_direction(
    num_bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slope is that on the samples seen: noise in the gradient shortens the step, not the lengths."""
    searched, search = Searched(), Subspace()
    proposals = searched.proposals()
    curved = dense_gauss_newton(searched.task, searched.unseen)
    loss_at, tries = Point.loss_at, []

    def watched(point: Point, update: Sequence[Tensor]) -> Tensor:
        tries.append(update)
        return loss_at(point, update) + (100 if len(tries) <= num_bad else -100)

    monkeypatch.setattr(Point, "loss_at", watched)
    choice = searched.choose(search, proposals)
    expected = [
        -(0.5**num_bad) * proposal.slope / float((1 + 1e-3) * d @ curved[own, own] @ d)
        for own, proposal in zip(searched.slices, proposals, strict=True)
        for d in [proposal.direction]
    ]
    assert choice.lengths == pytest.approx(expected, rel=1e-8)


def test_lr_multiplies_the_result_of_each_block() -> None:
    searched = Searched()
    whole = searched.choose(Subspace(), searched.proposals(), PolicyState()).update
    lrs = [0.5, 0.1, 0.0]
    scaled = searched.choose(Subspace(), searched.proposals(lrs), PolicyState()).update
    assert whole is not None
    assert scaled is not None
    for one, other, lr in zip(whole, scaled, lrs, strict=True):
        torch.testing.assert_close(other, lr * one)


def test_without_momentum_the_last_update_is_no_direction() -> None:
    searched, search = Searched(), Subspace(momentum=False)
    for seed in range(2):
        proposals = searched.proposals(seed=seed)
        update, _, _ = searched.dense(proposals, damping=searched.damping)
        choice = searched.choose(search, proposals)
        assert choice.update is not None
        scale = float(choice.reason.split()[-1]) if "shrunk" in choice.reason else 1.0
        torch.testing.assert_close(torch.cat(list(choice.update)), scale * update, rtol=1e-9, atol=1e-12)


def test_from_the_third_step_on_the_trend_of_the_updates_is_a_direction() -> None:
    searched, search = Searched(), Subspace()
    last: list[Tensor] = []
    trend: list[Tensor] = []
    for seed in range(4):
        proposals = searched.proposals([0.1, 0.1, 0.1], seed=seed)
        past = [*last, *trend] if seed >= 2 else last
        update, _, _ = searched.dense(proposals, past, searched.damping)
        choice = searched.choose(search, proposals)
        assert choice.update is not None
        scale = 0.1 * (float(choice.reason.split()[-1]) if "shrunk" in choice.reason else 1.0)
        torch.testing.assert_close(torch.cat(list(choice.update)), scale * update, rtol=1e-7, atol=1e-10)
        last = list(choice.update)
        trend = [own + 0.8 * old for own, old in zip(last, trend, strict=True)] if trend else last


@pytest.mark.parametrize("num_bad", [0, 1, 3, 4])
def test_the_step_is_halved_until_the_held_out_loss_falls_or_else_rejected(
    num_bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched, search = Searched(), Subspace(max_tries=4)
    proposals = searched.proposals([0.1, 0.1, 0.1])
    full, _, _ = searched.dense(proposals)
    loss_at, tries = Point.loss_at, []

    def watched(point: Point, update: Sequence[Tensor]) -> Tensor:
        tries.append(torch.cat(list(update)))
        return loss_at(point, update) + (100 if len(tries) <= num_bad else 0)

    monkeypatch.setattr(Point, "loss_at", watched)
    choice = searched.choose(search, proposals)
    for index, tried in enumerate(tries):
        torch.testing.assert_close(tried, 0.1 * full * 0.5**index, rtol=1e-9, atol=1e-12)
    assert len(tries) == min(num_bad + 1, 4)
    if num_bad == 4:
        assert choice.update is None
        assert choice.reason == "no step down to 0.12 of the best combination lowers the loss"
    else:
        assert choice.update is not None
        assert torch.equal(torch.cat(list(choice.update)), tries[-1])
    if num_bad > 0:
        assert searched.damping == pytest.approx(1e-3 / 0.7)


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.9, 0.7e-3), (0.5, 1e-3), (0.1, 1e-3 / 0.7), (-1.0, 1e-3 / 0.7)]
)
def test_the_damping_follows_the_ratio(ratio: float, expected: float) -> None:
    state = PolicyState()
    Subspace()._adapt(ratio, state)
    assert state.shared.get("damping", 1e-3) == pytest.approx(expected)


def test_the_damping_has_a_floor() -> None:
    state = PolicyState()
    Subspace(damping=1e-5, floor=1e-5)._adapt(1.0, state)
    assert state.shared["damping"] == 1e-5


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_or_loss_that_is_not_finite_is_rejected(value: float) -> None:
    searched = Searched()
    proposals = searched.proposals()
    searched.point.gradient()
    searched.bad = lambda loss: loss * value
    before = values(searched.task.model)
    choice = Subspace().choose(searched.situation(1.0, proposals), PolicyState())
    assert choice.update is None
    assert torch.equal(values(searched.task.model), before)


def test_directions_of_zero_are_left_out() -> None:
    searched = Searched()
    first, *others = searched.proposals()
    nothing = Proposal(first.gradient, torch.zeros_like(first.direction), 0.0, 0.0, 1.0)
    choice = searched.choose(Subspace(), [nothing, *others])
    assert choice.update is not None
    assert choice.coefficients[0] == 0.0
    assert not bool(choice.update[0].any())
    zeros = [Proposal(o.gradient, torch.zeros_like(o.direction), 0.0, 0.0, 1.0) for o in (first, *others)]
    choice = searched.choose(Subspace(), zeros, PolicyState())
    assert (choice.update, choice.reason) == (None, "no block has a direction")


def test_a_saved_search_goes_on_to_the_last_bit() -> None:
    searched, search = Searched(), Subspace()
    for seed in (2, 3):  # so that there is a trend
        searched.choose(search, searched.proposals(seed=seed))
    one, other = searched.state, PolicyState.from_dict(through_a_file(searched.state.to_dict()))
    assert set(one.blocks) == {block.name for block in searched.point.blocks}
    choices = [searched.choose(Subspace(), searched.proposals(seed=1), each) for each in (one, other)]
    assert equal(choices[0].update, choices[1].update)
    assert equal(one.to_dict(), other.to_dict())


@pytest.mark.parametrize(("available", "expected"), [(4, 0), (127, 0), (128, 32), (400, 100), (9999, 256)])
def test_a_quarter_is_held_out_where_that_is_enough(available: int, expected: int) -> None:
    assert Subspace().num_held_out(available, 1000) == expected


def test_no_scale_of_the_loss_or_of_a_direction_changes_the_step() -> None:
    searched = Searched()
    proposals = searched.proposals()
    update = searched.choose(Subspace(), proposals, PolicyState()).update
    assert update is not None
    for factor in (1e-3, 1e3):
        other = [replace(own, direction=own.direction * factor) for own in proposals]
        same = searched.choose(Subspace(), other, PolicyState()).update
        assert same is not None
        torch.testing.assert_close(torch.cat(list(same)), torch.cat(list(update)), rtol=1e-9, atol=1e-12)


def test_more_is_held_out_for_a_gradient_of_many_samples() -> None:
    assert Subspace().num_held_out(40_000, 40_000) == 1024
    assert Subspace().num_held_out(1600, 32_000) == 400  # never more than the share
    assert Subspace(per_sample=0.0).num_held_out(40_000, 20_000) == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": 1.0}, "held_out is 1.0, but must be at least 0 and below 1."),
        ({"damping": 1e-7}, "damping is 1e-07, but must be at least the floor, 1e-06, and that positive."),
        ({"floor": 0.0}, "damping is 0.001, but must be at least the floor, 0.0, and that positive."),
        ({"max_tries": 0}, "max_tries is 0, but must be at least 1."),
    ],
)
def test_an_invalid_subspace_is_refused_with_value_and_bound(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        Subspace(**options)


def test_a_rate_of_zero_moves_nothing_and_leaves_the_dampings_alone() -> None:
    task = Task(num_samples=200)
    optimizer = BlockHF(blocks.by_layer(task.model), lr=0.0, walk=NoWalk())
    before = values(task.model)
    optimizer.step(task.objective, task.batch)
    assert optimizer.report.accepted
    assert torch.equal(values(task.model), before)
    assert "damping" not in optimizer.policy_state["search"].shared


def test_a_block_without_a_direction_keeps_its_damping() -> None:
    task = Task(num_samples=200)
    used, idle = task.model[0], task.model[-1]
    optimizer = BlockHF(
        [{"params": used.parameters(), "name": "used"}, {"params": idle.parameters(), "name": "idle"}],
        walk=NoWalk(),
    )
    damping = optimizer.param_groups[0]["damping"]

    def objective(batch: Any) -> Any:  # the last layer is multiplied with zero
        outputs = torch.tanh(used(batch[0])).sum(1) + 0.0 * idle.weight.sum() + 0.0 * idle.bias.sum()
        return outputs, (outputs - 1).square().mean()

    optimizer.step(objective, task.batch)
    report = optimizer.report
    assert report is not None
    still = [block.norm == 0 for block in report.blocks]
    assert still[-1]
    assert not still[0]
    assert optimizer.param_groups[-1]["damping"] == damping


class Regretted:
    """A search after an accepted step, at a point that is where the step went."""

    def __init__(self) -> None:
        self.search, self.state = Subspace(), PolicyState()
        searched = Searched()
        self.point, self.last = searched.point, [torch.full_like(own, 0.1) for own in searched.point.origin]

    def step(self, expected: float) -> None:
        for block, own in zip(self.point.blocks, self.last, strict=True):
            self.state.blocks[block.name] = {"last": own}
        sums = torch.stack([own.sum().float() for own in self.point.origin])
        self.state.shared.update({"expected": expected, "moved to": sums})

    def see(self, *losses: float) -> Choice | None:
        """What the last of some losses on new samples says, where 1 was expected each time."""
        choice = None
        for loss in losses:
            self.step(1.0)
            choice = self.search.take_back(loss, self.point, self.state)
        return choice


USUAL = (1.1, 0.9, 1.05, 0.95, 1.0)


def test_a_step_after_which_new_samples_have_a_far_higher_loss_is_taken_back() -> None:
    regretted = Regretted()
    choice = regretted.see(*USUAL, 2.0)
    assert choice is not None
    assert choice.update is not None
    assert all(torch.equal(own, -last) for own, last in zip(choice.update, regretted.last, strict=True))
    assert choice.reason.startswith("the last step is taken back: on new samples the loss is")
    assert not any("last" in own for own in regretted.state.blocks.values())
    assert regretted.search.take_back(100.0, regretted.point, regretted.state) is None  # once


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param((*USUAL, 1.2), id="as far off as usual"),
        pytest.param((*USUAL, -50.0), id="far lower"),
        pytest.param((*USUAL, math.nan), id="samples that are no numbers"),
        pytest.param((1.0, 1.0, 3.0), id="too few to know what is usual"),
        pytest.param((0.2, 1.9, 0.3, 1.6, 0.1, 4.0), id="batches that differ much, as sorted ones do"),
    ],
)
def test_a_step_stays_where_new_samples_do_not_speak_against_it(losses: tuple[float, ...]) -> None:
    assert Regretted().see(*losses) is None


def test_a_step_stays_where_others_have_moved_the_parameters_since() -> None:
    regretted = Regretted()
    regretted.see(*USUAL)
    regretted.step(1.0)
    regretted.state.shared["moved to"] += 1.0
    assert regretted.search.take_back(9.0, regretted.point, regretted.state) is None


def test_a_harmful_step_is_undone_and_damped() -> None:
    """The samples held out come from the first part of a batch whose rest explodes after some steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    inputs = torch.randn(2000, 4).double()
    targets, harm = inputs.sum(1, keepdim=True).sin(), [0.0]

    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, torch.nn.functional.mse_loss(outputs, batch[1]) + harm[0]

    optimizer = BlockHF(blocks.by_layer(model), population=20_000, walk=NoWalk())
    before = values(model)
    for _ in range(7):
        before = values(model)
        order = torch.randperm(2000)
        optimizer.step(objective, (inputs[order], targets[order]))
    assert optimizer.report is not None
    assert optimizer.report.accepted
    dampings = [group["damping"] for group in optimizer.param_groups]
    harm[0] = 100.0  # as if the step had done it
    optimizer.step(objective, (inputs[order], targets[order]))
    assert not optimizer.report.accepted
    assert "taken back" in optimizer.report.reason
    torch.testing.assert_close(values(model), before, rtol=1e-12, atol=1e-12)
    assert [group["damping"] for group in optimizer.param_groups] == [8 * own for own in dampings]
    harm[0] = 0.0
    optimizer.step(objective, (inputs[order], targets[order]))
    assert optimizer.report.accepted
