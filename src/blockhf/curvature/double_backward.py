"""Products by a cached double backward: works on everything that autograd can differentiate twice.

The model runs once per step. The map from cotangents to gradients, ``u -> Jᵀ u``, is built with a graph
of its own; it is linear in ``u``, so its transpose, by a second backward pass, is ``v -> J v``. A product
then takes no forward pass. Tangents start at the block that ``v`` belongs to and cotangents end at the
block that is asked for, because autograd visits only what lies between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockhf.blocks import Block
from blockhf.curvature.products import Curvature, PartMatrix, over_parts
from blockhf.flops import Meter
from blockhf.objective import Part, Problem, RandomState
from blockhf.operators import BlockMatrix, gram


@dataclass(frozen=True)
class DoubleBackward:
    """Products by a cached double backward.

    Args:
        memory_budget: How many bytes of linearized micro-batches to keep between products. The default
            keeps none, if the curvature batch has more than one: then only one is in memory at a time.
    """

    memory_budget: int = 0

    def linearize(
        self, curvature: Curvature, problem: Problem, num_products: Sequence[int] = ()
    ) -> BlockMatrix:
        def maker(part: Part) -> Callable[[], PartMatrix]:
            return _Maker(curvature, problem, part, measure=self.memory_budget > 0)

        return over_parts(problem, maker, self.memory_budget)


class Linearization:
    """``J`` and ``Jᵀ`` of some outputs at one point, block by block."""

    def __init__(self, outputs: Sequence[Tensor], blocks: Sequence[Block]) -> None:
        self.outputs = tuple(outputs)
        self.blocks = blocks
        self._dummies = tuple(torch.zeros_like(output, requires_grad=True) for output in outputs)
        params = [param for block in blocks for param in block.params]
        gradients = iter(
            torch.autograd.grad(self.outputs, params, self._dummies, create_graph=True, allow_unused=True)
        )
        self._transposed = [[next(gradients) for _ in block.params] for block in blocks]
        for block, own in zip(blocks, self._transposed, strict=True):
            if all(gradient is None for gradient in own):
                raise ValueError(
                    f"The outputs do not depend on block {block.name!r}, so it has no curvature. Return all "
                    "the outputs from which the loss is computed, or freeze the block with "
                    "requires_grad_(False) or leave it out."
                )

    def pushforward(self, block: int, vector: Tensor) -> tuple[Tensor, ...]:
        """``J v`` for a flat vector of a block."""
        pairs = zip(self._transposed[block], self.blocks[block].unflatten(vector), strict=True)
        used = [(gradient, tangent) for gradient, tangent in pairs if gradient is not None]
        return torch.autograd.grad(
            [gradient for gradient, _ in used],
            self._dummies,
            [tangent for _, tangent in used],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )

    def pullback(self, block: int, cotangents: Sequence[Tensor]) -> Tensor:
        """The flat vector ``Jᵀ u`` of a block."""
        gradients = torch.autograd.grad(
            self.outputs, self.blocks[block].params, cotangents, retain_graph=True, allow_unused=True
        )
        return self.blocks[block].flatten(gradients)


class _Maker:
    """Linearizes one part, with the same random numbers each time."""

    def __init__(self, curvature: Curvature, problem: Problem, part: Part, *, measure: bool) -> None:
        self.curvature, self.problem, self.part, self.measure = curvature, problem, part, measure
        self._draws: RandomState | None = None

    def __call__(self) -> PartMatrix:
        sizes: dict[int, int] = {}
        with _measured(sizes) if self.measure else contextlib.nullcontext():
            evaluation = self.problem.linearizable(self.part)
            names = tuple((block.name, block.size) for block in self.problem.blocks)
            with self.problem.meter.counting("linearization", self.part.shapes, names):
                if self._draws is None:
                    self._draws = RandomState(self.problem.devices)
                    matrix = self.curvature.at(evaluation, self.problem.blocks)
                else:
                    with self._draws.replayed():
                        matrix = self.curvature.at(evaluation, self.problem.blocks)
        return _Measured(matrix, sum(sizes.values()), self.problem.meter, (self.part.shapes, names))


@dataclass(frozen=True, eq=False)
class _Measured:
    """A matrix on one part whose memory is known and whose products are counted."""

    matrix: BlockMatrix
    num_bytes: int
    meter: Meter
    shapes: Hashable

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        with self.meter.counting("product", self.shapes, row, column):
            return self.matrix.product(row, column, vector)

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        with self.meter.counting("gram", self.shapes, tuple(columns)):
            return gram(self.matrix, columns, vectors)


@contextlib.contextmanager
def _measured(sizes: dict[int, int]) -> Iterator[None]:
    """Note the memory of the tensors that autograd saves, each once."""

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield
