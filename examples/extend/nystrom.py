"""A preconditioner of one's own: invert the largest eigenvalues, as far as a few products show them.

    optimizer = BlockHF.martens(blocks.by_module(model), preconditioner=Nystrom(rank=20))

A preconditioner derives from ``Preconditioner``. ``prepare`` is called once a step and returns for each block
an approximate inverse: any object with ``@``, or ``None``. It may multiply with the matrix through
``operator``, run the objective on ``samples``, or ask ``curvature`` for random draws. What it keeps of a
block goes into ``state.of(block.name)``, all else into ``state.shared``. On a mesh ``samples.blocks`` are
this rank's blocks, and products are those on the samples of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockhf import BlockOperator, Curvature, LinearOperator, PolicyState, Preconditioner, Samples


@dataclass(frozen=True)
class Nystrom(Preconditioner):
    r"""The inverse of a low-rank approximation from a random sketch (Frangella, Tropp & Udell, 2023).

    With :math:`U \Lambda U^\top` the Nyström approximation of the block's matrix of rank ``r`` the inverse is

    .. math:: (\lambda_r + \lambda)\, U (\Lambda + \lambda)^{-1} U^\top + (I - U U^\top).

    A sketch takes as many products as its rank, so it pays where it is used for several steps or where CG
    takes many.

    Args:
        rank: Products for a sketch, and eigenvalues that are inverted.
        every: A new sketch at each so many steps.
        seed: Of the random vectors, which leave torch's own random numbers alone.
    """

    rank: int = 20
    every: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1 or self.every < 1:
            raise ValueError(f"rank and every are {self.rank} and {self.every}, but must be at least 1.")

    def prepare(
        self,
        samples: Samples,
        curvature: Curvature,
        operator: BlockOperator,
        dampings: Sequence[float],
        state: PolicyState,
    ) -> Sequence[LinearOperator | None]:
        num_steps = state.shared.get("num_steps", 0)
        state.shared["num_steps"] = num_steps + 1
        inverses: list[LinearOperator | None] = []
        for index, (block, damping) in enumerate(zip(samples.blocks, dampings, strict=True)):
            if operator.dense(index) is not None:  # solved exactly
                inverses.append(None)
                continue
            known, like = state.of(block.name), block.params[0]
            if num_steps % self.every == 0 or "vectors" not in known or len(known["vectors"]) != block.size:
                generator = torch.Generator(like.device).manual_seed(self.seed + num_steps)
                start = like.new_empty(block.size, min(self.rank, block.size)).normal_(generator=generator)
                known["vectors"], known["values"] = sketch(operator, index, start)
            vectors, values = known["vectors"].to(like), known["values"].to(like)
            least = torch.maximum(values[-1] + damping, 1e-6 * values[0]).clamp_min(1e-30)
            inverses.append(LowRank(vectors, least / torch.maximum(values + damping, least)))
        return inverses


@dataclass(frozen=True, eq=False)
class LowRank:
    """The identity, but for the span of some orthonormal vectors, each of which is multiplied by a factor.

    >>> LowRank(torch.tensor([[1.0], [0.0]]), torch.tensor([0.5])) @ torch.tensor([4.0, 3.0])
    tensor([2., 3.])
    """

    vectors: Tensor
    factors: Tensor

    def __matmul__(self, vector: Tensor) -> Tensor:
        return vector + self.vectors @ ((self.factors - 1) * (self.vectors.T @ vector))


def sketch(operator: BlockOperator, index: int, start: Tensor) -> tuple[Tensor, Tensor]:
    """Approximate eigenvectors and eigenvalues of a block, the largest first, from products with ``start``.

    Both are zero, which makes no preconditioner, where the matrix is not positive.
    """
    basis, _ = torch.linalg.qr(start)
    images = operator.products(index, index, basis)
    shift = torch.finfo(images.dtype).eps * torch.linalg.matrix_norm(images)
    shifted = images + shift * basis
    core = basis.T @ shifted
    triangle, failed = torch.linalg.cholesky_ex((core + core.T) / 2)
    if bool(failed) or not bool(shifted.isfinite().all()):
        return torch.zeros_like(basis), torch.zeros_like(basis[0])
    root = torch.linalg.solve_triangular(triangle, shifted.T, upper=False).T
    left, singular, _ = torch.linalg.svd(root, full_matrices=False)
    return left, (singular.square() - shift).clamp_min(0)
