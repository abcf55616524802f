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
from blockhf.curvature.base import Curvature, Products, over_parts
from blockhf.isolation import RandomState
from blockhf.ledger import Ledger
from blockhf.linalg import BlockOperator, ForwardingOperator
from blockhf.policy import PolicyState
from blockhf.samples import Part, Samples


@dataclass(frozen=True)
class DoubleBackward(Products):
    """Products by a cached double backward.

    Args:
        memory_budget: How many bytes of linearized micro-batches to keep between products. The default
            keeps none, if the curvature batch has more than one: then only one is in memory at a time.
    """

    memory_budget: int = 0

    def linearize(
        self, curvature: Curvature, samples: Samples, num_products: Sequence[int], state: PolicyState
    ) -> BlockOperator:
        return self.operator(curvature, samples)

    def operator(self, curvature: Curvature, samples: Samples) -> BlockOperator:
        """The matrix; it needs to know nothing else."""

        def maker(part: Part) -> Callable[[], BlockOperator]:
            return _Maker(curvature, samples, part, measure=self.memory_budget > 0)

        return over_parts(curvature, samples, maker, self.memory_budget)


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
        if all(gradient is None for own in self._transposed for gradient in own):
            raise ValueError(
                "The outputs depend on no parameter of the optimizer, so there is no curvature. Return the "
                "outputs from which the loss is computed, without detach()."
            )

    @property
    def sizes(self) -> list[int]:
        return [block.size for block in self.blocks]

    def has_influence(self, block: int) -> bool:
        """Whether the outputs depend on a block at all."""
        return any(gradient is not None for gradient in self._transposed[block])

    def pushforward(self, block: int, vector: Tensor) -> tuple[Tensor, ...]:
        """``J v`` for a flat vector of a block."""
        pairs = zip(self._transposed[block], self.blocks[block].unflatten(vector), strict=True)
        used = [(gradient, tangent) for gradient, tangent in pairs if gradient is not None]
        if not used:  # such a block has no influence on this batch
            return tuple(torch.zeros_like(output) for output in self.outputs)
        with explained("the network"):
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


@contextlib.contextmanager
def explained(where: str) -> Iterator[None]:
    """Say what to do where an operation cannot be differentiated twice."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        if (
            "derivative for" not in reason
            and "double backward" not in reason
            and "not implemented" not in reason
        ):
            raise
        remedy = (
            "use curvature=EmpiricalFisher(), which asks for no second derivative of the loss"
            if where == "the loss"
            else "write it out in operations that torch can differentiate twice, or freeze what is before it"
        )
        raise ValueError(
            f"An operation of {where} cannot be differentiated twice ({reason}): {remedy}."
        ) from error


class _Maker:
    """Linearizes one part, with the same random numbers each time."""

    def __init__(self, curvature: Curvature, samples: Samples, part: Part, *, measure: bool) -> None:
        self.curvature, self.samples, self.part, self.measure = curvature, samples, part, measure
        self._draws: RandomState | None = None

    def __call__(self) -> BlockOperator:
        sizes: dict[int, int] = {}
        samples = self.samples
        with _measured(sizes) if self.measure else contextlib.nullcontext():
            evaluation = samples.evaluate(self.part)
            names = tuple((block.name, block.size) for block in samples.blocks)
            with samples.ledger.counting("linearization", self.part.shapes, names):
                if self._draws is None:
                    self._draws = RandomState(samples.devices)
                    operator = self.curvature.at(evaluation, samples.blocks)
                else:
                    with self._draws.replayed():
                        operator = self.curvature.at(evaluation, samples.blocks)
        return _Measured(operator, sum(sizes.values()), samples.ledger, (self.part.shapes, names))


class _Measured(ForwardingOperator):
    """A matrix on one part whose memory is known and whose products are counted."""

    def __init__(self, operator: BlockOperator, num_bytes: int, ledger: Ledger, shapes: Hashable) -> None:
        super().__init__(operator)
        self._num_bytes, self._ledger, self._shapes = num_bytes, ledger, shapes

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        with self._ledger.counting("product", self._shapes, row, column):
            return super().product(row, column, vector)

    def products(self, row: int, column: int, vectors: Tensor) -> Tensor:
        return BlockOperator.products(self, row, column, vectors)

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        with self._ledger.counting("gram", self._shapes, tuple(columns)):
            return super().gram(columns, vectors)


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
