"""Low-rank preconditioners from a few products with the matrix (Frangella, Tropp & Udell, 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockhf.objective import Problem
from blockhf.operators import BlockMatrix, LinearOperator


class Nystrom:
    r"""Inverts the largest eigenvalues, as far as a random sketch shows them.

    With :math:`U \Lambda U^\top` the Nyström approximation of the block's matrix of rank ``r`` the inverse is

    .. math:: (\lambda_r + \lambda)\, U (\Lambda + \lambda)^{-1} U^\top + (I - U U^\top).

    The sketch takes as many products as its rank, so it pays where it is used for several steps or where CG
    takes many.

    Args:
        rank: Products for a sketch, and eigenvalues that are inverted.
        every: A new sketch at each so many steps.
        seed: Of the random vectors, which leave torch's own random numbers alone.
    """

    def __init__(self, rank: int = 20, *, every: int = 10, seed: int = 0) -> None:
        if rank < 1 or every < 1:
            raise ValueError(f"rank and every are {rank} and {every}, but must be at least 1.")
        self.rank, self.every, self.seed = rank, every, seed
        self._num_steps = 0
        self._sketches: dict[str, tuple[Tensor, Tensor]] = {}

    def prepare(
        self, problem: Problem, matrix: BlockMatrix, dampings: Sequence[float]
    ) -> Sequence[LinearOperator | None]:
        formed = getattr(matrix, "dense", {})
        due = self._num_steps % self.every == 0
        self._num_steps += 1
        inverses: list[LinearOperator | None] = []
        for index, (block, damping) in enumerate(zip(problem.blocks, dampings, strict=True)):
            if index in formed:
                inverses.append(None)
                continue
            like, known = block.params[0], self._sketches.get(block.name)
            if due or known is None or len(known[0]) != block.size:
                generator = torch.Generator(like.device).manual_seed(self.seed + self._num_steps)
                vectors = like.new_empty(block.size, min(self.rank, block.size)).normal_(generator=generator)
                self._sketches[block.name] = _sketch(matrix, index, vectors)
            vectors, values = (tensor.to(like) for tensor in self._sketches[block.name])
            least = torch.maximum(values[-1] + damping, 1e-6 * values[0])
            inverses.append(
                _LowRank(vectors, least / torch.maximum(values + damping, least.clamp_min(1e-30)))
            )
        return inverses

    def forget(self, names: set[str]) -> None:
        """Drop what is known of blocks that are solved elsewhere."""
        self._sketches = {key: own for key, own in self._sketches.items() if key not in names}

    def state_dict(self) -> dict[str, Any]:
        sketches = {name: [tensor.clone() for tensor in own] for name, own in self._sketches.items()}
        return {"num_steps": self._num_steps, "sketches": sketches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_steps = int(state["num_steps"])
        self._sketches = {
            name: (vectors.clone(), values.clone()) for name, (vectors, values) in state["sketches"].items()
        }


@dataclass(frozen=True, eq=False)
class _LowRank:
    vectors: Tensor
    factors: Tensor

    def __matmul__(self, vector: Tensor) -> Tensor:
        inside = self.vectors.T @ vector
        return vector + self.vectors @ ((self.factors - 1) * inside)


def _sketch(matrix: BlockMatrix, index: int, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Approximate eigenvectors and eigenvalues, the largest first, from products with random vectors."""
    start, _ = torch.linalg.qr(vectors)
    images = torch.stack([matrix.product(index, index, column) for column in start.T.contiguous()], dim=1)
    shift = torch.finfo(images.dtype).eps * torch.linalg.matrix_norm(images)
    shifted = images + shift * start
    core = start.T @ shifted
    triangle, failed = torch.linalg.cholesky_ex((core + core.T) / 2)
    if bool(failed) or not bool(shifted.isfinite().all()):  # not positive: no preconditioner
        return torch.zeros_like(start), torch.zeros_like(start[0])
    root = torch.linalg.solve_triangular(triangle, shifted.T, upper=False).T
    left, singular, _ = torch.linalg.svd(root, full_matrices=False)
    return left, (singular.square() - shift).clamp_min(0)
