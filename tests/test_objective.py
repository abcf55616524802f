"""The objective's contract: what it returns, and what is known of it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockhf.objective import Evaluation, check_outputs, evaluate, identity, modules_in, num_nodes

X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)


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


# --- identity ----------------------------------------------------------------------------------------


def around(model: nn.Module, *held: Any) -> Callable[..., Any]:
    def objective(batch: Any) -> Any:
        return model(batch), held

    return objective


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)

    def objective(self, batch: Any) -> Tensor:
        return self.model(batch).sum()


MODEL, OTHER, TRAINER = nn.Linear(2, 1), nn.Linear(2, 1), Trainer()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(around(MODEL), around(MODEL), id="defined anew"),
        pytest.param(around(MODEL, None), around(MODEL, None), id="with what it holds"),
        pytest.param(TRAINER.objective, TRAINER.objective, id="a method"),
        pytest.param(
            functools.partial(evaluate, MODEL), functools.partial(evaluate, MODEL), id="a partial function"
        ),
    ],
)
def test_an_objective_that_is_made_anew_is_the_same(one: Any, other: Any) -> None:
    assert identity(one) == identity(other)
    assert hash(identity(one)) == hash(identity(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(around(MODEL), around(OTHER), id="another model"),
        pytest.param(TRAINER.objective, Trainer().objective, id="another object's method"),
        pytest.param(TRAINER.objective, around(MODEL), id="other code"),
        pytest.param(
            functools.partial(evaluate, MODEL), functools.partial(evaluate, OTHER), id="another argument"
        ),
    ],
)
def test_an_objective_of_another_model_or_code_is_another(one: Any, other: Any) -> None:
    assert identity(one) != identity(other)


def test_a_closure_tells_shapes_and_whole_numbers_apart_and_no_fractions() -> None:
    def make(held: Any) -> Callable[[], Any]:
        return lambda: held

    assert identity(make(0.1)) == identity(make(0.2))
    assert identity(make(1)) != identity(make(2))
    assert identity(make(torch.ones(2))) == identity(make(torch.zeros(2)))
    assert identity(make(torch.ones(2))) != identity(make(torch.ones(3)))
    assert identity(make(torch.ones(2))) != identity(make(torch.ones(2, requires_grad=True)))


def test_a_name_that_is_not_yet_assigned_is_no_error() -> None:
    def objective() -> Any:
        return later

    identity(objective)
    later = 1
    assert objective() == 1


def test_the_length_of_a_graph_counts_each_node_once() -> None:
    w = weight()
    both = w * 2
    assert num_nodes(Evaluation((), (both + both).sum())) == 3  # the sum's own node is not behind it


def test_modules_are_found_in_code_that_has_no_module() -> None:
    model = nn.Linear(2, 1)
    namespace: dict[str, Any] = {"model": model, "__name__": None}
    exec("def objective(batch):\n    return model(batch)", namespace)
    assert modules_in(namespace["objective"]) == [model]
