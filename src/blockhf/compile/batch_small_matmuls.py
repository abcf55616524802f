"""Makes few large operations of the many small ones that an unrolled loop leaves behind.

The steps of a recurrence share their weights, so a product holds the same weights' tangent times every step's
state, and the sum over all steps of one matrix product each. Both are single matrix products of what the
steps have in common with what they have not, put side by side. Only that is joined for which little needs
to be copied in a product: what is fixed is put side by side once a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from blockhf.fx_graphs import alike, dependent_on

_aten = torch.ops.aten

_OVERLOADS = {_aten.add: "Tensor", _aten.select: "int", _aten.slice: "Tensor", _aten.sum: "dim_IntList"}

_FEWEST = 3
"""Steps from which on a loop is worth it."""

_SMALL = 1 / 4
"""What may be copied or computed besides, as a share of what need not be read or written again."""


def batch_small_matmuls(graph: fx.Graph, num_fixed: int) -> None:
    """Rewrite a product's graph in place; its first ``num_fixed`` inputs do not depend on the vector."""
    if any(_is(node, _aten.as_strided) for node in graph.nodes):
        return  # which relies on how memory is laid out
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for rule in (
        _turn_products,
        _drop_zero_slices,
        _join_slices,
        _join_products,
        _join_summed_products,
        _join_added_slices,
        _join_tangents,
        _join_cotangents,
    ):
        dependent = dependent_on(graph, inputs[num_fixed:])
        fixed = [node for node in graph.nodes if node not in dependent and node.op != "output"]
        place = inputs[-1]
        for node in fixed:
            if node.op != "placeholder":  # so that it comes before whatever it may be joined with
                if place.next is not node:
                    place.append(node)
                place = node
        rule(graph, set(fixed))
        graph.eliminate_dead_code()


def _turn_products(graph: fx.Graph, fixed: set[fx.Node]) -> None:
    """Autograd may compute a product as the transpose of the transposed one, which is laid out otherwise."""
    turned = set()
    for node in list(graph.nodes):
        product: Any = node.args[0] if _is(node, _aten.t) else None
        if _is(product, _aten.mm) and len(product.users) == 1:
            with graph.inserting_before(node):
                new = _call(graph, _aten.mm, *(_turned(graph, factor) for factor in reversed(product.args)))
            turned.add(new)
            node.replace_all_uses_with(new)
    _lay_out_anew(graph, turned)


def _drop_zero_slices(graph: fx.Graph, fixed: set[fx.Node]) -> None:
    """The derivative of a slice is a tensor of zeros around it: add no other slices of that to anything."""
    left = set()
    for node in list(graph.nodes):
        whole: Any = node.args[0] if node.args else None
        permuted = _is(whole, _aten.permute)
        source: Any = whole.args[0] if permuted else whole
        if not _is(node, _aten.select) or not _is(source, _aten.select_backward):
            continue
        _, sizes, dim, place = source.args
        order = whole.args[1] if permuted else range(len(sizes))
        if (order[node.args[1]] - dim) % len(sizes) or (node.args[2] - place) % sizes[dim] == 0:
            continue
        for user in list(node.users):
            others = [leaf for leaf in user.args if leaf is not node]
            if _is(user, _aten.add) and len(others) == 1 and not user.kwargs and _fits(others[0], user):
                user.replace_all_uses_with(others[0])
                left.add(others[0])
    _lay_out_anew(graph, left)


def _join_slices(graph: fx.Graph, fixed: set[fx.Node]) -> None:
    """Put slices together at once that autograd adds up one by one.

    The derivative of a slice is a tensor of zeros around it, so that of the T slices of an unrolled
    recurrence is a sum of T full tensors. Where the slices are different ones, that is their stack.
    """
    for total, summands in _sums(graph):
        slices: list[Any] = [leaf for leaf in summands if _is(leaf, _aten.select_backward)]
        if len(slices) < _FEWEST:
            continue
        sizes: Any = slices[0].args[1]
        dim: int = slices[0].args[2] % len(sizes)
        place = {leaf.args[3] % sizes[dim]: leaf for leaf in slices}
        same = all((leaf.args[1], leaf.args[2] % len(sizes)) == (sizes, dim) for leaf in slices)
        if same and len(place) == len(slices) == sizes[dim]:
            with graph.inserting_before(total):
                stack = _call(graph, _aten.stack, [place[index].args[0] for index in range(sizes[dim])], dim)
            _replace(total, [stack, *(leaf for leaf in summands if leaf not in slices)])


