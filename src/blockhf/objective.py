"""The objective's contract: what the user's function returns, and how that is checked.

An objective is the user's own code. It takes a batch and returns the outputs and the loss::

    def objective(batch):
        inputs, targets = batch
        outputs = model(inputs)                             # J is taken of these ...
        return outputs, F.cross_entropy(outputs, targets)   # ... and H of this, with respect to them
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from blockhf._torch import differentiates_once
from blockhf.batches import batch_size, tensors_of

Objective = Callable[..., Any]
Reduction = Literal["mean", "sum"] | Callable[[Any], Any]
"""Mean or sum over samples, or a weighted mean whose total weight a function of the batch gives."""

_WRITE = "Write `return outputs, loss`, where the loss is computed from the outputs."


@dataclass(frozen=True)
class Evaluation:
    """What an objective returned: its differentiable outputs, in a row, and its loss."""

    outputs: tuple[Tensor, ...]
    loss: Tensor
    num_samples: int | None = None
    reduction: Reduction = "mean"

    def detached(self) -> Evaluation:
        """The same values without their graph."""
        outputs = tuple(output.detach() for output in self.outputs)
        return replace(self, outputs=outputs, loss=self.loss.detach())


@dataclass(frozen=True)
class Closure:
    """An objective and its batch in one, for trainers that hand nothing but a closure to ``step``.

    ``step(Closure(objective, batch))`` is ``step(objective, batch)``: samples are held out as ever, which an
    ordinary closure, whose samples are out of sight, does not allow.
    """

    objective: Objective
    batch: Any
    curvature_batch: Any = None

    def __call__(self) -> Any:
        return self.objective(self.batch)


def what_to_step(
    objective: Any, batch: Any, curvature_batch: Any, closure: Callable[[], Any] | None
) -> tuple[Any, Any, Any]:
    """Objective, batch and curvature batch of a step, from its arguments."""
    if objective is None:
        objective = closure
    elif closure is not None:
        closure()  # a trainer's hooks
    if not isinstance(objective, Closure):
        return objective, batch, curvature_batch
    if batch is not None or curvature_batch is not None:
        raise ValueError("The Closure has its batch already: pass step(closure), or step(objective, batch).")
    return objective.objective, objective.batch, objective.curvature_batch


def evaluate(objective: Objective, batch: Any = None) -> Evaluation:
    """Call the objective and check what comes back.

    ``batch=None`` calls it without arguments, which is torch's closure convention.
    """
    check_objective(objective)
    given = () if batch is None else (batch,)
    try:
        returned = objective(*given)
    except TypeError as error:
        if (hint := _wrong_arguments(objective, given)) is None:
            raise
        raise TypeError(hint) from error
    if isinstance(returned, Tensor):
        outputs, loss = None, returned
    elif isinstance(returned, tuple) and len(returned) == 2:
        outputs, loss = returned
    else:
        raise ValueError(f"The objective returned a {type(returned).__name__}, not a pair. {_WRITE}")
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"The objective's loss is a {type(loss).__name__}, not a tensor, so it has no gradient. "
            "Leave out .item() and float()."
        )
    if loss.numel() != 1:
        swapped = isinstance(outputs, Tensor) and outputs.dim() == 0
        raise ValueError(
            f"The objective's loss has shape {tuple(loss.shape)}, but must be one number. "
            + (
                "Outputs and loss are swapped: the outputs come first."
                if swapped
                else "Write loss.mean(), or loss.sum() together with reduction='sum'."
            )
        )
    if loss.is_complex():
        raise ValueError(
            f"The objective's loss is of {loss.dtype}, but must be a real number. Write loss.abs() or "
            "loss.real."
        )
    if any(tensor.is_complex() and tensor.requires_grad for tensor in tensors_of(outputs)):
        raise ValueError(
            "An output is complex, and its curvature is not defined here. Return "
            "torch.view_as_real(outputs), and compute the loss from that."
        )
    tensors = tuple(
        tensor for tensor in tensors_of(outputs) if tensor.is_floating_point() and tensor.requires_grad
    )
    num_samples = None if batch is None else batch_size(batch)
    return Evaluation(tensors, loss.reshape(()), num_samples)


def check_objective(objective: Any) -> None:
    """Raise unless it can be called."""
    if objective is None:
        raise ValueError(
            "step() was called without an objective. The optimizer does not read .grad: it evaluates the "
            "loss itself, several times. Pass step(objective, batch), or step(closure) with a closure that "
            "returns outputs and loss and does not call backward()."
        )
    if not callable(objective):
        raise ValueError(
            f"The objective is a {type(objective).__name__}, which cannot be called. Pass the function that "
            "returns outputs and loss, not what it returns: optimizer.step(objective, batch)."
        )


def _wrong_arguments(objective: Objective, given: tuple[Any, ...]) -> str | None:
    """What to say where a call failed because the objective takes other arguments than those given."""
    try:
        signature = inspect.signature(objective)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*given)
    except TypeError as error:
        remedy = (
            "The batch is passed as one argument, whatever it holds: write `def objective(batch):` and "
            "`inputs, targets = batch` in it. An objective of no arguments goes with step(objective)."
            if given
            else "Give the batch to it: step(objective, batch)."
        )
        number = "1 argument" if given else "no argument"
        return f"The objective is called with {number}, and its own are {signature}: {error}. {remedy}"
    return None


def check_derivatives(evaluation: Evaluation) -> None:
    """Raise where a second derivative of the loss would be zero in silence."""
    if evaluation.loss.requires_grad:
        _check_once(evaluation, _ancestors(evaluation.loss), twice_in_loss=True)


def _check_once(evaluation: Evaluation, behind_loss: set[tuple[Any, int]], *, twice_in_loss: bool) -> None:
    nodes = {evaluation.loss.grad_fn, *(node for node, _ in behind_loss)}
    once = [node for node in nodes if differentiates_once(node)]
    if not once:
        return
    network = {node for output in evaluation.outputs for node, _ in {*_ancestors(output), _edge(output)}}
    for node in once:
        if node in network:
            where = "the network"
            remedy = "write it out in operations that torch can differentiate twice"
        elif twice_in_loss:
            where, remedy = "the loss", "use curvature=EmpiricalFisher()"
        else:
            continue
        name = type(node).__name__.removesuffix("Backward")
        raise ValueError(
            f"An operation of {where} cannot be differentiated twice ({name} is marked with "
            f"once_differentiable): {remedy}, or leave out the mark where its derivative is differentiable."
        )


def check_outputs(evaluation: Evaluation, *, twice_in_loss: bool = True) -> None:
    """Raise unless the loss is a function of the outputs and no output is one of another output.

    Without that, the derivatives of the loss with respect to the outputs are not what they seem.

    Args:
        evaluation: What the objective returned.
        twice_in_loss: Whether the loss will be differentiated twice by the outputs.
    """
    outputs, loss = evaluation.outputs, evaluation.loss
    check_any_outputs(len(outputs))
    edges = [_edge(output) for output in outputs]
    behind_loss = _ancestors(loss) if loss.requires_grad else set()
    if not behind_loss.intersection(edges):
        raise ValueError(
            "The loss does not depend on the outputs through the graph: it was computed from other "
            "tensors, or from a detached or re-computed copy. " + _WRITE
        )
    if len(outputs) > 1:
        for i, output in enumerate(outputs):
            if edges.count(edges[i]) > 1 or not _ancestors(output).isdisjoint(edges):
                raise ValueError(
                    f"Output {i}, of shape {tuple(output.shape)}, is computed from another output. Return "
                    "only those tensors from which the loss is computed at last, e.g. the logits; where the "
                    "loss needs both, return x.clone() of the earlier one and compute the loss from the "
                    "clone."
                )
    _check_once(evaluation, behind_loss, twice_in_loss=twice_in_loss)


def check_any_outputs(number: int) -> None:
    """Raise where an objective has none, which is known without looking at its graph."""
    if number == 0:
        raise ValueError(
            "The objective gave no outputs that can be differentiated, so there is nothing to take J of. A "
            f"closure for torch.optim.LBFGS returns the loss alone; here outputs come with it. {_WRITE}"
        )


def num_nodes(evaluation: Evaluation) -> int:
    """The length of the loss's graph."""
    return len({node for node, _ in _ancestors(evaluation.loss)})


