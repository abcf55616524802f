"""Symmetric matrices that are known only through their products. No autograd here."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class LinearOperator(Protocol):
    """A symmetric matrix known only through its products."""

    def __matmul__(self, vector: Tensor, /) -> Tensor: ...


class BlockOperator(abc.ABC):
    """A symmetric matrix in blocks, known through its products.

    Everything that may be asked of such a matrix is a method here, with a default where one exists. A wrapper
    derives from ``ForwardingOperator`` and overrides what it changes, so that no ability is lost on the way.
    """

    @property
    @abc.abstractmethod
    def sizes(self) -> Sequence[int]:
        """Rows of each block."""

    @abc.abstractmethod
    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        """The block at ``row`` and ``column``, times a flat vector of the column's block."""

    def products(self, row: int, column: int, vectors: Tensor) -> Tensor:
        """The same for the columns of a matrix."""
        return torch.stack([self.product(row, column, own) for own in vectors.T.contiguous()], dim=1)

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        """The products ``vᵢᵀ A vⱼ`` of some vectors, each of the block that ``columns`` names for it."""
        rows = sorted(set(columns))
        result = vectors[0].new_empty(len(vectors), len(vectors))
        for j, (column, vector) in enumerate(zip(columns, vectors, strict=True)):
            products = {row: self.product(row, column, vector) for row in rows}
            result[:, j] = torch.stack(
                [other @ products[row] for row, other in zip(columns, vectors, strict=True)]
            )
        return result

    def dense(self, block: int) -> Tensor | None:
        """The matrix of a diagonal block, where it is stored."""
        return None

    def note(self, block: int) -> str:
        """How products with a block are made, for the report."""
        return ""

    @property
    def num_bytes(self) -> int:
        """Memory that the products hold on to, where it is known."""
        return 0


class ForwardingOperator(BlockOperator):
    """A matrix that does all as another one does; the base class of wrappers."""

    def __init__(self, operator: BlockOperator) -> None:
        self.operator = operator

    @property
    def sizes(self) -> Sequence[int]:
        return self.operator.sizes

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        return self.operator.product(row, column, vector)

    def products(self, row: int, column: int, vectors: Tensor) -> Tensor:
        return self.operator.products(row, column, vectors)

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        return self.operator.gram(columns, vectors)

    def dense(self, block: int) -> Tensor | None:
        return self.operator.dense(block)

    def note(self, block: int) -> str:
        return self.operator.note(block)

    @property
    def num_bytes(self) -> int:
        return self.operator.num_bytes


class Scaled(ForwardingOperator):
    """``weight`` times another matrix.

    >>> Scaled(DenseBlocks({0: torch.eye(2)}), 3.0).product(0, 0, torch.ones(2))
    tensor([3., 3.])
    """

    def __init__(self, operator: BlockOperator, weight: float) -> None:
        super().__init__(operator)
        self.weight = weight

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        return super().product(row, column, vector) * self.weight

    def products(self, row: int, column: int, vectors: Tensor) -> Tensor:
        return super().products(row, column, vectors) * self.weight

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        return super().gram(columns, vectors) * self.weight

    def dense(self, block: int) -> Tensor | None:
        matrix = super().dense(block)
        return None if matrix is None else matrix * self.weight


class Described(ForwardingOperator):
    """A matrix with a note on each of its blocks, written when the report asks for it."""

    def __init__(self, operator: BlockOperator, describe: Callable[[], Sequence[str]]) -> None:
        super().__init__(operator)
        self._describe = describe

    def note(self, block: int) -> str:
        return self._describe()[block]


class CountedProducts(ForwardingOperator):
    """A matrix that counts the products with each of its columns of blocks."""

    def __init__(self, operator: BlockOperator) -> None:
        super().__init__(operator)
        self.num_products = [0] * len(operator.sizes)

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        self.num_products[column] += 1
        return super().product(row, column, vector)

    def products(self, row: int, column: int, vectors: Tensor) -> Tensor:
        self.num_products[column] += vectors.shape[1]
        return super().products(row, column, vectors)


class DenseBlocks(BlockOperator):
    """Diagonal blocks of which some are stored; all other products are those of another matrix.

    Args:
        stored: The matrices, by the block's index.
        other: Called when a product that is not stored is first asked for; without it there is none.
    """

    def __init__(
        self, stored: Mapping[int, Tensor], other: Callable[[], BlockOperator] | None = None
    ) -> None:
        self.stored, self._other = dict(stored), other

    @property
    def other(self) -> BlockOperator:
        if self._other is None:
            raise ValueError("The matrix has its stored diagonal blocks alone.")
        return self._other()

    @property
    def sizes(self) -> Sequence[int]:
        if self._other is None:
            return [len(self.stored[index]) for index in range(len(self.stored))]
        return self.other.sizes

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        if row == column and row in self.stored:
            return self.stored[row] @ vector
        return self.other.product(row, column, vector)

    def products(self, row: int, column: int, vectors: Tensor) -> Tensor:
        if row == column and row in self.stored:
            return self.stored[row] @ vectors
        return self.other.products(row, column, vectors)

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        return super().gram(columns, vectors) if self._other is None else self.other.gram(columns, vectors)

    def dense(self, block: int) -> Tensor | None:
        return self.stored.get(block)


@dataclass(frozen=True)
class DiagonalBlock:
    """One block on the diagonal of a matrix in blocks."""

    operator: BlockOperator
    index: int

    def __matmul__(self, vector: Tensor) -> Tensor:
        return self.operator.product(self.index, self.index, vector)


@dataclass(frozen=True)
class Damped:
    """``operator + damping * I``, never formed.

    >>> Damped(Dense(torch.eye(2)), 0.5) @ torch.ones(2)
    tensor([1.5000, 1.5000])
    """

    operator: LinearOperator
    damping: float

    def __matmul__(self, vector: Tensor) -> Tensor:
        product = self.operator @ vector
        return product if self.damping == 0.0 else product.add(vector, alpha=self.damping)


@dataclass(frozen=True)
class Dense:
    """An explicitly stored matrix."""

    matrix: Tensor

    def __matmul__(self, vector: Tensor) -> Tensor:
        return self.matrix @ vector
