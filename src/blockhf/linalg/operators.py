"""Symmetric matrices that are known only through their products. No autograd here."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from blockhf.scalars import read


class LinearOperator(Protocol):
    """A symmetric matrix known only through its products."""

    def __matmul__(self, vector: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Root:
    """A symmetric matrix as ``Rᵀ R``, and what the gradient is made of.

    Attributes:
        rows: ``R``: as many rows as there are samples times outputs, as many columns as parameters.
        slopes: The vector ``s`` with ``Rᵀ s`` the gradient on the same samples, where that is in the range of
            ``Rᵀ``.
        units: What the columns were divided by.
    """

    rows: Tensor
    slopes: Tensor
    units: Tensor | float = 1.0
    _attempts: dict[float, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _factors: dict[float, Tensor | None] = field(default_factory=dict, repr=False)

    @property
    def is_wide(self) -> bool:
        """Whether there are fewer rows than parameters."""
        return self.rows.shape[0] < self.rows.shape[1]

    @cached_property
    def smaller(self) -> Tensor:
        """The lower triangle of ``R Rᵀ`` or ``Rᵀ R``, whichever is smaller; what is above it is not set."""
        return _lower_gram(self.rows if self.is_wide else self.rows.T)

    @cached_property
    def mean_diagonal(self) -> float:
        """Of ``Rᵀ R``."""
        return float(self.rows.square().sum()) / max(1, self.rows.shape[1])

    def in_own_units(self) -> Root:
        """The same with each parameter in units in which its curvature is 1."""
        units = torch.linalg.vector_norm(self.rows, dim=0)
        units = torch.where(units > 0, units, 1.0)
        return Root(self.rows / units, self.slopes, units)

    def attempt(self, damping: float) -> tuple[Tensor, Tensor]:
        """The Cholesky factor of the smaller matrix and damping, and whether there is none, not looked at."""
        if damping not in self._attempts:
            self._attempts.clear()
            damped = self.smaller.clone()
            damped.diagonal().add_(damping)
            factor, failed = torch.linalg.cholesky_ex(damped)
            # A singular matrix has a factor too, if rounding likes, whose last pivots are rounding alone.
            rounding = 4 * torch.finfo(damped.dtype).eps * damped.diagonal().mean()
            is_singular = (factor.diagonal().square() <= rounding).any()
            self._attempts[damping] = factor, failed.bool() | is_singular
        return self._attempts[damping]

    def factor(self, damping: float) -> Tensor | None:
        """The Cholesky factor of the smaller matrix and damping, with as much more as rounding asks for."""
        if damping not in self._factors:
            self._factors.clear()
            factor, failed = self.attempt(damping)
            self._factors[damping] = _cholesky(self.smaller, damping) if bool(failed) else factor
        return self._factors[damping]

    def solve(self, target: Tensor, factor: Tensor) -> Tensor:
        """``-(Rᵀ R + damping I)⁻¹ Rᵀ target`` by a factor, on the smaller side and without a subtraction."""
        if self.is_wide:
            return -(self.rows.T @ torch.cholesky_solve(target[:, None], factor)[:, 0])
        return -torch.cholesky_solve((self.rows.T @ target)[:, None], factor)[:, 0]


def _lower_gram(A: Tensor, num_strips: int = 8) -> Tensor:
    """The lower triangle of ``A Aᵀ``, in strips: of what lies above it, but a little is computed."""
    size = A.shape[0]
    if size < 64 * num_strips:
        return A @ A.T
    gram = A.new_zeros(size, size)
    width = -(-size // num_strips)
    for start in range(0, size, width):
        stop = min(start + width, size)
        torch.matmul(A[start:stop], A[:stop].T, out=gram[start:stop, :stop])
    return gram


def _cholesky(K: Tensor, damping: float) -> Tensor | None:
    """The factor of ``K + damping I`` with a little more on the diagonal, for rounding's sake.

    What is added makes an error as large as it is, and rounding one of its own size over what is added.
    """
    damped, diagonal = K.clone(), K.diagonal()
    extra = torch.finfo(K.dtype).eps ** 0.7 * float(diagonal.mean())
    for _ in range(5):
        damped.diagonal().copy_(diagonal + damping + extra)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            found: Tensor = factor
            return found
        extra *= 10
    return None


def measure_roots(roots: Sequence[Root]) -> None:
    """Look at the mean diagonals of all of these, by one wait for the device."""
    new = [root for root in roots if "mean_diagonal" not in vars(root)]
    for root, (square,) in zip(new, read([root.rows.square().sum() for root in new]), strict=True):
        vars(root)["mean_diagonal"] = square / max(1, root.rows.shape[1])


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

    def root(self, block: int) -> Root | None:
        """The square root of a diagonal block, where it is stored."""
        return None

    def scaled_outputs(self, outputs: Sequence[Sequence[Tensor]] | None = None) -> Tensor | None:
        """From the outputs, part by part, to values whose Jacobian the roots are, where roots are stored.

        Without outputs, the values at the point itself.
        """
        return None

    def mean_diagonal(self, block: int, like: Tensor) -> float:
        """The mean of the diagonal of a diagonal block; where nothing is stored, an estimate by one product.

        The estimate is Hutchinson's, with the same signs each time; ``like`` is a vector of the block.
        """
        if (root := self.root(block)) is not None:
            return root.mean_diagonal
        if (matrix := self.dense(block)) is not None:
            return float(matrix.diagonal().mean())
        generator = torch.Generator("cpu").manual_seed(0)
        signs = torch.randint(0, 2, (self.sizes[block],), generator=generator, device="cpu").to(like) * 2 - 1
        return float(signs @ self.product(block, block, signs)) / len(signs)

    def has_influence(self, block: int) -> bool:
        """Whether the block's rows can be anything but zero, as far as is known."""
        return True

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

    def root(self, block: int) -> Root | None:
        return self.operator.root(block)

    def scaled_outputs(self, outputs: Sequence[Sequence[Tensor]] | None = None) -> Tensor | None:
        return self.operator.scaled_outputs(outputs)

    def mean_diagonal(self, block: int, like: Tensor) -> float:
        return self.operator.mean_diagonal(block, like)

    def has_influence(self, block: int) -> bool:
        return self.operator.has_influence(block)

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
        return self._scaled(super().product(row, column, vector))

    def products(self, row: int, column: int, vectors: Tensor) -> Tensor:
        return self._scaled(super().products(row, column, vectors))

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        return self._scaled(super().gram(columns, vectors))

    def dense(self, block: int) -> Tensor | None:
        matrix = super().dense(block)
        return None if matrix is None else self._scaled(matrix)

    def root(self, block: int) -> Root | None:
        root = super().root(block)
        if root is None or self.weight < 0:
            return None
        scale = self.weight**0.5
        return Root(root.rows * scale, root.slopes * scale)

    def scaled_outputs(self, outputs: Sequence[Sequence[Tensor]] | None = None) -> Tensor | None:
        scaled = super().scaled_outputs(outputs)
        return None if scaled is None or self.weight < 0 else scaled * self.weight**0.5

    def mean_diagonal(self, block: int, like: Tensor) -> float:
        return self.weight * super().mean_diagonal(block, like)

    def _scaled(self, result: Tensor) -> Tensor:
        return result * self.weight if self.weight else torch.zeros_like(result)