def identity(objective: Any) -> Hashable:
    """What an objective computes with, as far as it tells: its code and what its closure holds.

    A function that is defined anew for each step, around the same model, has the same identity. Numbers that
    are not whole are left out: they change from step to step and say nothing about the work.

    >>> def make(scale):
    ...     return lambda: scale
    >>> identity(make(0.1)) == identity(make(0.2)), identity(make(1)) == identity(make(2))
    (True, False)
    """
    if isinstance(objective, functools.partial):
        held = (*objective.args, *objective.keywords.values())
        return (identity(objective.func), *map(_held, held))
    if isinstance(objective, types.MethodType):
        return (objective.__func__.__code__, id(objective.__self__))
    if isinstance(objective, types.FunctionType):
        cells = [_contents(cell) for cell in objective.__closure__ or ()]
        return (objective.__code__, *map(_held, cells), *map(_held, objective.__defaults__ or ()))
    return id(objective)


def modules_in(objective: Any) -> list[nn.Module]:
    """The modules that an objective refers to: in its closure, among its globals, as its ``self``.

    A module whose methods are called, and not the module itself, is found in no other way.
    """
    found: dict[nn.Module, None] = {}
    seen: set[int] = set()
    todo: list[Any] = [objective]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found.update(dict.fromkeys(value.modules()))
        elif isinstance(value, functools.partial):
            todo += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.MethodType):
            owner = value.__self__
            todo += [
                value.__func__,
                owner,
                *(own for own in _attributes(owner) if isinstance(own, nn.Module)),
            ]
        elif isinstance(value, types.FunctionType) and not (value.__module__ or "").startswith("torch"):
            names = [name for name in value.__code__.co_names if name in value.__globals__]
            todo += [_contents(cell) for cell in value.__closure__ or ()]
            todo += [value.__globals__[name] for name in names]
    return list(found)


def _attributes(owner: Any) -> list[Any]:
    try:
        return list(vars(owner).values())
    except TypeError:
        return []


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


def _held(value: Any) -> Hashable:
    if isinstance(value, (bool, int, str, type(None))):
        return value
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.requires_grad)
    if isinstance(value, nn.Module):
        return id(value)
    if isinstance(value, (functools.partial, types.FunctionType, types.MethodType)):
        return identity(value)
    return type(value).__qualname__


def _edge(tensor: Tensor) -> tuple[Any, int]:
    """The place of ``tensor`` in the graph: the node that made it and the number among its results."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _ancestors(tensor: Tensor) -> set[tuple[Any, int]]:
    """The edges of the graph behind ``tensor``, its own not among them."""
    found: set[tuple[Any, int]] = set()
    seen, todo = set(), [_edge(tensor)[0]]
    while todo:
        for edge in todo.pop().next_functions:
            node = edge[0]
            if node is not None:
                found.add(edge)
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
    return found
