"""The objective's contract: batches and their parts, random numbers, buffers, and a step's questions."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockhf.blocks import Block
from blockhf.objective import (
    Evaluation,
    IsolatedBuffers,
    Part,
    Problem,
    RandomState,
    batch_size,
    check_outputs,
    evaluate,
    take,
    tensors_of,
)

X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)

# --- batches -----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    inputs: Tensor
    targets: Any


class Encoding(UserDict[str, Any]):
    """Like the batch of a tokenizer: a mapping with attributes beside its items."""

    def __init__(self, data: dict[str, Any], encodings: str = "kept") -> None:
        super().__init__(data)
        self.encodings = encodings


class Output(OrderedDict[str, Any]):
    """Like the outputs of the transformers library, which refuse ``update``."""

    def update(self, *_: Any) -> None:  # type: ignore[override]
        raise RuntimeError("no update")


class Foreign(MutableMapping[str, Any]):
    """A mapping whose shallow copy shares its items."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


def defaulting(items: dict[str, Any]) -> Any:
    made: defaultdict[str, Any] = defaultdict(list)
    made.update(items)
    return made


Loose = namedtuple("Loose", ["a", "b"])

BATCHES: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "tensor": lambda cut: cut(X),
    "tuple": lambda cut: (cut(X), cut(Y)),
    "list": lambda cut: [cut(X), cut(Y)],
    "named tuple": lambda cut: Pair(cut(X), cut(Y)),
    "untyped named tuple": lambda cut: Loose(cut(X), None),
    "dict": lambda cut: {"x": cut(X), "y": cut(Y)},
    "ordered dict": lambda cut: Output(x=cut(X), y=cut(Y)),
    "default dict": lambda cut: defaulting({"x": cut(X)}),
    "tokenizer's batch": lambda cut: Encoding({"ids": cut(X), "mask": None}, encodings="other"),
    "nesting": lambda cut: ({"x": [cut(X), Pair(cut(Y), (cut(X),))]}, {}, (), cut(Y)),
    "None, numbers and strings inside": lambda cut: (cut(X), None, 0.5, 7, "text", torch.tensor(2.0)),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if hasattr(a, "keys"):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a) and vars_of(a) == vars_of(b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def vars_of(mapping: Any) -> Any:
    return getattr(mapping, "encodings", None)


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
def test_a_part_of_a_batch_has_the_same_nesting_with_fewer_samples(make: Callable[..., Any]) -> None:
    batch = make(lambda tensor: tensor)
    assert batch_size(batch) == 6
    assert same(take(batch, 1, 4), make(lambda tensor: tensor[1:4]))
    assert same(batch, make(lambda tensor: tensor))  # the batch itself stays whole


@pytest.mark.parametrize("wrap", [Foreign, MappingProxyType])
def test_a_mapping_that_cannot_be_copied_is_parted_into_a_dict(wrap: Callable[..., Any]) -> None:
    batch = wrap({"x": X, "scale": 0.5})
    part = take(batch, 0, 2)
    assert same(part, {"x": X[:2], "scale": 0.5})
    assert torch.equal(batch["x"], X)


def test_tensors_of_a_nest_come_in_order() -> None:
    nest = {"a": (X, None, [Y]), "b": Encoding({"c": X}), "d": 3}
    assert [id(tensor) for tensor in tensors_of(nest)] == [id(X), id(Y), id(X)]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        pytest.param({}, "The batch holds no tensor with a sample dimension. Pass tensors", id="empty dict"),
        pytest.param((None, 3), "The batch holds no tensor with a sample dimension.", id="no tensor"),
        pytest.param(torch.tensor(1.0), "The batch holds no tensor with a sample dimension.", id="a number"),
        pytest.param(
            (X, Y[:4]),
            "The tensors of the batch have different first dimensions: 4, 6. Put the samples first",
            id="different sizes",
        ),
        pytest.param((X[:0], Y[:0]), "The batch is empty.", id="no samples"),
    ],
)
def test_a_batch_without_a_sample_dimension_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^" + re.escape(message)):
        batch_size(batch)


# --- what an objective returns -----------------------------------------------------------------------


def weight() -> Tensor:
    return torch.tensor([1.0, -2.0], requires_grad=True)


