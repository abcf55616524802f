"""Rewriting of recorded graphs: what a trace is made of, split and pruned.

Functions from graphs to graphs, or in place; nothing here has heard of objectives or blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.func import functionalize

from blockhf._torch import record_operations
from blockhf.fx_graphs import alike

_aten = torch.ops.aten
_COPIES = (_aten.detach.default, _aten.alias.default)


def record(function: Callable[..., Any], *arguments: Any) -> fx.GraphModule:
    """The operations of a function, recorded on tensors without data."""
    return record_operations(function, arguments, without_data=True)


def extract(
    source: fx.GraphModule,
    inputs: Sequence[fx.Node],
    outputs: Sequence[Any],
    dependent: set[fx.Node],
    *,
    keep: bool,
) -> fx.GraphModule:
    """Those nodes that are dependent (or are not), as a function of ``inputs``."""
    graph, copies = fx.Graph(), {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in source.graph.nodes:
        if node not in copies and node.op not in ("placeholder", "output") and (node in dependent) == keep:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] if isinstance(node, fx.Node) else node for node in outputs])
    graph.eliminate_dead_code()
    return fx.GraphModule(source, graph)


def functional(module: fx.GraphModule) -> fx.GraphModule:
    """The same function without operations that write into their arguments."""
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    functional = record_operations(functionalize(module, remove="mutations"), values)
    functional.graph.eliminate_dead_code()
    return functional


def simplify(graph: fx.Graph) -> None:
    """Drop copies that serve autograd alone and what is computed twice."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or _is_random(node):
            continue
        source: Any = node.args[0] if node.args else None
        if node.target is _aten.t.default and source.target is _aten.t.default:
            source = source.args[0]  # transposed twice
        elif node.target not in _COPIES:
            source = None
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node
    graph.eliminate_dead_code()


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def hoist(fixed: fx.GraphModule, product: fx.GraphModule, num_residuals: int) -> int:
    """Move what does not depend on the vector from the product to the fixed part.

    ``fixed`` returns the residuals and one thing more, ``product`` takes the residuals and the vector.
    Residuals that nothing needs any more are dropped. Returns how many there are now.
    """
    inputs = [node for node in product.graph.nodes if node.op == "placeholder"]
    output = fixed.graph.output_node()
    all_results: Any = output.args[0]
    *results, last = all_results
    copies = dict(zip(inputs[:num_residuals], results, strict=True))
    for node in list(product.graph.nodes):
        if node.op == "call_function" and all(source in copies for source in node.all_input_nodes):
            with fixed.graph.inserting_before(output):
                copies[node] = fixed.graph.node_copy(node, copies.__getitem__)
    residuals = []
    for node, copy in copies.items():
        if any(user not in copies for user in node.users):
            residuals.append(copy)
            if node.op == "call_function":
                with product.graph.inserting_before(inputs[num_residuals]):
                    placeholder = product.graph.placeholder(node.name)
                placeholder.meta = dict(node.meta)
                node.replace_all_uses_with(placeholder)
    output.args = ([*residuals, last],)
    for module in (fixed, product):
        module.graph.eliminate_dead_code()
    for node in inputs[:num_residuals]:
        if not node.users:
            product.graph.erase_node(node)
    for module in (fixed, product):
        module.recompile()
    return len(residuals)


def restrict(
    module: fx.GraphModule, num_residuals: int, rows: range, columns: range
) -> tuple[list[int], fx.GraphModule]:
    """The part of the product from some pieces of the vector to some of the result.

    Returns which residuals it needs, and the function of these and of the pieces.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node | None] = {}  # None is a tensor of zeros
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(placeholders):
        is_zero = index >= num_residuals and index - num_residuals not in columns
        if is_zero:
            copies[node] = None
        else:
            copies[node] = copy = graph.placeholder(node.name)
            copy.meta = dict(node.meta)
    linear = set(placeholders[num_residuals:])  # the nodes that depend on the vector, linearly
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        inputs = [source for source in node.all_input_nodes if source in linear]
        if inputs:
            linear.add(node)
        if inputs and all(copies[source] is None for source in inputs):
            copies[node] = None
        else:
            copies[node] = _copy(graph, node, copies)
    results = module.graph.output_node().args[0]
    graph.output([copies[results[index]] for index in rows])  # type: ignore[index]
    graph.eliminate_dead_code()
    used = []
    for index, node in enumerate([node for node in graph.nodes if node.op == "placeholder"]):
        if index < num_residuals:
            if node.users:
                used.append(index)
            else:
                graph.erase_node(node)
    return used, fx.GraphModule(module, graph)


def write_results(graph: fx.Graph) -> None:
    """Let the graph write its results into tensors that it is given as its last arguments."""
    output = graph.output_node()
    results: Any = output.args[0]
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        targets = [graph.placeholder(f"result{index}") for index in reversed(range(len(results)))][::-1]
    for target, result in zip(targets, results, strict=True):
        single = isinstance(result, fx.Node) and list(result.users) == [output] and results.count(result) == 1
        if result is None:
            with graph.inserting_before(output):
                graph.call_function(_aten.zero_.default, (target,))
        elif single and result.target is _aten.mm.default:
            result.target, result.kwargs = _aten.mm.out, {"out": target}
        else:
            with graph.inserting_before(output):
                graph.call_function(_aten.copy_.default, (target, result))
    output.args = ((),)


def _copy(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node | None]) -> fx.Node:
    """A copy of ``node``; zeros vanish from sums and are made where an operation needs them."""
    if node.target is _aten.add.Tensor and not node.kwargs:
        left, right = node.args
        if isinstance(left, fx.Node) and isinstance(right, fx.Node):
            for zero, other in ((left, right), (right, left)):
                kept = copies[other]
                if copies[zero] is None and kept is not None and alike(other, node):
                    return kept

    def materialized(source: fx.Node) -> fx.Node:
        copy = copies[source]
        if copy is not None:
            return copy
        value = source.meta["val"]
        options = {"dtype": value.dtype, "device": value.device}
        if value.is_contiguous():
            zeros = graph.call_function(_aten.zeros.default, (list(value.shape),), options)
        else:
            memory = (list(value.shape), list(value.stride()))
            empty = graph.call_function(_aten.empty_strided.default, memory, options)
            zeros = graph.call_function(_aten.zeros_like.default, (empty,))
        zeros.meta["val"] = value
        return zeros

    return graph.node_copy(node, materialized)
