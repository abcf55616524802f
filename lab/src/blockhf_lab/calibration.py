"""What a network's samples cost and how fast this machine is at them: the measured half of ``plan``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blockhf import DoubleBackward, GaussNewton, Traced, blocks
from blockhf.batches import tensors_of
from blockhf.blocks import Group
from blockhf.curvature import Products
from blockhf.ledger import Ledger
from blockhf.linalg import BlockOperator, conjugate_gradient
from blockhf.point import Linearizer, Point
from blockhf.policy import PolicyState
from blockhf_lab import bench, plan
from blockhf_lab.optimizers import PARTITIONS
from blockhf_lab.peers import Network

_CG_STEPS = 10


@dataclass(frozen=True)
class Setting:
    """A network and how the paper would update it: gradient batch, curvature batch, CG iterations."""

    network: str
    gradient_batch: int
    curvature_batch: int
    cg_steps: int


TASKS = {
    "autoencoder": Setting("autoencoder", 6000, 1200, 30),
    "lstm": Setting("lstm", 6000, 1200, 100),
    "cnn": Setting("residual", 2048, 256, 30),
    "transformer": Setting("transformer", 256, 32, 30),
}
"""What ``blockhf plan`` knows by name."""


def partition(case: Network, text: str) -> Sequence[Group]:
    """Blocks by a word, ``single``, ``module`` or ``layer``, or a number of them; else the network's own."""
    if not text:
        return case.groups
    if text in PARTITIONS:
        return PARTITIONS[text](case.model)
    if text.isdecimal():
        return blocks.by_size(case.model, int(text))
    raise ValueError(f"blocks is {text!r}, but must be a number or one of {', '.join(PARTITIONS)}.")


def describe(case: Network, groups: Sequence[Group], repetitions: int = 0) -> tuple[plan.Model, plan.Machine]:
    """Count what the case's samples cost and, unless there are no repetitions, measure this machine at it.

    Products are matrix-free: those of small blocks may be cheaper in a run, as they are formed.

    Returns:
        The model, and the machine, with speeds of one multiplication a second where none was measured.
    """
    number, samples = len(case.batch[0]), case.samples(groups)
    products: Products = DoubleBackward() if case.is_long else Traced()
    linearizer = Linearizer(GaussNewton(), products, PolicyState())
    Point(samples, linearizer).gradient()
    vectors = [torch.randn(block.size) for block in samples.blocks]
    budget = [100] * len(vectors)

    def linearize() -> BlockOperator:
        return products.linearize(linearizer.curvature, samples, budget, linearizer.state)

    operator, totals = linearize(), samples.ledger.totals

    def flops_of(index: int) -> int:
        before = totals.get("product", 0)
        operator.product(index, index, vectors[index])
        return totals["product"] - before

    costs = [flops_of(index) / 2 / number for index in range(len(vectors))]
    forward, activations = _forward(case)
    model = plan.Model(
        name=case.name,
        blocks=tuple(
            plan.Part(block.name, block.size, cost, block.params[0].numel())
            for block, cost in zip(samples.blocks, costs, strict=True)
        ),
        forward=forward / number,
        gradient=totals["gradient"] / 2 / number,
        activations=activations / number,
        sample_bytes=tuple(tensor[0].numel() * tensor.element_size() for tensor in tensors_of(case.batch)),
    )
    if repetitions == 0:
        return model, plan.Machine(1.0, 1.0, 1.0)

    candidates: dict[str, Callable[[], Any]] = {
        "gradient": case.gradient,
        "linearization": linearize,
        "vectors": _solver(max(vectors, key=len)),
    }
    for index, vector in enumerate(vectors):
        candidates[f"product {index}"] = partial(operator.product, index, index, vector)
    seconds = bench.best(candidates, repetitions)
    of_products = sum(seconds[f"product {index}"] for index in range(len(vectors)))
    numbers = _CG_STEPS * max(map(len, vectors))
    return model, plan.Machine(
        gradient=number * model.gradient / seconds["gradient"],
        product=number * sum(costs) / of_products,
        forward=number * plan.LINEARIZATION * model.forward / seconds["linearization"],
        memory=numbers * plan.NUMBER * plan.VECTOR_PASSES / seconds["vectors"],
    )


def _solver(vector: Tensor) -> Callable[[], Any]:
    """CG on vectors alone: a diagonal matrix in place of the product, and its sum with the damping."""
    diagonal = 1.0 + vector.square()

    class Diagonal:
        def __matmul__(self, other: Tensor) -> Tensor:
            return diagonal * other

    return lambda: conjugate_gradient(Diagonal(), vector, max_steps=_CG_STEPS)


def _forward(case: Network) -> tuple[float, int]:
    """Multiplications of a forward pass over the batch, and the numbers it keeps for the way back."""
    own = {param.data_ptr() for param in case.params}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    ledger = Ledger()
    with ledger.counting("forward"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = case.objective(case.batch)
    del result
    return ledger.total / 2, sum(kept.values())