def test_outputs_are_the_differentiable_tensors_of_any_nest_in_order() -> None:
    w = weight()
    first, second = w * 2, w.sum()
    nest = {"logits": first, "hidden": [w.detach(), None], "labels": Y, "more": (second,)}
    evaluation = evaluate(lambda batch: (nest, (first.sum() + second).view(1)), X)
    assert evaluation.outputs[0] is first
    assert evaluation.outputs[1] is second
    assert len(evaluation.outputs) == 2
    assert (evaluation.loss.shape, evaluation.num_samples) == ((), 6)


def test_the_loss_alone_is_an_objective_without_outputs() -> None:
    evaluation = evaluate(lambda: weight().sum())
    assert (evaluation.outputs, evaluation.num_samples) == ((), None)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        pytest.param(None, "The objective returned a NoneType, not a pair. Write `return outputs", id="None"),
        pytest.param(1.5, "The objective returned a float, not a pair.", id="a number"),
        pytest.param((X, X.sum(), Y), "The objective returned a tuple, not a pair.", id="a triple"),
        pytest.param([X, X.sum()], "The objective returned a list, not a pair.", id="a list"),
        pytest.param((X, 2.0), "The objective's loss is a float, not a tensor, so it has no", id="item"),
        pytest.param((X, X), "The objective's loss has shape (6, 2), but must be one number.", id="matrix"),
        pytest.param(X[:, 0], "The objective's loss has shape (6,), but must be one number.", id="vector"),
    ],
)
def test_a_return_value_of_the_wrong_kind_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^" + re.escape(message)):
        evaluate(lambda: returned)


def check(*outputs: Tensor, loss: Tensor) -> None:
    check_outputs(Evaluation(outputs, loss))


def test_outputs_beside_each_other_pass_the_check() -> None:
    w = weight()
    both = w * 2
    check(both, loss=both.sum())
    check(both, w.exp(), loss=(both * w.exp()).sum() + both.sum())
    check(w, loss=w.sum())
    left, right = both.split(1)
    check(left, right, loss=(left * right).sum())


def test_outputs_that_the_loss_does_not_come_from_are_refused() -> None:
    w = weight()
    output = w * 2
    for loss in ((w * 2).sum(), output.detach().sum(), output.detach().requires_grad_().sum()):
        with pytest.raises(ValueError, match=r"^The loss does not depend on the outputs through the graph"):
            check(output, loss=loss)


def test_no_output_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^The objective gave no outputs that can be differentiated"):
        check(loss=weight().sum())


def test_an_output_computed_from_another_is_refused_by_its_number() -> None:
    w = weight()
    hidden = w * 2
    logits = hidden.exp().sum().view(1)
    with pytest.raises(ValueError, match=r"^Output 1, of shape \(1,\), is computed from another"):
        check(hidden, logits, loss=logits.sum())
    with pytest.raises(ValueError, match=r"^Output 0, of shape \(2,\), is computed from another"):
        check(hidden, hidden, loss=hidden.sum())


# --- random numbers ----------------------------------------------------------------------------------


def test_a_replay_draws_the_same_numbers_and_leaves_the_stream_where_it_was() -> None:
    torch.manual_seed(0)
    state = RandomState([torch.device("cpu")])
    first = torch.rand(3)
    with state.replayed():
        again = torch.rand(3)
        torch.rand(100)
    after = torch.rand(3)

    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(3))
    assert torch.equal(again, first)
    assert torch.equal(after, torch.rand(3))


def test_a_replay_that_fails_leaves_the_stream_where_it_was() -> None:
    state = RandomState([torch.device("cpu"), torch.device("meta")])
    torch.rand(5)
    outside = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), state.replayed():
        torch.rand(2, 2) @ torch.rand(3, 3)
    assert torch.equal(torch.get_rng_state(), outside)


def test_a_part_draws_afresh_once_and_the_same_numbers_ever_after() -> None:
    torch.manual_seed(0)
    part = Part(lambda: torch.rand(()).requires_grad_(), None, 1.0, [torch.device("cpu")])
    first = part.evaluate().loss
    between = torch.get_rng_state()
    torch.rand(9)
    moved = torch.get_rng_state()
    assert part.evaluate().loss == first
    assert part.evaluate().loss == first
    assert torch.equal(torch.get_rng_state(), moved)
    torch.manual_seed(0)
    torch.rand(())
    assert torch.equal(torch.get_rng_state(), between)  # as if no one had watched


