"""Small matrices and vectors for the tests of solvers and operators."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def spd(size: int, seed: int = 0, condition: float = 100.0) -> Tensor:
    """A symmetric positive definite matrix with eigenvalues between 1 and ``condition``."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return (basis * torch.logspace(0, math.log10(condition), size, dtype=torch.float64)) @ basis.T


def vector(size: int, seed: int = 1) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def diag(*entries: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.diag(torch.tensor(entries, dtype=dtype))
