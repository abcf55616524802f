"""A point: gradient, loss nearby and curvature, and that nothing moves before a commit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockhf.batches import Share, batch_size, take
from blockhf.blocks import Block
from blockhf.samples import Samples
from buffers import after, assert_buffers, buffers
from regression import Regression, batch_norm, dropout, point_of

X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)


def weight() -> Tensor:
    return torch.tensor([1.0, -2.0], requires_grad=True)


# --- gradient ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("size", [1, 3, 6, 7, 100])
def test_micro_batches_change_neither_loss_nor_gradient(size: int, reduction: str) -> None:
    whole, parted = Regression(reduction=reduction), Regression(reduction=reduction, micro_batch_size=size)
    (loss, gradient), (same_loss, same_gradient) = whole.point.gradient(), parted.point.gradient()
    explicit = torch.autograd.grad(whole.objective(whole.batch)[1], list(whole.model.parameters()))
    torch.testing.assert_close(torch.cat(gradient), torch.cat([g.flatten() for g in explicit]))
    torch.testing.assert_close(same_loss, loss)
    torch.testing.assert_close(torch.cat(same_gradient), torch.cat(gradient))
    update = [torch.ones_like(g) for g in gradient]
    torch.testing.assert_close(parted.point.loss_at(update), whole.point.loss_at(update))


def test_a_loss_cut_off_from_the_parameters_is_refused() -> None:
    task = Regression()
    samples = Samples(lambda batch: task.objective(batch)[1].detach(), task.batch, task.blocks)
    with pytest.raises(ValueError, match=r"^The loss does not depend on any parameter through the graph"):
        point_of(samples).gradient()


def test_a_sparse_gradient_is_refused_with_its_block() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    samples = Samples(lambda batch: table(batch).sum(), Y[:3], [Block("words", (table.weight,))])
    with pytest.raises(ValueError, match=r"^A gradient of block 'words' is sparse.*sparse=False"):
        point_of(samples).gradient()


def test_a_parameter_that_the_loss_does_not_use_has_gradient_zero() -> None:
    used, unused = weight(), weight()
    point = point_of(Samples(lambda: (used**2).sum(), None, [Block("a", (used, unused))]))
    assert point.gradient()[1][0].tolist() == [2, -4, 0, 0]


# --- the loss elsewhere ------------------------------------------------------------------------------


def test_the_loss_elsewhere_is_that_of_moved_parameters_and_moves_nothing() -> None:
    task = Regression()
    update = [torch.randn(block.size).double() for block in task.blocks]
    before = [param.detach().clone() for param in task.model.parameters()]
    places = [(param.data_ptr(), param._version) for param in task.model.parameters()]
    loss = task.point.loss_at(update)

    assert not loss.requires_grad
    assert [(param.data_ptr(), param._version) for param in task.model.parameters()] == places
    assert all(map(torch.equal, task.model.parameters(), before))
    assert all(param.requires_grad and param.grad is None for param in task.model.parameters())
    for block, change in zip(task.blocks, update, strict=True):
        block.assign_(block.values() + change)
    torch.testing.assert_close(loss, task.objective(task.batch)[1].detach())


def test_an_objective_that_raises_elsewhere_leaves_the_parameters() -> None:
    w = weight()

    def objective() -> Tensor:
        if float(w[0].detach()) != 1.0:
            raise RuntimeError("too far")
        return w.sum()

    point = point_of(Samples(objective, None, [Block("w", (w,))]))
    with pytest.raises(RuntimeError, match="too far"):
        point.loss_at([torch.ones(2)])
    assert w.tolist() == [1.0, -2.0]
    assert w.requires_grad


@pytest.mark.parametrize("micro_batch_size", [None, 1], ids=["whole", "in parts"])
def test_an_objective_may_differentiate_by_its_inputs_wherever_it_is_evaluated(
    micro_batch_size: int | None,
) -> None:
    w = weight()

    def objective(points: Tensor) -> Tensor:
        x = points.clone().requires_grad_()
        (slope,) = torch.autograd.grad((w * x**2).sum(), x, create_graph=True)
        return slope.square().sum(1).mean()

    point = point_of(Samples(objective, X[1:5], [Block("w", (w,))], micro_batch_size=micro_batch_size))
    loss, _ = point.gradient()
    assert point.loss_at([torch.zeros(2)]) == loss
    assert point.loss_at([-w.detach()]) == 0


def test_an_evaluation_elsewhere_builds_no_graph() -> None:
    w = weight()
    graphs: list[bool] = []

    def objective() -> Tensor:
        graphs.append((w * 2).requires_grad)
        return (w**2).sum()

    point = point_of(Samples(objective, None, [Block("w", (w,))]))
    point.gradient()
    point.loss_at([torch.ones(2)])
    assert graphs == [True, False]


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 3}], ids=["whole", "in parts"])
def test_dropout_is_the_same_in_the_gradient_and_elsewhere(options: dict[str, Any]) -> None:
    point = dropout(**options).point
    loss, gradient = point.gradient()
    zero = [torch.zeros_like(g) for g in gradient]
    assert point.loss_at(zero) == loss
    assert point.loss_at(zero) == loss


# --- curvature ---------------------------------------------------------------------------------------


def test_a_point_inside_of_its_own_linearization_has_the_same_operator() -> None:
    point = Regression().point
    with point.linearize() as outer:
        with point.linearize([5, 5]) as inner:
            assert inner is outer
        with point.linearize() as again:
            assert again is outer
    with point.linearize() as later:
        assert later is not outer


def test_a_linearization_that_fails_is_released_like_any_other() -> None:
    point = Regression().point
    with pytest.raises(RuntimeError, match="halt"), point.linearize() as first:
        raise RuntimeError("halt")
    with point.linearize() as second:
        assert second is not first


def test_curvature_needs_no_gradient_before_it() -> None:
    one, other = Regression(), Regression()
    other.point.gradient()
    vector = torch.ones(one.blocks[0].size).double()
    with one.point.linearize() as alone, other.point.linearize() as later:
        assert torch.equal(alone.product(0, 0, vector), later.product(0, 0, vector))


@pytest.mark.parametrize(("micro_batch_size", "shares"), [(None, True), (3, False)])
def test_samples_of_their_own_share_a_pass_where_they_are_in_memory_at_once(
    micro_batch_size: int | None, shares: bool
) -> None:
    task = Regression(micro_batch_size=micro_batch_size)
    other = task.point.apart((take(task.batch, 2, 7), Share(5, 5)))
    assert other is not None
    assert other.keeps_graph == shares
    other.gradient()
    with other.linearize() as operator:
        operator.product(0, 0, torch.ones(task.blocks[0].size).double())
    assert (task.samples.ledger.work.num_linearizations == 0) == shares
    assert task.point.apart(None) is None


# --- commit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch_size", [None, 4])
def test_statistics_move_once_a_step_and_only_with_its_commit(micro_batch_size: int | None) -> None:
    task = batch_norm(micro_batch_size=micro_batch_size)
    rows = [slice(0, 7)] if micro_batch_size is None else [slice(0, 4), slice(4, 7)]
    start = buffers(task.model)
    expected = after(task.model, *(task.batch["x"][own] for own in rows))
    _, gradient = task.point.gradient()
    for part in task.samples.parts:
        task.samples.evaluate(part)
    with task.point.linearize() as operator:
        operator.product(0, 0, torch.ones(task.blocks[0].size).double())
    task.point.loss_at(gradient)
    assert_buffers(task.model, start)
    task.point.commit(None)
    assert_buffers(task.model, expected)


def test_a_commit_adds_the_update_to_the_parameters_in_place() -> None:
    task = Regression()
    before = [block.values() for block in task.blocks]
    places = [param.data_ptr() for param in task.model.parameters()]
    update = [torch.randn_like(value) for value in before]
    task.point.loss_at([2 * change for change in update])
    task.point.commit(update)
    for block, value, change in zip(task.blocks, before, update, strict=True):
        assert torch.equal(block.values(), value + change)
    assert [param.data_ptr() for param in task.model.parameters()] == places


# --- work --------------------------------------------------------------------------------------------


def test_work_is_counted_in_passes_and_samples() -> None:
    task = Regression(micro_batch_size=3)
    _, gradient = task.point.gradient()
    task.point.loss_at(gradient)
    task.point.loss_at(gradient)
    work = task.samples.ledger.work
    assert (work.num_gradients, work.gradient_samples) == (1, 7)
    assert (work.num_evaluations, work.evaluated_samples) == (2, 14)
    assert (work.num_linearizations, work.linearized_samples) == (0, 0)


def test_other_samples_have_the_same_blocks_ledger_and_way_to_the_curvature() -> None:
    task = Regression()
    other = task.point.on(take(task.batch, 0, 3), Share(3, 3))
    assert batch_size(other.samples.batch) == 3
    assert other.blocks is task.point.blocks
    assert other.samples.ledger is task.samples.ledger
    assert other.linearizer is task.point.linearizer
