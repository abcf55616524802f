"""Torch's own generic checks of an optimizer, in our words, over all factories.

Torch keeps them beside its sources (``test/optim``, ``torch.testing._internal.common_optimizers``): valid and
invalid inputs, the right direction with and without schedulers, state, hooks, copies. ``CHECKS`` are those
that apply; ``LEFT_OUT`` lists the others with the reason.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from blockhf import BlockHF, blocks
from blockhf.methods import NamedMethods
from optimizer_tasks import FACTORIES, Factory, Task, equal, mlp, through_a_file, values

LEFT_OUT: dict[str, str] = {
    "foreach, fused and capturable agree with the plain loop": "there is one implementation",
    "differentiable": "a step through the optimizer has no meaning with conjugate gradients in it",
    "maximize": "not an option: the matrix has to be positive; give the loss the other sign",
    "complex parameters": "refused: only real parameters can be optimized (test_misuse)",
    "sparse gradients": "refused: build the layer with sparse=False (test_misuse)",
    "a step without gradients moves nothing": "gradients are the optimizer's own; .grad is not read",
    "a parameter twice is a warning": "refused: Name it once (test_misuse)",
    "a state of an older version loads": "refused in words; nothing is changed (test_misuse)",
    "grad scaler": "step takes an objective and no gradients; autocast works (test_goes_on)",
    "cycled momentum": "there is none: torch's schedulers say so, see NO_MOMENTUM",
}
"""Checks of torch's that do not apply."""


def fresh(factory: Factory, **options: Any) -> tuple[Task, BlockHF]:
    task = Task(num_samples=32)
    return task, factory(blocks.by_layer(task.model), damping=0.1, **options)


def steps(task: Task, optimizer: BlockHF, number: int = 1) -> None:
    for _ in range(number):
        optimizer.step(task.objective, task.batch)


def loss_of(task: Task) -> float:
    return float(task.objective(task.batch)[1].detach())


def goes_in_the_right_direction(factory: Factory) -> None:
    """Torch's problem: a square of a linear map of a matrix and a vector."""
    weight, bias = nn.Parameter(torch.randn(10, 5)), nn.Parameter(torch.randn(10))
    inputs = torch.randn(5)

    def objective() -> tuple[Tensor, Tensor]:
        outputs = weight.mv(inputs) + bias
        return outputs, outputs.square().sum()

    optimizer = factory([weight, bias], damping=0.1)
    first = float(objective()[1].detach())
    for _ in range(10):
        optimizer.step(objective)
    assert float(objective()[1].detach()) < first


def goes_in_the_right_direction_on_transposed_storage(factory: Factory) -> None:
    task = Task(num_samples=32)
    layer = task.model[0]
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    assert not layer.weight.is_contiguous()
    first, optimizer = loss_of(task), factory(blocks.by_layer(task.model), damping=0.1)
    steps(task, optimizer, 4)
    assert loss_of(task) < first
    assert not layer.weight.is_contiguous()


def an_lr_of_zero_moves_nothing(factory: Factory) -> None:
    task, optimizer = fresh(factory, lr=0.0)
    before = values(task.model)
    steps(task, optimizer, 2)
    assert torch.equal(values(task.model), before)


def groups_have_their_own_lr(factory: Factory) -> None:
    task = Task(num_samples=32)
    groups = blocks.by_layer(task.model)
    groups[0]["lr"] = 0.0
    optimizer = factory(groups, damping=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, *[optimizer.defaults["lr"]] * 2]
    before = values(task.model[0])
    steps(task, optimizer)
    assert torch.equal(values(task.model[0]), before)


def an_lr_may_be_a_tensor(factory: Factory) -> None:
    ends = []
    for lr in (0.5, torch.tensor(0.5), torch.tensor([0.5])):
        task, optimizer = fresh(factory, lr=lr)
        steps(task, optimizer, 2)
        ends.append(values(task.model))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def an_lr_of_two_numbers_is_refused(factory: Factory) -> None:
    with pytest.raises(ValueError, match=r"lr of block '0' is tensor\(.*\), but must be a number"):
        fresh(factory, lr=torch.tensor([0.1, 0.1]))


