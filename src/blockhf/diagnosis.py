"""Looks for what goes wrong in silence: curvature that is zero, ranks that do not know of each other."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from blockhf.linalg import BlockOperator
from blockhf.scalars import read

ZERO = (
    "the curvature along the gradient is zero, so steps have nothing to go by but the damping. Either the "
    "loss is piecewise linear in the outputs (L1, hinge, pinball), or the outputs are what comes after the "
    "last nonlinearity, e.g. log-probabilities. Return what comes before it as outputs, e.g. the logits, or "
    "use curvature=EmpiricalFisher()"
)
NEGATIVE = (
    "the curvature along the gradient is negative: the loss is not convex in the outputs, as with policy "
    "gradients, or with curvature=Hessian() not in the parameters. Return other outputs, or use "
    "curvature=EmpiricalFisher() or a Fisher matrix of the policy"
)
BYPASSED = (
    "the loss depends on block {name!r}, but the outputs do not, so it has no curvature and stays as it is. "
    "Return all the outputs from which the loss is computed, or freeze the block with requires_grad_(False)"
)
RISEN = (
    "the loss is {times:.0f} times that of the step before: steps are too long. Use a smaller lr, more "
    "damping, or a search that looks at the loss, e.g. search=Backtracking()"
)


SCALE = (
    "the square of the gradient, whose largest entry is {largest:.1e}, is beyond the numbers of {dtype}. "
    "Multiply the loss by a constant, so that it is of the order of 1, or use a wider type"
)
DAMPED = (
    "the damping, {damping:.1e}, is so much larger than the curvature along the gradient, {along:.1e}, that "
    "no step can be told from rounding in a loss of {loss:.1e}. Multiply the loss by a constant, so that it "
    "is of the order of 1, or pass less damping"
)


def curvature_along(operator: BlockOperator, gradient: Sequence[Tensor]) -> Tensor:
    """The sum over the blocks of ``g @ G @ g``, relative to ``g @ g``."""
    total = torch.stack([own @ operator.product(i, i, own) for i, own in enumerate(gradient)]).sum()
    return total / torch.stack([own @ own for own in gradient]).sum()


def wrong_with_curvature(
    operator: BlockOperator, gradient: Sequence[Tensor], damping: float, loss: float
) -> str | None:
    """What is wrong with a matrix and the least damping of its blocks, by one product with each block."""
    sizes = [own.abs().max() for own in gradient if own.numel()]
    if not sizes:
        return None
    square_of = torch.stack([own @ own for own in gradient]).sum()
    *largest_of, (square,), (along,) = read([*sizes, square_of, curvature_along(operator, gradient)])
    largest = max(own for (own,) in largest_of)
    if largest == 0:
        return None
    dtype = gradient[0].dtype
    if square == 0 or not math.isfinite(square):
        return SCALE.format(largest=largest, dtype=dtype)
    unseen = square < 8 * damping * torch.finfo(dtype).eps * abs(loss)  # at most square / 2 damping is gained
    if unseen and 0 < along < 1e-3 * damping:
        return DAMPED.format(damping=damping, along=along, loss=loss)
    if along == 0:
        return ZERO
    return NEGATIVE if along < 0 else None


def bypassed(operator: BlockOperator, gradient: Sequence[Tensor], names: Sequence[str]) -> str | None:
    """What to say of a block with a gradient that does not come through the outputs."""
    suspects = [index for index in range(len(gradient)) if not operator.has_influence(index)]
    found = read([gradient[index].any() for index in suspects])
    for index, (has_gradient,) in zip(suspects, found, strict=True):
        if has_gradient:
            return BYPASSED.format(name=names[index])
    return None


def risen(before: float | None, now: float) -> str | None:
    """What to say of a loss that has risen tenfold in a step whose length nobody looked at."""
    if before is None or not 10 * before < now or before <= 0:
        return None
    return RISEN.format(times=now / before)


def check_wrapped(modules: Sequence[nn.Module]) -> None:
    """Raise where a module on a mesh is wrapped for data parallelism, which would wait for ``backward()``."""
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        raise ValueError(
            "The objective calls a DistributedDataParallel module. The optimizer adds up over the ranks of "
            "its mesh by itself: call the module inside (model.module) in the objective."
        )


def check_processes(modules: Sequence[nn.Module]) -> None:
    """Raise or warn where other processes train the same model and the optimizer does not know of them.

    Raises:
        ValueError: A module is wrapped for data parallelism, whose sums of gradients do not happen here.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    number = dist.get_world_size()
    remedy = f"Pass mesh=blockhf.mesh(data={number}) to the optimizer"
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        raise ValueError(
            "The objective calls a DistributedDataParallel module, whose sum of gradients over the ranks "
            f"only happens in backward(), which is not called here: the ranks would drift apart. {remedy}, "
            "and call the module inside (model.module) in the objective."
        )
    warnings.warn(
        f"There are {number} processes, and this optimizer knows of none but its own: each trains a model of "
        f"its own. {remedy} for one model.",
        stacklevel=4,
    )
