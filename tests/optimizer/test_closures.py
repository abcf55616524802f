"""The ways in which trainers call ``step``."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blockhf import BlockHF, Closure, blocks
from optimizer_tasks import Factory, Task, values

Call = Callable[[BlockHF, Task], Tensor]

# Each pair is the same step.
OF_NO_ARGUMENTS: dict[str, Call] = {
    "positional": lambda optimizer, task: optimizer.step(lambda: task.objective(task.batch)),
    "by name": lambda optimizer, task: optimizer.step(closure=lambda: task.objective(task.batch)),
    "a partial function": lambda optimizer, task: optimizer.step(
        closure=functools.partial(task.objective, task.batch)
    ),
}
WITH_A_BATCH: dict[str, Call] = {
    "objective and batch": lambda optimizer, task: optimizer.step(task.objective, task.batch),
    "by names": lambda optimizer, task: optimizer.step(objective=task.objective, batch=task.batch),
    "a closure with its batch": lambda optimizer, task: optimizer.step(Closure(task.objective, task.batch)),
    "the same by name": lambda optimizer, task: optimizer.step(closure=Closure(task.objective, task.batch)),
    "a trainer's hooks beside it": lambda optimizer, task: optimizer.step(
        closure=lambda: None, objective=task.objective, batch=task.batch
    ),
}


def after(factory: Factory, call: Call) -> tuple[Tensor, Any]:
    task = Task(num_samples=160)
    optimizer = factory(blocks.by_layer(task.model), damping=0.1)
    losses = [float(call(optimizer, task)) for _ in range(3)]
    assert losses[2] < losses[0]
    return values(task.model), optimizer.report


@pytest.mark.parametrize("calls", [OF_NO_ARGUMENTS, WITH_A_BATCH], ids=["no arguments", "with a batch"])
def test_all_ways_to_call_step_are_the_same_step(factory: Factory, calls: dict[str, Call]) -> None:
    first, *others = [after(factory, call) for call in calls.values()]
    for other in others:
        assert torch.equal(first[0], other[0])
        assert first[1].work == other[1].work


def test_samples_are_held_out_of_a_closure_with_its_batch_alone() -> None:
    with_batch, without = (
        after(BlockHF, call)[1]
        for call in (WITH_A_BATCH["a closure with its batch"], OF_NO_ARGUMENTS["positional"])
    )
    assert with_batch.loss_before is not None
    assert without.loss_before is None


def test_a_closure_with_its_batch_is_a_closure_for_others_too() -> None:
    task = Task()
    closure = Closure(task.objective, task.batch)
    assert torch.equal(closure()[1], task.objective(task.batch)[1])


def test_hooks_that_come_as_a_closure_are_called_once() -> None:
    task, called = Task(), []
    optimizer = BlockHF(blocks.by_layer(task.model))
    optimizer.step(task.objective, task.batch, closure=lambda: called.append(1))
    assert called == [1]


def test_schedulers_that_wrap_step_pass_all_of_it_on(factory: Factory) -> None:
    task, twin = Task(num_samples=64), Task(num_samples=64)
    optimizers = [factory(blocks.by_layer(own.model), damping=0.1, lr=1.0) for own in (task, twin)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5)
    for number in range(3):
        optimizers[0].step(closure=Closure(task.objective, task.batch))
        scheduler.step()
        for group in optimizers[1].param_groups:
            group["lr"] = 0.5**number
        optimizers[1].step(twin.objective, twin.batch)
    assert torch.equal(values(task.model), values(twin.model))


def test_a_closure_that_calls_backward_is_told_what_to_leave_out() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.by_layer(task.model))
    before = copy.deepcopy(task.model.state_dict())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = task.objective(task.batch)[1]
        loss.backward()
        return loss

    with pytest.raises(
        ValueError, match=r"calls backward\(\) itself\. Leave that, and zero_grad\(\), to the"
    ):
        optimizer.step(closure)
    with pytest.raises(
        ValueError, match=r"Leave out detach\(\), \.data, torch\.no_grad\(\) and backward\(\)"
    ):
        optimizer.step(lambda: closure().detach())  # as trainers that call backward() themselves do
    assert all(torch.equal(own, before[name]) for name, own in task.model.state_dict().items())