def a_bare_tensor_is_refused(factory: Factory) -> None:
    with pytest.raises(TypeError, match="should be an iterable of Tensors or dicts"):
        factory(nn.Parameter(torch.zeros(1)))


def a_parameter_in_two_groups_is_refused(factory: Factory) -> None:
    param = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="is in two blocks"):
        factory([{"params": param}, {"params": param}])


def names_are_for_all_or_none(factory: Factory) -> None:
    one, other = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    with pytest.raises(ValueError, match="with/without names"):
        factory([("weight", one), other])
    with pytest.raises(ValueError, match="with/without names"):
        factory([{"params": [one]}, {"params": [("weight", other)]}])


def it_can_be_printed(factory: Factory) -> None:
    task, optimizer = fresh(factory)
    steps(task, optimizer)
    assert "Parameter Group 2" in repr(optimizer)
    assert str(optimizer.report)


def defaults_changed_later_go_for_new_groups(factory: Factory) -> None:
    model = mlp()
    optimizer = factory([{"params": model[0].parameters()}])
    optimizer.defaults["lr"] = 0.25
    optimizer.add_param_group({"params": model[2].parameters()})
    assert optimizer.param_groups[0]["lr"] != 0.25
    assert optimizer.param_groups[1]["lr"] == 0.25


def a_group_added_in_mid_training_moves(factory: Factory) -> None:
    task = Task(num_samples=32)
    optimizer = factory(blocks.by_layer(task.model)[:2], damping=0.1)
    before = values(task.model[4])
    steps(task, optimizer)
    assert torch.equal(values(task.model[4]), before)
    optimizer.add_param_group(blocks.by_layer(task.model)[2])
    steps(task, optimizer)
    assert not torch.equal(values(task.model[4]), before)


def steps_are_counted(factory: Factory) -> None:
    task, optimizer = fresh(factory)
    steps(task, optimizer, 3)
    assert {int(own["step"]) for own in optimizer.state.values()} == {3}
    assert optimizer.report.step == 3
    assert len(optimizer.state) == 6


def gradients_are_cleared(factory: Factory) -> None:
    task, optimizer = fresh(factory)
    optimizer.direction(task.objective, task.batch)
    optimizer.zero_grad(set_to_none=False)
    assert all(not param.grad.any() for param in task.model.parameters())
    optimizer.zero_grad(set_to_none=True)
    assert all(param.grad is None for param in task.model.parameters())


def state_is_deterministic(factory: Factory) -> None:
    """Two runs from one state go on alike, and a state is not moved by later steps."""
    task, optimizer = fresh(factory)
    steps(task, optimizer, 2)
    saved, kept = optimizer.state_dict(), copy.deepcopy(optimizer.state_dict())
    other, twin = fresh(factory)
    other.model.load_state_dict(task.model.state_dict())
    twin.load_state_dict(copy.deepcopy(saved))
    for _ in range(2):
        steps(task, optimizer)
        steps(other, twin)
        assert torch.equal(values(task.model), values(other.model))
    assert equal({key: kept[key] for key in ("policies",)}, {"policies": saved["policies"]})


def state_loads_with_names_and_without(factory: Factory) -> None:
    ends = []
    for named in (True, False):
        task, optimizer = fresh(factory)
        steps(task, optimizer)
        other = Task(num_samples=32)
        layers = [other.model[i] for i in (0, 2, 4)]
        groups = [
            {"params": list(layer.named_parameters() if named else layer.parameters()), "name": str(2 * i)}
            for i, layer in enumerate(layers)
        ]
        twin = factory(groups, damping=0.1)
        other.model.load_state_dict(task.model.state_dict())
        twin.load_state_dict(optimizer.state_dict())
        steps(other, twin)
        ends.append(values(other.model))
    assert torch.equal(*ends)


def state_goes_through_a_file_of_weights_only(factory: Factory) -> None:
    task, optimizer = fresh(factory)
    steps(task, optimizer, 2)
    assert equal(through_a_file(optimizer.state_dict()), optimizer.state_dict())