# --- buffers -----------------------------------------------------------------------------------------


class Replacing(nn.Module):
    """Puts a new tensor in the place of its buffer, as ``self.mean = …`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return x


class Growing(nn.Module):
    """Keeps what it has seen, in a buffer of another size each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x])
        return x


class Forgetful(nn.Module):
    """Deletes one buffer and empties another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.ones(2))
        self.register_buffer("second", torch.ones(2))
        self.register_buffer("third", None)

    def forward(self, x: Tensor) -> Tensor:
        del self.first
        self.second = None
        return x


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "writing": norm,
    "replacing": Replacing,
    "growing": Growing,
    "counting twice a pass": lambda: nn.Sequential(*[shared := nn.BatchNorm1d(2), shared]),
}
each_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_buffers(module: nn.Module, expected: dict[str, Tensor]) -> None:
    now = dict(module.named_buffers())
    assert list(now) == list(expected)
    assert all(torch.equal(now[name], expected[name]) for name in expected)


def after(module: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """The buffers that ordinary passes over ``inputs`` lead to."""
    twin = copy.deepcopy(module)
    for x in inputs:
        twin(x)
    return buffers(twin)


@each_module
def test_buffers_are_as_before_unless_committed(make: Callable[[], nn.Module]) -> None:
    module = make()
    before, places = buffers(module), [id(buffer) for buffer in module.buffers()]
    with IsolatedBuffers():
        module(X)
        assert {name: buffer.tolist() for name, buffer in module.named_buffers()} != {
            name: buffer.tolist() for name, buffer in before.items()
        }
    assert_buffers(module, before)
    assert [id(buffer) for buffer in module.buffers()] == places


@each_module
def test_a_commit_makes_the_buffers_those_of_an_ordinary_pass(make: Callable[[], nn.Module]) -> None:
    module = make()
    expected = after(module, X, X + 1)
    with IsolatedBuffers() as isolated:
        module(X)
        module(X + 1)
    isolated.commit()
    assert_buffers(module, expected)
    assert not any(buffer.requires_grad for buffer in module.buffers())


def test_a_commit_writes_into_the_very_tensors_that_were_there() -> None:
    for module in (norm(), Replacing()):
        places = [buffer.data_ptr() for buffer in module.buffers()]
        with IsolatedBuffers() as isolated:
            module(X)
        isolated.commit()
        assert [buffer.data_ptr() for buffer in module.buffers()] == places


@each_module
def test_a_second_use_starts_anew(make: Callable[[], nn.Module]) -> None:
    module = make()
    isolated = IsolatedBuffers()
    with isolated:
        module(X)
    before = buffers(module)
    expected = after(module, X + 1)
    with isolated:
        module(X + 1)
    assert_buffers(module, before)
    isolated.commit()
    assert_buffers(module, expected)


@pytest.mark.parametrize(("inner_commits", "outer_commits"), [(a, b) for a in (0, 1) for b in (0, 1)])
@each_module
def test_isolation_nests(make: Callable[[], nn.Module], inner_commits: bool, outer_commits: bool) -> None:
    module = make()
    inputs = [X, X + 1] if inner_commits else [X]
    expected = after(module, *inputs) if outer_commits else buffers(module)
    with IsolatedBuffers() as outer:
        module(X)
        within = buffers(module)
        with IsolatedBuffers() as inner:
            module(X + 1)
        assert_buffers(module, within)
        if inner_commits:
            inner.commit()
    if outer_commits:
        outer.commit()
    assert_buffers(module, expected)


@each_module
def test_a_module_first_met_inside_two_isolations_is_isolated_by_both(make: Callable[[], nn.Module]) -> None:
    module = make()
    before = buffers(module)
    with IsolatedBuffers() as outer:
        with IsolatedBuffers():
            module(X)
        assert_buffers(module, before)
    outer.commit()
    assert_buffers(module, before)


def test_buffers_are_as_before_when_a_module_raises() -> None:
    module = nn.Sequential(norm(), nn.Linear(3, 1))  # the second does not fit
    before = buffers(module)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), IsolatedBuffers():
        module(X)
    assert_buffers(module, before)
    expected = after(module[0], X)
    module[0](X)  # nothing listens any more
    assert_buffers(module[0], expected)


def test_buffers_that_a_module_deletes_or_empties_come_back() -> None:
    module = Forgetful()
    with IsolatedBuffers():
        module(X)
    assert module.first.tolist() == module.second.tolist() == [1, 1]
    assert module.third is None


def test_an_ensemble_by_vmap_keeps_its_buffers() -> None:
    members = [norm().eval() for _ in range(3)]
    params, stacked = torch.func.stack_module_state(members)  # type: ignore[arg-type]
    base = copy.deepcopy(members[0])
    before = buffers(base)

    def call(params: Any, buffers: Any) -> Tensor:
        return torch.func.functional_call(base, (params, buffers), (X,))

    with IsolatedBuffers() as isolated:
        outputs = torch.vmap(call)(params, stacked)
    isolated.commit()
    torch.testing.assert_close(outputs, torch.stack([member(X) for member in members]))
    assert_buffers(base, before)


# --- a problem: the objective during one step --------------------------------------------------------


class Task:
    """A small regression in float64 with what a model may have: BatchNorm, dropout, a frozen layer."""

    def __init__(self, *layers: nn.Module, reduction: Any = "mean", **options: Any) -> None:
        torch.manual_seed(0)
        default = (nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.model = nn.Sequential(*(layers or default)).double()
        self.batch = {"x": torch.randn(7, 3).double(), "y": torch.randn(7, 2).double(), "scale": 1.5}
        self.reduction = reduction
        blocks = [
            Block(name, tuple(module.parameters()))
            for name, module in self.model.named_children()
            if any(True for _ in module.parameters())
        ]
        self.problem = Problem(self.objective, self.batch, blocks, reduction=reduction, **options)

    def objective(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        outputs = self.model(batch["x"]) * batch["scale"]
        squares = (outputs - batch["y"]).square().sum(1)
        return outputs, squares.mean() if self.reduction == "mean" else squares.sum()


def dropout(**options: Any) -> Task:
    return Task(nn.Linear(3, 40), nn.Dropout(0.5), nn.Linear(40, 2), **options)


def batch_norm(**options: Any) -> Task:
    return Task(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("size", [1, 3, 6, 7, 100])
def test_micro_batches_change_neither_loss_nor_gradient(size: int, reduction: str) -> None:
    whole, parted = Task(reduction=reduction), Task(reduction=reduction, micro_batch_size=size)
    (loss, gradient), (same_loss, same_gradient) = (
        whole.problem.differentiate(),
        parted.problem.differentiate(),
    )
    explicit = torch.autograd.grad(whole.objective(whole.batch)[1], list(whole.model.parameters()))
    torch.testing.assert_close(torch.cat(gradient), torch.cat([g.flatten() for g in explicit]))
    torch.testing.assert_close(same_loss, loss)
    torch.testing.assert_close(torch.cat(same_gradient), torch.cat(gradient))
    update = [torch.ones_like(g) for g in gradient]
    torch.testing.assert_close(parted.problem.loss_at(update), whole.problem.loss_at(update))


def test_the_parts_cover_the_batch_in_order_and_weigh_what_they_hold() -> None:
    problem = Task(micro_batch_size=3).problem
    assert torch.equal(torch.cat([part.batch["x"] for part in problem.parts]), problem.batch["x"])
    assert [batch_size(part.batch) for part in problem.parts] == [3, 3, 1]
    assert [part.weight for part in problem.parts] == [3 / 7, 3 / 7, 1 / 7]
    assert [part.weight for part in Task(micro_batch_size=3, reduction="sum").problem.parts] == [1, 1, 1]


def test_a_batch_that_fits_is_passed_on_as_it_is() -> None:
    problem = Task(micro_batch_size=7).problem
    assert problem.parts[0].batch is problem.batch


def test_curvature_parts_stand_for_the_whole_batch() -> None:
    mean = Task(curvature_batch=4, micro_batch_size=3).problem
    assert [batch_size(part.batch) for part in mean.curvature_parts()] == [3, 1]
    assert [part.weight for part in mean.curvature_parts()] == [3 / 4, 1 / 4]
    total = Task(curvature_batch=4, micro_batch_size=3, reduction="sum").problem
    assert [part.weight for part in total.curvature_parts()] == [7 / 4, 7 / 4]
    assert torch.equal(mean.curvature_parts()[1].batch["x"], mean.batch["x"][3:4])


def test_a_curvature_batch_of_its_own_may_have_any_size() -> None:
    other = {"x": torch.zeros(9, 3).double(), "y": torch.zeros(9, 2).double(), "scale": 1.0}
    problem = Task(curvature_batch=other, reduction="sum").problem
    assert problem.num_curvature_samples == 9
    (part,) = problem.curvature_parts()
    assert part.batch is other
    assert part.weight == 7 / 9


@pytest.mark.parametrize(("asked", "expected"), [(None, 7), (3, 3), (7, 7), (50, 7)])
def test_no_more_curvature_samples_than_there_are(asked: int | None, expected: int) -> None:
    problem = Task(curvature_batch=asked).problem
    assert problem.num_curvature_samples == expected
    assert sum(batch_size(part.batch) for part in problem.curvature_parts()) == expected


def test_a_curvature_batch_without_a_batch_is_refused() -> None:
    task = Task()
    with pytest.raises(
        ValueError, match=r"^A curvature batch was given without a gradient batch. Give both."
    ):
        Problem(task.objective, None, task.problem.blocks, curvature_batch=task.batch)


def test_the_loss_elsewhere_is_that_of_moved_parameters_and_moves_nothing() -> None:
    task = Task()
    blocks = task.problem.blocks
    update = [torch.randn(block.size).double() for block in blocks]
    before = [param.detach().clone() for param in task.model.parameters()]
    places = [(param.data_ptr(), param._version) for param in task.model.parameters()]
    loss = task.problem.loss_at(update)

    assert not loss.requires_grad
    assert [(param.data_ptr(), param._version) for param in task.model.parameters()] == places
    assert all(map(torch.equal, task.model.parameters(), before))
    assert all(param.requires_grad and param.grad is None for param in task.model.parameters())
    for block, change in zip(blocks, update, strict=True):
        block.assign_(block.values() + change)
    torch.testing.assert_close(loss, task.objective(task.batch)[1].detach())


def test_an_objective_that_raises_elsewhere_leaves_the_parameters() -> None:
    w = weight()

    def objective() -> Tensor:
        if float(w[0].detach()) != 1.0:
            raise RuntimeError("too far")
        return w.sum()

    problem = Problem(objective, None, [Block("w", (w,))])
    with pytest.raises(RuntimeError, match="too far"):
        problem.loss_at([torch.ones(2)])
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

    problem = Problem(objective, X[1:5], [Block("w", (w,))], micro_batch_size=micro_batch_size)
    loss, _ = problem.differentiate()
    assert problem.loss_at([torch.zeros(2)]) == loss
    assert problem.loss_at([-w.detach()]) == 0


def test_an_evaluation_elsewhere_builds_no_graph() -> None:
    w = weight()
    graphs: list[bool] = []

    def objective() -> Tensor:
        graphs.append((w * 2).requires_grad)
        return (w**2).sum()

    problem = Problem(objective, None, [Block("w", (w,))])
    problem.differentiate()
    problem.loss_at([torch.ones(2)])
    assert graphs == [True, False]


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 3}], ids=["whole", "in parts"])
def test_dropout_is_the_same_in_the_gradient_and_elsewhere(options: dict[str, Any]) -> None:
    problem = dropout(**options).problem
    loss, gradient = problem.differentiate()
    zero = [torch.zeros_like(g) for g in gradient]
    assert problem.loss_at(zero) == loss
    assert problem.loss_at(zero) == loss


def test_dropout_is_the_same_in_the_gradient_and_the_curvature() -> None:
    problem = dropout(curvature_batch=7, micro_batch_size=3).problem
    problem.differentiate()
    losses = [part.evaluate().loss.item() for part in problem.parts]
    assert [problem.linearizable(part).loss.item() for part in problem.curvature_parts()] == losses


def test_statistics_move_once_a_step_and_only_with_its_commit() -> None:
    for options, inputs in [({}, [slice(0, 7)]), ({"micro_batch_size": 4}, [slice(0, 4), slice(4, 7)])]:
        task = batch_norm(**options)
        problem = task.problem
        start = buffers(task.model)
        expected = after(task.model, *(task.batch["x"][rows] for rows in inputs))
        _, gradient = problem.differentiate()
        for part in problem.curvature_parts():
            problem.linearizable(part)
        problem.loss_at(gradient)
        assert_buffers(task.model, start)
        problem.commit(None)
        assert_buffers(task.model, expected)


def test_a_commit_adds_the_update_to_the_parameters_in_place() -> None:
    task = Task()
    before = [block.values() for block in task.problem.blocks]
    places = [param.data_ptr() for param in task.model.parameters()]
    update = [torch.randn_like(value) for value in before]
    task.problem.loss_at([2 * change for change in update])
    task.problem.commit(update)
    for block, value, change in zip(task.problem.blocks, before, update, strict=True):
        assert torch.equal(block.values(), value + change)
    assert [param.data_ptr() for param in task.model.parameters()] == places


def test_the_gradient_pass_serves_as_the_linearization_where_it_saw_the_same_samples() -> None:
    problem = Task().problem
    problem.differentiate()
    (part,) = problem.curvature_parts()
    evaluation = problem.linearizable(part)
    assert problem.work.num_linearizations == 0
    torch.autograd.grad(evaluation.loss, evaluation.outputs, create_graph=True)  # its graph is still there
    problem.linearizable(part)
    assert problem.work.num_linearizations == 1  # it is given away once


@pytest.mark.parametrize("options", [{"curvature_batch": 3}, {"micro_batch_size": 4}], ids=str)
def test_other_samples_are_linearized_anew(options: dict[str, Any]) -> None:
    problem = Task(**options).problem
    problem.differentiate()
    for part in problem.curvature_parts():
        problem.linearizable(part)
    assert problem.work.num_linearizations == len(problem.curvature_parts())
    assert problem.work.linearized_samples == problem.num_curvature_samples


def test_work_is_counted_in_passes_and_samples() -> None:
    problem = Task(micro_batch_size=3).problem
    _, gradient = problem.differentiate()
    problem.loss_at(gradient)
    problem.loss_at(gradient)
    work = problem.work
    assert (work.num_gradients, work.gradient_samples) == (1, 7)
    assert (work.num_evaluations, work.evaluated_samples) == (2, 14)
    assert (work.num_linearizations, work.linearized_samples) == (0, 0)


def test_a_loss_cut_off_from_the_parameters_is_refused() -> None:
    task = Task()
    problem = Problem(lambda batch: task.objective(batch)[1].detach(), task.batch, task.problem.blocks)
    with pytest.raises(ValueError, match=r"^The loss does not depend on any parameter through the graph"):
        problem.differentiate()


def test_a_sparse_gradient_is_refused_with_its_block() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    problem = Problem(lambda batch: table(batch).sum(), Y[:3], [Block("words", (table.weight,))])
    with pytest.raises(ValueError, match=r"^A gradient of block 'words' is sparse.*sparse=False"):
        problem.differentiate()


def test_a_parameter_that_the_loss_does_not_use_has_gradient_zero() -> None:
    used, unused = weight(), weight()
    problem = Problem(lambda: (used**2).sum(), None, [Block("a", (used, unused))])
    assert problem.differentiate()[1][0].tolist() == [2, -4, 0, 0]


def test_attention_can_be_differentiated_twice_where_it_is_linearized() -> None:
    w = torch.randn(1, 1, 4, 8, requires_grad=True)

    def objective() -> tuple[Tensor, Tensor]:
        outputs = F.scaled_dot_product_attention(w, w, w)
        return outputs, outputs.square().sum()

    problem = Problem(objective, None, [Block("w", (w,))])
    problem.differentiate()
    evaluation = problem.linearizable(problem.parts[0])
    (slope,) = torch.autograd.grad(evaluation.loss, w, create_graph=True)
    assert torch.autograd.grad(slope.sum(), w)[0].isfinite().all()
