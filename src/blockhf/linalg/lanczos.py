"""Eigenvalues of a symmetric matrix from its products."""

from __future__ import annotations

import torch
from torch import Tensor

from blockhf.linalg.operators import LinearOperator


def lanczos(
    A: LinearOperator, start: Tensor, k: int, *, tol: float = 1e-6, max_steps: int = 300
) -> tuple[Tensor, Tensor]:
    """The ``k`` largest eigenvalues and their eigenvectors (Lanczos, 1950), orthogonalized anew at each step.

    Args:
        A: The matrix.
        start: A vector with a share of every eigenvector, e.g. a random one.
        k: How many.
        tol: The residual of each pair relative to the largest eigenvalue in size.
        max_steps: The most products.

    Returns:
        The eigenvalues, the largest first, and the eigenvectors as columns.

    >>> from blockhf.linalg import Dense
    >>> values, _ = lanczos(Dense(torch.diag(torch.tensor([1.0, 3.0, 2.0]))), torch.ones(3), 2)
    >>> values
    tensor([3.0000, 2.0000])
    """
    size = start.numel()
    basis = start.new_empty(min(max_steps, size), size)
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    vector = start / torch.linalg.vector_norm(start)
    for step in range(len(basis)):
        basis[step] = vector
        image = A @ vector
        diagonal.append(image @ vector)
        for _ in range(2):  # once leaves rounding errors that grow
            image = image - basis[: step + 1].T @ (basis[: step + 1] @ image)
        length = torch.linalg.vector_norm(image)
        values, vectors = _eigh(diagonal, beside)
        number = min(k, step + 1)
        largest = values.abs().max().clamp_min(torch.finfo(start.dtype).tiny)
        ends = (length * vectors[-1, -number:]).abs()
        is_invariant = bool(length <= torch.finfo(start.dtype).eps * largest)
        if (step + 1 >= k and bool((ends <= tol * largest).all())) or (is_invariant and step + 1 >= k):
            break
        if is_invariant:  # go on in another direction, of which the start vector had no share
            image = torch.sin(torch.arange(1, size + 1, device=start.device).to(start.dtype) * (step + 1))
            image = image - basis[: step + 1].T @ (basis[: step + 1] @ image)
            vector, length = image / torch.linalg.vector_norm(image), torch.zeros_like(length)
        else:
            vector = image / length
        beside.append(length)
    found = values[-number:].flip(0)
    return found, (basis[: len(diagonal)].T @ vectors[:, -number:]).flip(1)


def _eigh(diagonal: list[Tensor], beside: list[Tensor]) -> tuple[Tensor, Tensor]:
    T = torch.diag(torch.stack(diagonal))
    if beside:
        off = torch.stack(beside)[: len(diagonal) - 1]
        T = T + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(T)
    return values, vectors
