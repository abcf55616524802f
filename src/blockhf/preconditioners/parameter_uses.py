"""Where parameters are multiplied with something, read from autograd's graph: modules do not matter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from blockhf import _torch
from blockhf._torch import parameter_of, saved, saves

_CHUNK = 2**24
"""Entries of the patches of a convolution that are in memory at a time."""


@dataclass(frozen=True, eq=False)
class Use:
    """One multiplication with a parameter, as it stands in autograd's graph.

    Attributes:
        node: The operation.
        kind: ``"right"`` or ``"left"`` for the side of a matrix product on which the parameter is,
            ``"convolution"`` or ``"embedding"``; ``"scale"`` and ``"shift"`` for a vector that each position
            is multiplied with, or has added to it.
        flipped: Whether the inputs belong to the parameter's rows and not to its columns.
        bias: The parameter that is added to the product.
        num_groups: Of a convolution, each of which has a matrix of its own.
    """

    node: Any
    kind: str
    flipped: bool = False
    bias: Tensor | None = None
    num_groups: int = 1

    def rows(self, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and cotangents with one row for each position; those of several groups group by group."""
        if self.kind == "convolution":
            yield from self._patches(gradient)
        elif self.kind in ("scale", "shift"):
            rows = gradient * self._scaled() if self.kind == "scale" else gradient
            # Channels are in front of places, and a sample's places are added up: that is exact.
            channels_first = self.node.name() in (*_torch.BATCH_NORMS, _torch.CONVOLUTION)
            rows = rows.flatten(2).sum(2) if channels_first and rows.dim() > 2 else rows.flatten(0, -2)
            yield rows.new_ones(len(rows), 1), rows
        else:
            inputs = saved(self.node, _INPUTS[self.node.name(), self.kind])
            yield (inputs.T, gradient.T) if self.kind == "left" else (inputs, gradient)

    def _scaled(self) -> Tensor:
        """What each position's scale is multiplied with."""
        if self.node.name() == _torch.LAYER_NORM:
            inputs, mean, scale = (saved(self.node, name) for name in ("input", "result1", "result2"))
            normalized: Tensor = (inputs - mean) * scale
            return normalized
        if self.node.name() in _torch.BATCH_NORMS:
            return _batch_normalized(self.node)
        is_left = parameter_of(self.node.next_functions[0][0]) is not None
        other: Tensor = saved(self.node, "other" if is_left else "self")
        return other

    def _patches(self, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What a kernel meets at each of its places, and what comes out there.

        A transposed convolution is one from its results to its inputs: there the kernel meets cotangents.
        """
        kernel, inputs = saved(self.node, "weight").shape[2:], saved(self.node, "input")
        met, out = (gradient, inputs) if self.flipped else (inputs, gradient)
        step = max(1, _CHUNK // (met.shape[1] * kernel.numel() * out[0, 0].numel()))
        for chunk, own in zip(torch.split(met, step), torch.split(out, step), strict=True):
            options = (saved(self.node, name) for name in ("stride", "padding", "dilation"))
            patches = _patches_of(chunk, own.shape[2:], kernel, *options)
            rows = own.flatten(2).transpose(1, 2).flatten(0, 1)
            if self.num_groups > 1:
                patches, rows = (
                    each.reshape(len(each), self.num_groups, -1).transpose(0, 1) for each in (patches, rows)
                )
            yield (rows, patches) if self.flipped else (patches, rows)


def _patches_of(
    pictures: Tensor,
    places: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """What a kernel meets: a row for each place of each picture, in the order of the kernel's entries."""
    views = F.pad(pictures, [pad for pad in reversed(padding) for _ in range(2)])
    for axis, (number, size, step, gap) in enumerate(zip(places, kernel, stride, dilation, strict=True), 2):
        views = views.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap].narrow(axis, 0, number)
    return views.movedim(1, 1 + len(kernel)).flatten(1 + len(kernel)).flatten(0, len(kernel))


def _batch_normalized(node: Any) -> Tensor:
    """The result of a BatchNorm before scale and shift."""
    training, eps = saved(node, "training"), saved(node, "eps" if saves(node, "eps") else "epsilon")
    mean, variance = (None if training else saved(node, f"running_{name}") for name in ("mean", "var"))
    return F.batch_norm(saved(node, "input"), mean, variance, training=training, eps=eps)