def state_takes_the_type_of_the_parameters(factory: Factory) -> None:
    task, optimizer = fresh(factory, warm_start=0.5)
    steps(task, optimizer)
    single = mlp()
    twin = factory(blocks.by_layer(single), damping=0.1, warm_start=0.5)
    twin.load_state_dict(optimizer.state_dict())
    assert {own["direction"].dtype for own in twin.state.values()} == {torch.float32}
    assert {own["direction"].dtype for own in optimizer.state.values()} == {torch.float64}


def hooks_of_the_step_run_in_order(factory: Factory) -> None:
    task, optimizer = fresh(factory)
    calls: list[str] = []
    every = register_optimizer_step_pre_hook(lambda *_: calls.append("all, before"))
    before = optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    after = optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    try:
        steps(task, optimizer)
    finally:
        every.remove()
    assert calls == ["all, before", "before", "after"]
    before.remove()
    after.remove()
    steps(task, optimizer)
    assert len(calls) == 3


def a_pre_hook_changes_the_arguments(factory: Factory) -> None:
    task, optimizer = fresh(factory)
    seen = []

    def objective(batch: Any) -> Any:
        seen.append(len(batch[0]))
        return task.objective(batch)

    front = task.front(8)
    optimizer.register_step_pre_hook(lambda own, args, kwargs: ((args[0], objective, front), kwargs))
    steps(task, optimizer)
    assert set(seen) == {8}


def hooks_of_the_state_run(factory: Factory) -> None:
    task, optimizer = fresh(factory)
    steps(task, optimizer)
    calls: list[str] = []
    seen: list[Any] = []
    optimizer.register_state_dict_pre_hook(lambda own: calls.append("saving"))
    optimizer.register_state_dict_post_hook(lambda own, state: {**state, "note": "kept"})
    optimizer.register_load_state_dict_pre_hook(
        lambda own, state: {key: value for key, value in state.items() if key != "note"}
    )
    optimizer.register_load_state_dict_post_hook(lambda own: seen.append(own.policy_state["plan"].shared))
    state = optimizer.state_dict()
    assert state["note"] == "kept"
    steps(task, optimizer)
    optimizer.load_state_dict(state)
    assert calls == ["saving"]
    assert seen == [state["policies"]["plan"]["shared"]]


