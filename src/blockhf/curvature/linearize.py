"""A model's curvature without the optimizer: linearize once, then multiply, solve, look at the spectrum."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from blockhf.blocks import Block, check_block
from blockhf.curvature.auto import Auto
from blockhf.curvature.base import Curvature, Products
from blockhf.curvature.gauss_newton import GaussNewton
from blockhf.isolation import RandomState
from blockhf.linalg import (
    BlockOperator,
    Damped,
    DiagonalBlock,
    Solution,
    conjugate_gradient,
    lanczos,
)
from blockhf.objective import Objective, Reduction
from blockhf.policy import PolicyState
from blockhf.samples import Part, Samples


@contextlib.contextmanager
def linearize(
    objective: Objective,
    batch: Any = None,
    groups: Sequence[Mapping[str, Any]] = (),
    *,
    curvature: Curvature | None = None,
    products: Products | None = None,
    reduction: Reduction = "mean",
    micro_batch_size: int | None = None,
    num_products: int = 100,
) -> Iterator[CurvatureMatrix]:
    """The curvature of an objective at the current parameters, for as long as the context lasts.

    Parameters, buffers and torch's random numbers stay as they are. Nothing of the graph outlives the
    context. The matrix is that of the parameters as they are when the context begins: do not change them
    inside.

    Args:
        objective: Returns outputs and loss for a batch, or without arguments if there is no batch.
        batch: The samples: any nesting of tensors whose first dimension is that of the samples.
        groups: The blocks, as from ``blocks.by_layer(model)``.
        curvature: Which matrix; ``GaussNewton()`` by default.
        products: How to multiply with it; ``Auto()`` by default.
        reduction: Whether the objective's loss is the mean or the sum over its samples.
        micro_batch_size: How many samples are in memory at a time.
        num_products: About how many products with each block will be asked for; ``Auto`` goes by it.

    Example:
        >>> from torch import nn
        >>> from blockhf import blocks, curvature
        >>> model, inputs = nn.Linear(2, 1, bias=False), torch.eye(2)
        >>> def objective(batch):
        ...     outputs = model(batch)
        ...     return outputs, outputs.square().sum(1).mean()
        >>> with curvature.linearize(objective, inputs, blocks.by_layer(model)) as G:
        ...     G @ torch.ones(2), G.shape
        (tensor([1., 1.]), (2, 2))
    """
    blocks = [as_block(index, group) for index, group in enumerate(groups)]
    if not blocks:
        raise ValueError("There are no groups. Pass the blocks, e.g. blocks.by_layer(model).")
    options: dict[str, Any] = {"reduction": reduction, "micro_batch_size": micro_batch_size}
    matrix = CurvatureMatrix(
        objective, batch, blocks, curvature or GaussNewton(), products or Auto(), num_products, options
    )
    with torch.enable_grad():
        try:
            yield matrix
        finally:
            matrix.release()


class SymmetricMatrix(abc.ABC):
    """A symmetric matrix known through its products: multiply, solve, look at its spectrum."""

    @property
    @abc.abstractmethod
    def operator(self) -> DiagonalBlock:
        """The block of an operator that this matrix is."""

    @property
    @abc.abstractmethod
    def like(self) -> Tensor:
        """A vector of the size, type and device of those that the matrix is multiplied with."""

    @property
    def stored(self) -> Tensor | None:
        """The matrix itself, where there is one."""
        return self.operator.operator.dense(self.operator.index)

    @property
    def shape(self) -> tuple[int, int]:
        return self.like.numel(), self.like.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """The product with a flat vector, or with each column of a matrix."""
        if vectors.dim() not in (1, 2) or len(vectors) != self.shape[1]:
            raise ValueError(
                f"The matrix is {self.shape[0]} x {self.shape[1]}, and cannot be multiplied with a tensor of "
                f"shape {tuple(vectors.shape)}. Pass a flat vector, or a matrix of such columns."
            )
        vectors = vectors.detach()
        if vectors.dim() == 1:
            return (self.operator @ vectors).detach()
        if self.stored is not None:
            return self.stored @ vectors
        return torch.stack([self @ column for column in vectors.T.contiguous()], dim=1)

    def to_dense(self) -> Tensor:
        """The matrix itself: the stored one, or as many products as it has columns."""
        if self.stored is not None:
            return self.stored.clone()
        return self @ torch.eye(self.shape[0], dtype=self.dtype, device=self.like.device)

    def solve(
        self, b: Tensor, *, damping: float = 0.0, rtol: float = 1e-6, max_steps: int = 1000
    ) -> Solution:
        """The solution of ``(G + damping I) x = b`` by conjugate gradients, and why they stopped."""
        damped = Damped(self, damping)
        return conjugate_gradient(damped, b.detach(), rtol=rtol, max_steps=max_steps)

    def eigsh(
        self, k: int = 10, *, tol: float = 1e-6, max_steps: int = 300, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The ``k`` largest eigenvalues, the largest first, and their eigenvectors as columns (Lanczos).

        Args:
            k: How many.
            tol: The residual of each pair relative to the largest eigenvalue.
            max_steps: The most products; pairs that have not converged by then are as they are.
            seed: Of the start vector, which leaves torch's own random numbers alone.
        """
        if not 1 <= k <= self.shape[0]:
            raise ValueError(f"k is {k}, but must be between 1 and {self.shape[0]}, the size of the matrix.")
        return lanczos(self, self._draw(seed), k, tol=tol, max_steps=max_steps)

    def trace(self, *, num_draws: int = 100, seed: int = 0) -> Tensor:
        """The sum of the diagonal: exact where the matrix is stored, else Hutchinson's estimate."""
        return self.diagonal(num_draws=num_draws, seed=seed).sum()

    def diagonal(self, *, num_draws: int = 100, seed: int = 0) -> Tensor:
        """The diagonal: exact where the matrix is stored, else the mean of ``z ∘ G z`` over random signs.

        Bekas et al. (2007). The estimate has an error of the size of the other entries of a row, divided by
        the root of ``num_draws``.
        """
        if self.stored is not None:
            return self.stored.diagonal().clone()
        total = torch.zeros_like(self.like)
        for draw in range(num_draws):
            signs = self._draw(seed + draw).sign()
            total.add_(signs * (self @ signs), alpha=1 / num_draws)
        return total

    def to_scipy(self) -> Any:
        """A ``scipy.sparse.linalg.LinearOperator``, for all of scipy's iterative methods."""
        try:
            from scipy.sparse.linalg import LinearOperator as ScipyOperator  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError("to_scipy() needs scipy. Install it: pip install scipy.") from error

        def product(vector: Any) -> Any:
            own = torch.as_tensor(vector).to(self.like).reshape(-1)
            return (self @ own).cpu().numpy()

        return ScipyOperator(self.shape, matvec=product, rmatvec=product, dtype=self.like.cpu().numpy().dtype)

    def _draw(self, seed: int) -> Tensor:
        generator = torch.Generator(self.like.device).manual_seed(seed)
        return torch.empty_like(self.like).normal_(generator=generator)


