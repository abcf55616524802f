"""Which matrix, and how it is multiplied: what curvatures and the ways to products have in common."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from blockhf.blocks import Block
from blockhf.curvature.draws import Noise, curvature_draw
from blockhf.linalg import BlockOperator, Scaled
from blockhf.objective import Evaluation
from blockhf.policy import Policy, PolicyState
from blockhf.samples import Part, Samples
from blockhf.scalars import read


class Curvature(Policy):
    """Which matrix describes the loss near a point."""

    @abc.abstractmethod
    def at(self, evaluation: Evaluation, blocks: Sequence[Block]) -> BlockOperator:
        """The matrix at the point and on the samples of the evaluation."""

    def draw(self, evaluation: Evaluation, noise: Noise) -> list[Tensor]:
        """Random cotangents of the outputs whose back-propagated covariance is close to the matrix.

        Preconditioners are made of them. By default their covariance is that of the Gauss-Newton matrix.
        """
        return curvature_draw(evaluation, noise)

    def weight(self, samples: Samples, part: Part) -> float:
        """How much the matrix of a part counts in that of all samples; by default as much as its loss."""
        return part.weight


class Products(Policy):
    """A way to products with the matrix on some samples."""

    @abc.abstractmethod
    def linearize(
        self, curvature: Curvature, samples: Samples, num_products: Sequence[int], state: PolicyState
    ) -> BlockOperator:
        """The matrix, ready for products.

        Args:
            curvature: Which matrix.
            samples: On which samples, and the blocks.
            num_products: About how many products are wanted with each block.
            state: What is kept from step to step: refusals in ``shared``, traces in ``cache``.
        """


class JacobianForm(BlockOperator):
    """A matrix of the form ``Jᵀ H J``, whose products have a middle."""

    @abc.abstractmethod
    def halves(self, column: int, vector: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """``J v`` and ``H J v``: a product before the way back."""

    @abc.abstractmethod
    def way_back(self, row: int, curved: Sequence[Tensor]) -> Tensor:
        """The product from its second half."""

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        _, curved = self.halves(column, vector)
        return self.way_back(row, curved)

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        return inner([self.halves(column, vector) for column, vector in zip(columns, vectors, strict=True)])


def over_parts(
    curvature: Curvature,
    samples: Samples,
    linearize: Callable[[Part], Callable[[], BlockOperator]],
    memory_budget: int,
) -> BlockOperator:
    """The matrix on all parts of the samples.

    One part is linearized once. Of several, the first are kept for as long as ``memory_budget`` bytes
    last, and the others are linearized anew for each product, on the same random numbers.

    Args:
        curvature: Which matrix.
        samples: The samples.
        linearize: From a part to a function that linearizes it, the same way each time.
        memory_budget: How many bytes the parts that are kept may hold together.
    """
    makers = [linearize(part) for part in samples.parts]
    weights = [curvature.weight(samples, part) for part in samples.parts]
    if len(makers) == 1:
        operator = makers[0]()
        return operator if weights[0] == 1.0 else Scaled(operator, weights[0])
    kept: list[BlockOperator | None] = [None] * len(makers)
    for index, make in enumerate(makers):
        if memory_budget <= 0:
            break
        operator = make()
        memory_budget -= operator.num_bytes
        if memory_budget < 0:
            break
        kept[index] = operator
    return _SumOfParts([block.size for block in samples.blocks], makers, weights, kept)


class _SumOfParts(BlockOperator):
    def __init__(
        self,
        sizes: Sequence[int],
        makers: Sequence[Callable[[], BlockOperator]],
        weights: Sequence[float],
        kept: Sequence[BlockOperator | None],
    ) -> None:
        self._sizes, self._makers, self._weights, self._kept = sizes, makers, weights, kept

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        return self._sum(lambda part: part.product(row, column, vector))

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        return self._sum(lambda part: part.gram(columns, vectors))

    def _sum(self, of: Callable[[BlockOperator], Tensor]) -> Tensor:
        total: Tensor | None = None
        for make, weight, kept in zip(self._makers, self._weights, self._kept, strict=True):
            own = of(kept or make())
            own = own.mul_(weight) if weight else own.zero_()
            total = own if total is None else total.add_(own)
        assert total is not None
        return total


def inner(halves: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> Tensor:
    """The products ``(J vᵢ)ᵀ (H J vⱼ)`` from all ``J v`` and ``H J v``: a matrix product for each output."""
    left, right = (zip(*own, strict=True) for own in zip(*halves, strict=True))
    flat = [[torch.stack([own.reshape(-1) for own in each]) for each in side] for side in (left, right)]
    return torch.stack([one @ other.T for one, other in zip(*flat, strict=True)]).sum(0)


def closeness(one: Tensor, other: Tensor, eps: float = 0.0, size: float = 0.0) -> tuple[float, float]:
    """The relative difference of two results that should be equal, and how large rounding may make it.

    Args:
        one: A result.
        other: The one to compare with.
        eps: The unit of rounding of the coarsest numbers in between, where these are coarser.
        size: How large the terms are that the result is a sum of. Where they cancel, only rounding is left.
    """
    eps = max(eps, torch.finfo(other.dtype).eps)
    (length,), (apart,) = read([torch.linalg.vector_norm(other), torch.linalg.vector_norm(one - other)])
    return apart / (max(length, eps**0.5 * size) or 1.0), eps**0.5


def coarsest(tensors: Iterable[Tensor]) -> float:
    """The largest unit of rounding of floating-point tensors."""
    return max((torch.finfo(own.dtype).eps for own in tensors if own.is_floating_point()), default=0.0)


def disagreement(
    operator: BlockOperator, reference: BlockOperator, index: int, like: Tensor, **rounding: float
) -> float | None:
    """How far two matrices that should be equal are apart on one vector, if by more than rounding.

    Args:
        operator: One matrix.
        reference: The other.
        index: The block.
        like: A tensor of the vector's type and device.
        rounding: As for ``closeness``.
    """
    vector = _numbers(operator.sizes[index], like)
    expected = reference.product(index, index, vector)
    difference, bound = closeness(operator.product(index, index, vector), expected, **rounding)
    return difference if difference > bound and bool(expected.isfinite().all()) else None


def probe(block: Block) -> Tensor:
    """A flat vector of a block, without any structure and the same each time."""
    return _numbers(block.size, block.params[0])


def _numbers(size: int, like: Tensor) -> Tensor:
    return torch.sin(torch.arange(size, device=like.device)).to(like.dtype)