class Shifted(ForwardingOperator):
    """Another matrix with a number added to the diagonal of each block.

    >>> Shifted(DenseBlocks({0: torch.eye(2)}), [0.5]).product(0, 0, torch.ones(2))
    tensor([1.5000, 1.5000])
    """

    def __init__(self, operator: BlockOperator, shifts: Sequence[float]) -> None:
        super().__init__(operator)
        self.shifts = shifts

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        return self._shifted(super().product(row, column, vector), row, column, vector)

    def products(self, row: int, column: int, vectors: Tensor) -> Tensor:
        return self._shifted(super().products(row, column, vectors), row, column, vectors)

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        pairs = list(zip(columns, vectors, strict=True))
        inner = [
            [self.shifts[row] * (u @ v) if row == column else u.new_zeros(()) for column, v in pairs]
            for row, u in pairs
        ]
        return super().gram(columns, vectors) + torch.stack([torch.stack(own) for own in inner])

    def dense(self, block: int) -> Tensor | None:
        matrix = super().dense(block)
        return None if matrix is None else plus_diagonal(matrix, self.shifts[block])

    def root(self, block: int) -> Root | None:
        """Only where nothing is added: the sum's root would have a row for each parameter."""
        return None if self.shifts[block] else super().root(block)

    def mean_diagonal(self, block: int, like: Tensor) -> float:
        return super().mean_diagonal(block, like) + self.shifts[block]

    def has_influence(self, block: int) -> bool:
        return self.shifts[block] != 0 or super().has_influence(block)

    def _shifted(self, result: Tensor, row: int, column: int, vector: Tensor) -> Tensor:
        return result.add(vector, alpha=self.shifts[row]) if row == column else result


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

    def has_influence(self, block: int) -> bool:
        return block in self.stored or self._other is None or self.other.has_influence(block)


def plus_diagonal(matrix: Tensor, shift: float) -> Tensor:
    """A copy of the matrix with a number added to its diagonal."""
    result = matrix.clone()
    result.diagonal().add_(shift)
    return result


def factorizable(matrix: Tensor) -> Tensor:
    """The matrix in a precision that can be factorized: float32 at the least."""
    return matrix.float() if matrix.dtype in (torch.float16, torch.bfloat16) else matrix


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