class BlockMatrix(SymmetricMatrix):
    """A block on the diagonal."""

    def __init__(self, operator: DiagonalBlock, like: Tensor) -> None:
        self._operator, self._like = operator, like

    @property
    def operator(self) -> DiagonalBlock:
        return self._operator

    @property
    def like(self) -> Tensor:
        return self._like


class CurvatureMatrix(SymmetricMatrix):
    """The curvature of all blocks together; ``G["encoder"]`` is a block on its diagonal.

    The whole matrix and its diagonal blocks are linearized when they are first asked for.
    """

    def __init__(
        self,
        objective: Objective,
        batch: Any,
        blocks: Sequence[Block],
        curvature: Curvature,
        products: Products,
        num_products: int,
        options: Mapping[str, Any],
    ) -> None:
        self.blocks = blocks
        self._arguments = (objective, batch)
        self._curvature, self._products = curvature, products
        self._num_products, self._options = num_products, options
        self._state = PolicyState()
        # What is random is drawn alike for the whole and for its blocks, and is not missed by others.
        devices = sorted({block.params[0].device for block in blocks}, key=str)
        self._start = Part(None, start=RandomState(devices))

    @property
    def names(self) -> list[str]:
        """The names of the blocks."""
        return [block.name for block in self.blocks]

    def __getitem__(self, name: str) -> SymmetricMatrix:
        if name not in self.names:
            raise KeyError(f"There is no block {name!r}. There are {', '.join(map(repr, self.names))}.")
        index = self.names.index(name)
        return BlockMatrix(DiagonalBlock(self.diagonal_blocks, index), self.blocks[index].values())

    def dense(self, name: str) -> Tensor:
        """The matrix of a diagonal block."""
        return self[name].to_dense()

    @cached_property
    def diagonal_blocks(self) -> BlockOperator:
        """All blocks as one operator, with the products between them."""
        return self._linearized(self.blocks)

    @cached_property
    def operator(self) -> DiagonalBlock:
        if len(self.blocks) == 1:
            return DiagonalBlock(self.diagonal_blocks, 0)
        whole = Block("all", tuple(param for block in self.blocks for param in block.params))
        check_block("all", [(f"number {index}", param) for index, param in enumerate(whole.params)])
        return DiagonalBlock(self._linearized([whole]), 0)

    @cached_property
    def like(self) -> Tensor:
        return torch.cat([block.values() for block in self.blocks])

    def _linearized(self, blocks: Sequence[Block]) -> BlockOperator:
        samples = Samples(*self._arguments, blocks, like=[self._start], **self._options)
        budget = [self._num_products] * len(blocks)
        return self._products.linearize(self._curvature, samples, budget, self._state)

    def release(self) -> None:
        """Let go of graphs and residuals; the matrix is of no more use."""
        for name in ("diagonal_blocks", "operator"):
            self.__dict__.pop(name, None)
        self._state.cache.clear()


def as_block(index: int, group: Mapping[str, Any]) -> Block:
    """The block that a parameter group is."""
    params = [item[1] if isinstance(item, tuple) else item for item in group["params"]]
    name = str(group.get("name", f"block{index}"))
    check_block(name, [(f"number {place}", param) for place, param in enumerate(params)])
    return Block(name, tuple(params))
