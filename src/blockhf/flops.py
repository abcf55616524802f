"""Counting of floating point operations, so that the cost of a step does not depend on the machine.

Counted are matrix products, convolutions, attention and the factorizations of matrices, as in
``torch.utils.flop_counter``: a multiplication and its addition are two operations. Sums and elementwise
functions are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from blockhf._torch import EIGENDECOMPOSITION, DispatchMode, flop_formula, packet_of, writes_memory

_aten = torch.ops.aten


def _cubic(factor: float) -> Callable[..., int]:
    """The leading term for a stack of square matrices."""

    def count(matrix: Tensor, *_: Any, **__: Any) -> int:
        size = matrix.shape[-1]
        return int(factor * size**2 * matrix.numel() / max(size, 1))

    return count


def _orthogonal_triangular(matrix: Tensor, *_: Any, **__: Any) -> int:
    """Householder's reflections, and the orthogonal factor out of them."""
    rows, columns = max(matrix.shape[-2:]), min(matrix.shape[-2:])
    count = matrix.numel() // max(rows * columns, 1)
    return int(4 * columns**2 * (rows - columns / 3) * count)


def _convolution_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
    """As much as the convolution itself, for each of the two that are asked for."""
    transposed, mask = rest[4], rest[7]
    positions = inputs if transposed else gradient
    return int(2 * positions.numel() * (weight.numel() // weight.shape[0]) * sum(mask[:2]))


def _added(_: Tensor, left: Tensor, right: Tensor, *__: Any, **___: Any) -> int:
    """A matrix product that is added to something."""
    return 2 * left.numel() * (right.shape[-1] if right.dim() > 1 else 1)


# torch's own count of the gradient of a convolution is too large where it has groups, as under vmap.
# Golub & Van Loan, "Matrix Computations". Missing in torch's own table are products with a vector and those
# that are added in place.
_FORMULAS: dict[Any, Callable[..., Any]] = {
    _aten.linalg_cholesky_ex: _cubic(1 / 3),
    _aten.cholesky_inverse: _cubic(2 / 3),
    EIGENDECOMPOSITION: _cubic(9),
    _aten.linalg_qr: _orthogonal_triangular,
    _aten.cholesky_solve: lambda b, factor, *_, **__: 2 * factor.shape[-1] * b.numel(),
    _aten.linalg_solve_triangular: lambda factor, b, *_, **__: factor.shape[-1] * b.numel(),
    _aten.convolution_backward: _convolution_backward,
    _aten.mv: lambda matrix, *_, **__: 2 * matrix.numel(),
    **dict.fromkeys((_aten.addmm_, _aten.baddbmm_, _aten.addmv, _aten.addmv_), _added),
}


def flops_of(operation: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The floating point operations of one tensor operation; only shapes matter."""
    packet = packet_of(operation)
    if packet is not None and packet in _FORMULAS:
        return int(_FORMULAS[packet](*args, **kwargs))
    formula = flop_formula(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def flops_of_graph(graph: fx.Graph) -> int:
    """The floating point operations of a recorded graph, which need not be run for it."""
    return sum(_cost(node) for node in graph.nodes if node.op == "call_function")


def entries_besides(graph: fx.Graph) -> int:
    """How many entries those operations of a recorded graph write that are not counted; views write none."""
    writing = [
        node
        for node in graph.nodes
        if node.op == "call_function" and writes_memory(node.target) and not _cost(node)
    ]
    values = [node.meta.get("val") for node in writing]
    return sum(value.numel() for value in values if isinstance(value, Tensor))


def _cost(node: fx.Node) -> int:
    def value(other: fx.Node) -> Any:
        return other.meta.get("val")

    return flops_of(node.target, fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value), value(node))


class Counter(DispatchMode):  # type: ignore[misc]
    """Counts the operations made inside of its ``with``, each time anew and so at a price."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, result)
        return result