def _join_products(graph: fx.Graph, fixed: set[fx.Node]) -> None:
    """Products of one matrix with every step's fixed one: a single product with these side by side."""
    for side in (0, 1):
        groups: dict[Any, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if _has_fixed(node, 1 - side, fixed) and all(_is(user, _aten.add) for user in node.users):
                groups[node.args[side], _shape(node.args[1 - side])].append(node)
        for (common, _), products in groups.items():
            if len(products) < _FEWEST:
                continue
            with graph.inserting_before(products[0]):
                stack = _call(graph, _aten.stack, [node.args[1 - side] for node in products], 1 - side)
                joined = _product(graph, side, common, _flat(graph, stack, 1 - side))
                rows, columns = _shape(products[0])
                sizes = [rows, len(products), columns] if side == 0 else [len(products), rows, columns]
                joined = _call(graph, _aten.view, joined, sizes)
                parts = [_call(graph, _aten.select, joined, 1 - side, t) for t in range(len(products))]
            for product, part in zip(products, parts, strict=True):
                product.replace_all_uses_with(part)


def _join_summed_products(graph: fx.Graph, fixed: set[fx.Node]) -> None:
    """A sum of matrix products: the product of all left factors side by side with all right ones.

    One of the factors is fixed, and the other ones are side by side already, for the sake of something else.
    """
    stacks = {(frozenset(node.args[0]), _dim(node)): node for node in graph.nodes if _is(node, _aten.stack)}
    for total, summands in _sums(graph):
        for side in (0, 1):  # of the factors that are not fixed
            products = _terms(summands, 1 - side, fixed)
            terms = {leaf.args[side]: leaf for leaf in products}
            stack = stacks.get((frozenset(terms), 1 - side))
            if len(terms) < _FEWEST or stack is None or not len(stack.args[0]) == len(terms) == len(products):
                continue
            terms = {factor: terms[factor] for factor in stack.args[0]}  # in the order of the stack
            if total < stack:
                total.prepend(stack)
            with graph.inserting_before(total):
                others = _call(graph, _aten.stack, [leaf.args[1 - side] for leaf in terms.values()], side)
                factors = _flat(graph, stack, 1 - side), _flat(graph, others, side)
                joined = _product(graph, side, *factors)
            _replace(total, [joined, *(leaf for leaf in summands if leaf not in products)])
            break


def _join_added_slices(graph: fx.Graph, fixed: set[fx.Node]) -> None:
    """Sums of the same slices of two tensors: slices of their sum."""
    groups: dict[Any, list[tuple[fx.Node, list[Any], list[Any]]]] = defaultdict(list)
    for total, summands in _sums(graph):
        slices = [leaf for leaf in summands if _is(leaf, _aten.select) and len(leaf.users) == 1]
        if len(slices) == 2 and slices[0].args[1:] == slices[1].args[1:]:
            bases: list[Any] = [leaf.args[0] for leaf in slices]
            one, other = sorted(bases)
            if one is not other and _shape(one) == _shape(other):
                groups[one, other].append((total, summands, slices))
    for (one, other), cases in groups.items():
        if len(cases) < _FEWEST:
            continue
        with graph.inserting_before(min(total for total, *_ in cases)):
            sources = [one.args[0], other.args[0]]
            if _is(one, _aten.view) and _is(other, _aten.view) and _shape(sources[0]) == _shape(sources[1]):
                joined = _call(graph, _aten.view, _call(graph, _aten.add, *sources), one.args[1])
            else:
                joined = _call(graph, _aten.add, one, other)
            parts = [_call(graph, _aten.select, joined, *slices[0].args[1:]) for _, _, slices in cases]
        for part, (total, summands, slices) in zip(parts, cases, strict=True):
            _replace(total, [part, *(leaf for leaf in summands if leaf not in slices)])


def _join_tangents(graph: fx.Graph, fixed: set[fx.Node]) -> None:
    """A sum of products with different fixed matrices: one product, which writes its result once.

    Something that is spread over the result is such a product too, with ones.
    """
    for total, summands in _sums(graph):
        for side in (0, 1):
            terms = _terms(summands, 1 - side, fixed)
            spread = [leaf for leaf in summands if _is_spread(leaf, 1 - side)]
            factors = [leaf.args[side] for leaf in terms] + [leaf.args[0] for leaf in spread]
            if len(terms) < 2 or _numel(*factors) > _SMALL * _numel(total):
                continue
            with graph.inserting_before(total):
                sizes = [1, _shape(total)[1]] if side == 0 else [_shape(total)[0], 1]
                others = [leaf.args[1 - side] for leaf in terms]
                others += [_ones(graph, sizes, total) for _ in spread]
                beside = _call(graph, _aten.cat, factors, 1 - side), _call(graph, _aten.cat, others, side)
                joined = _product(graph, side, *beside)
            _replace(total, [joined, *(leaf for leaf in summands if leaf not in terms + spread)])
            break


def _join_cotangents(graph: fx.Graph, fixed: set[fx.Node]) -> None:
    """Products of a large matrix with fixed ones, and its sum, if small: one product, which reads it once."""
    for side in (0, 1):
        groups: dict[Any, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if _has_fixed(node, 1 - side, fixed):
                groups[node.args[side]].append(node)
        for common, products in groups.items():
            if len(products) < 2 or _numel(*products) > _SMALL * _numel(common):
                continue
            over = ([1 - side], True)  # keeping the dimension
            sums = [user for user in common.users if _is(user, _aten.sum) and user.args[1:] == over]
            with graph.inserting_before(min(products + sums)):
                # By rows, so that the long dimension of the fixed matrices is in one piece of memory.
                rows = [_turned(graph, node.args[1 - side], side == 0) for node in products]
                rows += [_ones(graph, [1, _shape(common)[1 - side]], common) for _ in sums]
                beside = _call(graph, _aten.cat, rows, 0)
                joined = _call(graph, _aten.mm, beside, _turned(graph, common, side == 0))
                start = 0
                for node, own in zip(products + sums, rows, strict=True):
                    stop = start + _shape(own)[0]
                    part = _call(graph, _aten.slice, joined, 0, start, stop)
                    node.replace_all_uses_with(_dense(graph, _turned(graph, part, side == 0)))
                    start = stop


def _sums(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """The sums, each with what it adds up, the last one first."""
    for node in reversed(list(graph.nodes)):
        if _is(node, _aten.add) and not any(_is(user, _aten.add) for user in node.users):
            summands = _summands(node)
            if node.meta["val"].is_contiguous() and all(_shape(leaf) == _shape(node) for leaf in summands):
                yield node, summands


def _summands(node: fx.Node) -> list[fx.Node]:
    """What a chain of sums adds up, if nothing else reads the sums on the way."""
    summands: list[Any] = []
    todo: list[Any] = [node]
    while todo:
        current = todo.pop()
        if current.kwargs or not all(isinstance(source, fx.Node) for source in current.args):
            return []
        for source in current.args:
            if _is(source, _aten.add) and len(source.users) == 1:
                todo.append(source)
            else:
                summands.append(source)
    return summands


def _replace(total: fx.Node, summands: Sequence[fx.Node]) -> None:
    """Let the sum of ``summands`` take the place of ``total``."""
    graph = total.graph
    with graph.inserting_before(total):
        result = summands[0]
        for other in summands[1:]:
            result = _call(graph, _aten.add, result, other)
        total.replace_all_uses_with(_dense(graph, result))


def _lay_out_anew(graph: fx.Graph, sources: set[fx.Node]) -> None:
    """Note how the memory of what depends on ``sources`` is laid out, now that theirs has changed.

    They have become contiguous, so what reads them can still be a view where it was one.
    """
    changed = dependent_on(graph, sources) - sources
    for node in graph.nodes:
        if node in changed and node.op == "call_function":
            values = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            node.meta["val"] = node.target(*values[0], **values[1])


def _fits(node: Any, old: fx.Node) -> bool:
    """Whether ``node`` can stand for ``old``, even if a view of that comes next."""
    if not isinstance(node, fx.Node) or _shape(node) != _shape(old):
        return False
    return alike(node, old) or bool(node.meta["val"].is_contiguous())


def _dense(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """``node`` in one piece of memory, as a view of it may come next."""
    if node.meta["val"].is_contiguous():
        return node
    return _call(graph, _aten.clone, node, memory_format=torch.contiguous_format)


def _product(graph: fx.Graph, side: int, factor: fx.Node, other: fx.Node) -> fx.Node:
    """The matrix product with ``factor`` on the left, which is side 0, or on the right."""
    return _call(graph, _aten.mm, *((factor, other) if side == 0 else (other, factor)))


def _terms(summands: Sequence[fx.Node], side: int, fixed: set[fx.Node]) -> list[Any]:
    """Those of the summands that are products with something fixed, and nothing else."""
    return [leaf for leaf in summands if _has_fixed(leaf, side, fixed) and len(leaf.users) == 1]


def _has_fixed(node: fx.Node, side: int, fixed: set[fx.Node]) -> bool:
    """Whether it is a matrix product whose factor on that side is fixed, and the other is not."""
    return _is(node, _aten.mm) and node.args[side] in fixed and node.args[1 - side] not in fixed


def _turned(graph: fx.Graph, matrix: Any, turn: bool = True) -> fx.Node:
    """The transpose, or the matrix itself where there is nothing to turn."""
    if not turn:
        return matrix  # type: ignore[no-any-return]
    return matrix.args[0] if _is(matrix, _aten.t) else _call(graph, _aten.t, matrix)


def _is_spread(node: fx.Node, dim: int) -> bool:
    return _is(node, _aten.expand) and len(_shape(node.args[0])) == 2 and _shape(node.args[0])[dim] == 1


def _ones(graph: fx.Graph, sizes: Sequence[int], like: fx.Node) -> fx.Node:
    value = like.meta["val"]
    options = {"dtype": value.dtype, "device": value.device}
    node = graph.call_function(_aten.ones.default, (list(sizes),), options)
    node.meta["val"] = value.new_ones(sizes)
    return node


def _flat(graph: fx.Graph, stack: fx.Node, dim: int) -> fx.Node:
    """A stack of matrices along ``dim`` as one matrix."""
    first, second, third = _shape(stack)
    sizes = [first, second * third] if dim == 1 else [first * second, third]
    for user in stack.users:
        if _is(user, _aten.view) and user.args[1] == sizes:
            if stack.next is not user:
                stack.append(user)  # so that it comes before whatever reads it
            return user
    return _call(graph, _aten.view, stack, sizes)


def _call(graph: fx.Graph, packet: Any, *args: Any, **kwargs: Any) -> fx.Node:
    target = getattr(packet, _OVERLOADS.get(packet, "default"))
    values = fx.map_arg(args, lambda source: source.meta["val"])
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*values, **kwargs)
    return node


def _is(node: Any, packet: Any) -> bool:
    overload = _OVERLOADS.get(packet, "default")
    return isinstance(node, fx.Node) and node.target is getattr(packet, overload)


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _numel(*nodes: Any) -> int:
    return sum(node.meta["val"].numel() for node in nodes)


def _dim(stack: fx.Node) -> Any:
    return stack.args[1] if len(stack.args) > 1 else 0
