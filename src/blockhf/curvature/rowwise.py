"""Gradients sample by sample from one ordinary backward pass.

Where a parameter is multiplied with something, a sample's gradient is an outer product of what autograd holds
anyway: the inputs of the product and the cotangent of its result. So one pass over all samples is enough,
and the outer products of all uses of a parameter, e.g. of the steps of a recurrence, are one product at the
end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from blockhf.curvature.uses import Use, bias_of, leaf_of, nodes_behind, use_of

_VIEWS = {
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "UnsqueezeBackward0",
    "ExpandBackward0",
    "ViewBackward0",
}


class UnknownUse(Exception):
    """A parameter is used in a way that has no rule here; the message names the operation."""


def row_gradients(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor], params: Sequence[Tensor], num_equal: int
) -> list[Tensor]:
    """For each parameter its gradients, one for each row of the outputs.

    Args:
        outputs: Tensors with the rows first. No row may depend on what belongs to another.
        cotangents: Of the outputs.
        params: The parameters.
        num_equal: So many rows in a row are of the same sample. By them the rows are found in inputs that
            have other dimensions in front.

    Raises:
        UnknownUse: There is no rule for a use of a parameter, or its rows cannot be told apart.
    """
    num_rows = outputs[0].shape[0]
    wanted = set(params)
    uses: list[tuple[Tensor, Use]] = []
    others: list[tuple[Tensor, Any, int]] = []
    for node in nodes_behind(outputs):
        for param, place in _operands(node):
            if param in wanted:
                found = use_of(node)
                if found is not None and found[0] is param and found[1].kind in ("left", "right"):
                    uses.append(found)
                else:
                    others.append((param, node, place))
    edges: list[Any] = [GradientEdge(use.node, 0) for _, use in uses]
    edges += [GradientEdge(node, 0) for _, node, _ in others]
    if not edges:
        return [param.new_zeros(num_rows, *param.shape) for param in params]
    found_gradients = torch.autograd.grad(outputs, edges, cotangents, retain_graph=True, allow_unused=True)
    gradients = [None if gradient is None else gradient.detach() for gradient in found_gradients]
    with torch.no_grad():
        totals: dict[Tensor, Tensor] = {}

        def add(param: Tensor, rows: Tensor) -> None:
            totals[param] = totals[param] + rows if param in totals else rows

        # A matrix that is used both ways round, as tied weights are, has two sums.
        pieces: dict[tuple[Tensor, bool], list[tuple[Tensor, Tensor]]] = {}
        for (param, use), gradient in zip(uses, gradients, strict=False):
            if gradient is not None:
                ((inputs, rows),) = use.rows(gradient)
                pieces.setdefault((param, use.flipped), []).append(_by_row(inputs, rows, num_rows, num_equal))
        for (param, flipped), own in pieces.items():
            inputs, rows = (torch.cat(each, dim=1) for each in zip(*own, strict=True))
            left, right = (inputs, rows) if flipped else (rows, inputs)
            add(param, left.transpose(1, 2) @ right)
        for (param, node, place), gradient in zip(others, gradients[len(uses) :], strict=True):
            if gradient is not None:
                add(param, _elementwise(param, node, place, gradient, num_rows, num_equal))
    return [
        totals[param].reshape(num_rows, *param.shape)
        if param in totals
        else param.new_zeros(num_rows, *param.shape)
        for param in params
    ]


def _operands(node: Any) -> Iterator[tuple[Tensor, int]]:
    """The parameters that an operation reads, directly or through views, and the places of its arguments."""
    if node.name() in _VIEWS:
        return
    for place, (source, _) in enumerate(node.next_functions):
        while source is not None and source.name() in _VIEWS:
            source = source.next_functions[0][0]
        if source is not None and source.name() == "torch::autograd::AccumulateGrad":
            yield source.variable, place


def _by_row(inputs: Tensor, rows: Tensor, num_rows: int, num_equal: int) -> tuple[Tensor, Tensor]:
    """Positions by features to rows by steps by features."""
    num_steps = len(inputs) // num_rows
    if num_steps * num_rows != len(inputs):
        raise UnknownUse(f"{len(inputs)} positions of a product are no multiple of {num_rows} rows")
    if num_steps == 1:
        return inputs.unsqueeze(1), rows.unsqueeze(1)
    samples = num_rows // num_equal
    rows_first = inputs.reshape(samples, num_equal, num_steps, -1)
    steps_first = inputs.reshape(num_steps, samples, num_equal, -1)
    # In the right order the rows of a sample are equal, up to rounding.
    off_rows = float((rows_first - rows_first[:, :1]).square().mean())
    off_steps = float((steps_first - steps_first[:, :, :1]).square().mean())
    if min(off_rows, off_steps) >= 1e-6 * max(off_rows, off_steps):
        raise UnknownUse("the rows of a product cannot be told from its steps")
    if off_rows < off_steps:
        return inputs.reshape(num_rows, num_steps, -1), rows.reshape(num_rows, num_steps, -1)
    return (
        inputs.reshape(num_steps, num_rows, -1).transpose(0, 1),
        rows.reshape(num_steps, num_rows, -1).transpose(0, 1),
    )


def _elementwise(
    param: Tensor, node: Any, place: int, gradient: Tensor, num_rows: int, num_equal: int
) -> Tensor:
    """Of a parameter that is added or multiplied entry by entry, and spread over the rows."""
    name, source = node.name(), node.next_functions[place][0]
    if name == "AddmmBackward0" and place == 0 and bias_of(source) is param:
        # The bias of a product whose rows are found as those of the product itself.
        found = use_of(node)
        if found is None:
            raise UnknownUse(f"{name} with factors")
        ((inputs, rows),) = found[1].rows(gradient)
        if param.numel() != rows.shape[1]:
            raise UnknownUse(f"{name} with a bias of shape {tuple(param.shape)}")
        return _by_row(inputs, rows, num_rows, num_equal)[1].sum(1).reshape(num_rows, *param.shape)
    if leaf_of(source) != (param, False):
        raise UnknownUse(f"{name} with a view of a parameter")
    if name == "MulBackward0":
        gradient = gradient * (node._saved_other if place == 0 else node._saved_self)
    elif name == "AddcmulBackward0" and place in (1, 2):
        gradient = gradient * (node._saved_tensor2 if place == 1 else node._saved_tensor1)
        gradient = gradient * node._saved_value
    elif name != "AddBackward0" or (place == 1 and node._saved_alpha != 1):
        raise UnknownUse(name)
    spread = (1,) * (gradient.dim() - param.dim()) + tuple(param.shape)
    places = [dim for dim, size in enumerate(gradient.shape) if size == num_rows]
    if len(places) != 1 or spread[places[0]] != 1:
        raise UnknownUse(f"{name} in which the rows cannot be found")
    by_row = gradient.movedim(places[0], 0)
    rest = spread[: places[0]] + spread[places[0] + 1 :]
    summed = [dim + 1 for dim, size in enumerate(rest) if size == 1]
    if summed:
        by_row = by_row.sum(summed, keepdim=True)
    return by_row.reshape(num_rows, *param.shape)
