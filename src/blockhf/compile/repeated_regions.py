"""Finds what repeats in a long graph, so that it is compiled once and called often.

An unrolled recurrence is the same few dozen operations over and over; compiling all of them as one takes
minutes. Here the graph is cut where the sequence of operations repeats with some period. Pieces that are
equal up to the names of their inputs share one compiled function, and the rest runs as it is.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

_SHORTEST_PERIOD, _LONGEST_PERIOD = 150, 1200
"""Operations in a piece: several turns of a loop whose body is short, because each call has a price too."""

_FEWEST_REPEATS = 4


def outline(
    module: fx.GraphModule, compile: Callable[[fx.GraphModule], Callable[..., Any]]
) -> fx.GraphModule:
    """The same function, with the pieces that repeat compiled by ``compile``, once for each kind."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    pieces = [_Piece(module, nodes[start:stop]) for start, stop in _cut([_token(node) for node in nodes])]
    counts = Counter(piece.key for piece in pieces)
    functions: dict[Any, str] = {}
    attributes: dict[str, Any] = {}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copies[node] = graph.node_copy(node)
        if node.op == "get_attr":
            attributes[node.target] = getattr(module, node.target)
    for piece in pieces:
        if counts[piece.key] < _FEWEST_REPEATS:
            for node in piece.nodes:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        if piece.key not in functions:
            functions[piece.key] = f"piece{len(functions)}"
            attributes[functions[piece.key]] = compile(piece.extract())
        call = graph.call_module(functions[piece.key], tuple(copies[node] for node in piece.inputs))
        for index, node in enumerate(piece.outputs):
            copies[node] = graph.call_function(operator.getitem, (call, index))
            copies[node].meta = dict(node.meta)
    graph.output(fx.map_arg(module.graph.output_node().args[0], copies.__getitem__))
    return fx.GraphModule(attributes, graph)


class _Piece:
    """Some consecutive operations as a function of what they take from outside."""

    def __init__(self, module: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
        self.module, self.nodes = module, nodes
        inside = set(nodes)
        self.inputs = list(
            dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
        )
        self.outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        names = {node: f"in{index}" for index, node in enumerate(self.inputs)}
        names.update({node: f"op{index}" for index, node in enumerate(nodes)})
        self.key = (
            tuple((node.target, repr(_renamed(node, names))) for node in nodes),
            tuple(_kind(node) for node in self.inputs),
            tuple(names[node] for node in self.outputs),
        )

    def extract(self) -> fx.GraphModule:
        graph, copies = fx.Graph(), {}
        for index, node in enumerate(self.inputs):
            copies[node] = graph.placeholder(f"in{index}")
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in self.outputs))
        return fx.GraphModule(self.module, graph)


def _renamed(node: fx.Node, names: dict[fx.Node, str]) -> Any:
    return fx.map_arg((node.args, node.kwargs), lambda source: names[source])


def _token(node: fx.Node) -> Any:
    """What an operation is, apart from where its inputs come from."""
    constants = fx.map_arg((node.args, node.kwargs), lambda _: None)
    return node.target, repr(constants), _kind(node), *map(_kind, node.all_input_nodes)


def _kind(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return type(value)


def _cut(tokens: Sequence[Any]) -> list[tuple[int, int]]:
    """Where to cut a sequence so that its repetitions become pieces of their own."""
    numbers: dict[Any, int] = {}
    sequence = [numbers.setdefault(token, len(numbers)) for token in tokens]
    pieces, start, rest = [], 0, 0
    while start < len(sequence):
        period, repeats = _repetition(sequence, start)
        if repeats < _FEWEST_REPEATS:
            start += 1
            continue
        if rest < start:
            pieces.append((rest, start))
        for _ in range(repeats):
            pieces.append((start, start + period))
            start += period
        rest = start
    if rest < len(sequence):
        pieces.append((rest, len(sequence)))
    return pieces


def _repetition(sequence: Sequence[int], start: int) -> tuple[int, int]:
    """The period with which the sequence repeats from ``start`` on, and how often.

    Of the multiples of the shortest period it is the first of those after which little is left over.
    """
    found = []
    longest = min(_LONGEST_PERIOD, (len(sequence) - start) // _FEWEST_REPEATS)
    for period in range(_SHORTEST_PERIOD, longest + 1):
        if sequence[start] != sequence[start + period]:
            continue
        length = 0
        while (
            start + length + period < len(sequence)
            and sequence[start + length] == sequence[start + length + period]
        ):
            length += 1
        if length >= (_FEWEST_REPEATS - 1) * period:
            found.append((period, length // period + 1))
    most = max((period * repeats for period, repeats in found), default=0)
    return next((pair for pair in found if pair[0] * pair[1] > 0.95 * most), (0, 0))
