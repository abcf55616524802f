"""The objective's contract: what the user's function returns, and how that is checked.

An objective is the user's own code. It takes a batch and returns the outputs and the loss::

    def objective(batch):
        inputs, targets = batch
        outputs = model(inputs)                             # J is taken of these ...
        return outputs, F.cross_entropy(outputs, targets)   # ... and H of this, with respect to them
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from blockhf.batches import batch_size, tensors_of

Objective = Callable[..., Any]
Reduction = Literal["mean", "sum"]

_WRITE = "Write `return outputs, loss`, where the loss is computed from the outputs."


@dataclass(frozen=True)
class Evaluation:
    """What an objective returned: its differentiable outputs, in a row, and its loss."""

    outputs: tuple[Tensor, ...]
    loss: Tensor
    num_samples: int | None = None
    reduction: Reduction = "mean"


def evaluate(objective: Objective, batch: Any = None) -> Evaluation:
    """Call the objective and check what comes back.

    ``batch=None`` calls it without arguments, which is torch's closure convention.
    """
    returned = objective() if batch is None else objective(batch)
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
        raise ValueError(
            f"The objective's loss has shape {tuple(loss.shape)}, but must be one number. "
            "Write loss.mean(), or loss.sum() together with reduction='sum'."
        )
    tensors = tuple(
        tensor for tensor in tensors_of(outputs) if tensor.is_floating_point() and tensor.requires_grad
    )
    num_samples = None if batch is None else batch_size(batch)
    return Evaluation(tensors, loss.reshape(()), num_samples)


def check_outputs(evaluation: Evaluation) -> None:
    """Raise unless the loss is a function of the outputs and no output is one of another output.

    Without that, the derivatives of the loss with respect to the outputs are not what they seem.
    """
    outputs, loss = evaluation.outputs, evaluation.loss
    if not outputs:
        raise ValueError(
            "The objective gave no outputs that can be differentiated, so there is nothing to take J of. "
            + _WRITE
        )
    edges = [_edge(output) for output in outputs]
    if not loss.requires_grad or not _ancestors(loss).intersection(edges):
        raise ValueError(
            "The loss does not depend on the outputs through the graph: it was computed from other "
            "tensors, or from a detached or re-computed copy. " + _WRITE
        )
    if len(outputs) > 1:
        for i, output in enumerate(outputs):
            if edges.count(edges[i]) > 1 or not _ancestors(output).isdisjoint(edges):
                raise ValueError(
                    f"Output {i}, of shape {tuple(output.shape)}, is computed from another output. Return "
                    "only those tensors from which the loss is computed at last, e.g. the logits."
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
