"""Recorded graphs of tensor operations: what depends on what, and whose memory may be written to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from blockhf._torch import MissingInTorchError, schema_of

_aten = torch.ops.aten


class TracingError(Exception):
    """The objective cannot be traced; the message says why."""


def dependent_on(graph: fx.Graph, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes whose values depend on ``sources``, through values or through memory they write to."""
    dependent = set(sources)
    while True:
        before = len(dependent)
        for node in graph.nodes:
            if node.op not in ("placeholder", "output") and not dependent.isdisjoint(node.all_input_nodes):
                dependent.add(node)
                if is_mutable(node):
                    for written in _written(node):
                        dependent.update(_memory(written))
        if len(dependent) == before:
            return dependent


def is_mutable(node: fx.Node) -> bool:
    schema = _schema(node)
    return schema is not None and bool(schema.is_mutable)


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation writes to."""
    names = {
        arg.name: i
        for i, arg in enumerate(_schema(node).arguments)
        if arg.alias_info and arg.alias_info.is_write
    }
    values = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for name, i in names.items()]
    return [value for value in values if isinstance(value, fx.Node)]


def _memory(node: fx.Node) -> list[fx.Node]:
    """``node`` and what it is a view of, up to where the memory was made."""
    chain = [node]
    while chain[-1].op == "call_function":
        schema = _schema(chain[-1])
        if schema is None or not schema.arguments or schema.arguments[0].alias_info is None:
            break
        base = chain[-1].args[0]
        if not isinstance(base, fx.Node):
            break
        chain.append(base)
    if chain[-1].op == "placeholder":
        raise TracingError(f"{node.target} writes into an input of the model")
    return chain


def _schema(node: fx.Node) -> Any:
    try:
        return schema_of(node.target)
    except MissingInTorchError as error:
        raise TracingError(str(error)) from error


_IN_PLACE = {
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.sub.Tensor: _aten.sub_.Tensor,
    _aten.mul.Tensor: _aten.mul_.Tensor,
    _aten.mul.Scalar: _aten.mul_.Scalar,
    _aten.div.Scalar: _aten.div_.Scalar,
}
_INTO = {
    _aten.tanh_backward.default: _aten.tanh_backward.grad_input,
    _aten.sigmoid_backward.default: _aten.sigmoid_backward.grad_input,
    _aten.threshold_backward.default: _aten.threshold_backward.grad_input,
}


def reuse_memory(graph: fx.Graph) -> None:
    """Let operations write into inputs that nobody else needs, and matrix products add to their sum.

    Only memory that an operation inside the graph made for its own result, and that has no other user, is
    written to, so neither residuals nor the vector change.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.kwargs:
            continue
        if node.target is _aten.add.Tensor:
            for total, product in (node.args, node.args[::-1]):
                if (
                    _is_spare(product, node)
                    and product.target is _aten.mm.default
                    and _same_shape(total, node)
                ):
                    spare = _is_spare(total, node)
                    node.target = _aten.addmm_.default if spare else _aten.addmm.default
                    node.args = (total, *product.args)
                    graph.erase_node(product)
                    break
        if node.target in _IN_PLACE and _is_spare(node.args[0], node):
            node.target = _IN_PLACE[node.target]
        elif node.target is _aten.add.Tensor and _is_spare(node.args[1], node):
            node.target, node.args = _aten.add_.Tensor, node.args[::-1]
        elif node.target in _INTO and _is_spare(node.args[0], node):
            node.target, node.kwargs = _INTO[node.target], {"grad_input": node.args[0]}


def _is_spare(value: Any, user: fx.Node) -> bool:
    """Whether ``value`` is memory of its own that only ``user`` reads, and fits the user's result."""
    if not isinstance(value, fx.Node) or value.op != "call_function" or list(value.users) != [user]:
        return False
    schema = _schema(value)
    if schema is None or len(schema.returns) != 1:
        return False
    fresh = schema.returns[0].alias_info is None or schema.is_mutable
    return fresh and user.all_input_nodes.count(value) == 1 and alike(value, user)


def _same_shape(value: Any, other: fx.Node) -> bool:
    return isinstance(value, fx.Node) and bool(value.meta["val"].shape == other.meta["val"].shape)


def alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether one tensor can stand for the other, in memory too: a view may come next."""
    a, b = one.meta["val"], other.meta["val"]
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride())