def a_hook_may_mend_a_state_before_it_is_checked(factory: Factory) -> None:
    task, optimizer = fresh(factory)
    steps(task, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["cg_progress"]

    def mend(own: Any, state: dict[str, Any]) -> dict[str, Any]:
        groups = [{"cg_progress": 0.0, **group} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(mend)
    optimizer.load_state_dict(state)
    assert {group["cg_progress"] for group in optimizer.param_groups} == {0.0}


def copies_keep_all_attributes(factory: Factory) -> None:
    task, optimizer = fresh(factory)
    steps(task, optimizer)
    optimizer.register_step_post_hook(print)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        public = {name for name in vars(optimizer) if not name.startswith("_")}
        assert public <= set(vars(other))
        assert equal(other.state_dict(), optimizer.state_dict())


def types_may_differ_by_block(factory: Factory) -> None:
    task = Task(num_samples=32)
    inputs, targets = task.batch
    task.model[0].float()

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        hidden = task.model[1](task.model[0](batch[0].float())).double()
        outputs = task.model[4](task.model[3](task.model[2](hidden)))
        return outputs, F.mse_loss(outputs, batch[1])

    optimizer = factory(blocks.by_layer(task.model), damping=0.1)
    before = [values(task.model[i]) for i in (0, 2, 4)]
    optimizer.step(objective, (inputs, targets))
    assert all(not torch.equal(values(task.model[i]), b) for i, b in zip((0, 2, 4), before, strict=True))
    assert task.model[0].weight.dtype == torch.float32


CHECKS: list[Callable[[Factory], None]] = [
    goes_in_the_right_direction,
    goes_in_the_right_direction_on_transposed_storage,
    an_lr_of_zero_moves_nothing,
    groups_have_their_own_lr,
    an_lr_may_be_a_tensor,
    an_lr_of_two_numbers_is_refused,
    a_bare_tensor_is_refused,
    a_parameter_in_two_groups_is_refused,
    names_are_for_all_or_none,
    it_can_be_printed,
    defaults_changed_later_go_for_new_groups,
    a_group_added_in_mid_training_moves,
    steps_are_counted,
    gradients_are_cleared,
    state_is_deterministic,
    state_loads_with_names_and_without,
    state_goes_through_a_file_of_weights_only,
    state_takes_the_type_of_the_parameters,
    hooks_of_the_step_run_in_order,
    a_pre_hook_changes_the_arguments,
    hooks_of_the_state_run,
    a_hook_may_mend_a_state_before_it_is_checked,
    copies_keep_all_attributes,
    types_may_differ_by_block,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_check_of_torch_holds(factory: Factory, check: Callable[[Factory], None]) -> None:
    check(factory)


def test_what_is_left_out_has_a_reason() -> None:
    assert all(LEFT_OUT.values())
    assert not set(LEFT_OUT) & {check.__name__.replace("_", " ") for check in CHECKS}


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, step_size=2, gamma=0.9),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "LinearLR": lambda o: schedulers.LinearLR(o, total_iters=4),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=6),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=6),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=2),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.95**epoch),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.95),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1.0, total_steps=8, cycle_momentum=False),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.1, 0.9, step_size_up=2, cycle_momentum=False),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=2),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, total_iters=2), schedulers.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, total_iters=2), schedulers.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_a_scheduler_sets_the_lr_that_steps_go_by(factory: Factory, make: Callable[[Any], Any]) -> None:
    task, optimizer = fresh(factory)
    scheduler, first, rates = make(optimizer), loss_of(task), []
    for _ in range(5):
        steps(task, optimizer)
        rates.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step(*[1.0] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else [])
    assert len(set(rates)) > 1
    assert loss_of(task) < first
    # Both go on from what was saved.
    other, twin = fresh(factory)
    follower = make(twin)
    other.model.load_state_dict(task.model.state_dict())
    twin.load_state_dict(through_a_file(optimizer.state_dict()))
    follower.load_state_dict(scheduler.state_dict())
    for own in (task, optimizer), (other, twin):
        steps(*own)
    assert torch.equal(values(task.model), values(other.model))


NO_MOMENTUM = "optimizer must support momentum or beta1 with `cycle_momentum` option enabled"


@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedulers.OneCycleLR(o, 1.0, total_steps=8),
        lambda o: schedulers.CyclicLR(o, 0.1, 0.9),
    ],
    ids=["OneCycleLR", "CyclicLR"],
)
def test_a_scheduler_that_cycles_momentum_is_told_that_there_is_none(
    factory: Factory, make: Callable[[Any], Any]
) -> None:
    task, optimizer = fresh(factory)
    with pytest.raises(ValueError, match=NO_MOMENTUM):
        make(optimizer)
    steps(task, optimizer)  # the attempt has left nothing behind that a step refuses


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.5)], ids=["mean", "exponential"])
def test_averages_of_the_model_follow_the_steps(factory: Factory, average: Any) -> None:
    task, optimizer = fresh(factory)
    averaged = AveragedModel(task.model, multi_avg_fn=average)
    visited = []
    for _ in range(3):
        steps(task, optimizer)
        averaged.update_parameters(task.model)
        visited.append(values(task.model))
    expected = sum(visited) / 3 if average is None else visited[0] / 4 + visited[1] / 4 + visited[2] / 2
    torch.testing.assert_close(values(averaged.module), expected)
    update_bn([task.batch[0]], averaged)


def test_the_factories_are_all_there_are() -> None:
    made = {name for name, own in vars(NamedMethods).items() if isinstance(own, classmethod)}
    # That of least squares has tests of its own: it wants residuals and batches without noise.
    assert made == {*FACTORIES, "least_squares"} - {"default"}