_INPUTS = {
    (_torch.ADDED_MATRIX_PRODUCT, "right"): "mat1",
    (_torch.ADDED_MATRIX_PRODUCT, "left"): "mat2",
    (_torch.MATRIX_PRODUCT, "right"): "self",
    (_torch.MATRIX_PRODUCT, "left"): "mat2",
}
_NEEDED = {
    _torch.EMBEDDING: ("indices", "weight_sym_argsize_0"),
    _torch.CONVOLUTION: ("input", "weight", "dilation", "padding", "stride", "groups", "transposed"),
    _torch.ADDED_MATRIX_PRODUCT: ("mat1", "mat2", "alpha", "beta"),
    _torch.MATRIX_PRODUCT: ("self", "mat2"),
    _torch.LAYER_NORM: ("input", "result1", "result2"),
    _torch.MULTIPLICATION: ("self", "other"),
    **dict.fromkeys(_torch.BATCH_NORMS, ("input", "running_mean", "running_var", "training")),
}
"""What must be kept of an operation for a use of a parameter to be of use here."""


def find_uses(outputs: Sequence[Tensor], params: Iterable[Tensor]) -> dict[Tensor, list[Use]]:
    """Where matrices are multiplied with something, in the graph behind the outputs."""
    params = set(params)
    uses: dict[Tensor, list[Use]] = {}
    for node in _nodes_behind(outputs):
        for param, use in _uses_of(node):
            if param in params:
                uses.setdefault(param, []).append(use)
    return uses


def _nodes_behind(outputs: Sequence[Tensor]) -> Iterator[Any]:
    """The nodes of the graph behind some tensors, each once."""
    seen: set[Any] = set()
    todo: list[Any] = [get_gradient_edge(output).node for output in outputs]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [following for following, _ in node.next_functions]


def _uses_of(node: Any) -> Iterator[tuple[Tensor, Use]]:
    """The parameters that an operation multiplies with something, if there is a rule for it."""
    name, sources = node.name(), [source for source, _ in node.next_functions]
    if name in (_torch.LAYER_NORM, *_torch.BATCH_NORMS) and saves(node, *_NEEDED[name]):
        for source, kind in zip(sources[1:], ("scale", "shift"), strict=False):
            param = parameter_of(source)
            if param is not None and param.dim() == 1:
                yield param, Use(node, kind)
    elif name == _torch.MULTIPLICATION and saves(node, *_NEEDED[name]):
        left, right = map(parameter_of, sources)
        param, other = (left, "other") if right is None else (right, "self")
        if (left is None) == (right is None) or param is None or param.dim() != 1:
            return
        factor = saved(node, other)
        if factor is not None and factor.dim() > 1 and factor.shape[-1] == len(param):
            yield param, Use(node, "scale")
    elif (found := _use_of(node)) is not None:
        yield found
        if found[1].kind == "convolution" and found[1].flipped and (bias := _bias_of(sources[2])) is not None:
            yield bias, Use(node, "shift")


def _use_of(node: Any) -> tuple[Tensor, Use] | None:
    """The parameter that an operation multiplies with something, if there is a rule for it."""
    name, sources = node.name(), [source for source, _ in node.next_functions]
    if name not in _NEEDED or not saves(node, *_NEEDED[name]):
        return None
    if name == _torch.EMBEDDING:
        leaf = _leaf_of(sources[0])
        return None if leaf is None or leaf[1] else (leaf[0], Use(node, "embedding", flipped=True))
    if name == _torch.CONVOLUTION:
        leaf = _leaf_of(sources[1])
        if leaf is None or leaf[1]:
            return None
        transposed, bias = saved(node, "transposed"), _bias_of(sources[2])
        # The bias of a transposed one has no place beside its inputs.
        return leaf[0], Use(
            node, "convolution", transposed, None if transposed else bias, saved(node, "groups")
        )
    bias = None
    if name == _torch.ADDED_MATRIX_PRODUCT:
        if saved(node, "alpha") != 1 or saved(node, "beta") != 1:
            return None
        bias = _bias_of(sources.pop(0))
    left, right = map(_leaf_of, sources)
    if (left is None) == (right is None):
        return None
    if right is not None:  # a Wᵀ, or a W with the inputs along its rows
        return right[0], Use(node, "right", flipped=not right[1], bias=bias)
    assert left is not None
    return left[0], Use(node, "left", flipped=left[1], bias=bias)


def _leaf_of(node: Any) -> tuple[Tensor, bool] | None:
    """The parameter that a node of the graph stands for, and whether it is transposed there."""
    transposed = False
    while node is not None:
        if (param := parameter_of(node)) is not None:
            return param, transposed
        name = node.name()
        if name in _torch.CASTS:  # as autocast makes
            node = node.next_functions[0][0]
            continue
        swaps = name == _torch.PERMUTATION and saves(node, "dims")
        swaps = swaps and [dim % 2 for dim in saved(node, "dims")] == [1, 0]  # .T
        if name not in _torch.TRANSPOSES and not swaps:
            return None
        transposed = not transposed
        node = node.next_functions[0][0]
    return None


def _bias_of(node: Any) -> Tensor | None:
    while node is not None and node.name() in (*_torch.SPREADING_VIEWS, *_torch.CASTS):
        node = node.next_functions[0][0]
    return parameter_of(node)
