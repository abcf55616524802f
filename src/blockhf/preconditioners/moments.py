"""Kronecker factors: second moments of inputs and cotangents, their sums and inverses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockhf._torch import saved
from blockhf.linalg import factorizable
from blockhf.preconditioners.parameter_uses import Use
from blockhf.ranks import Ranks

_OTHER = "other "
"""Before the names of sums over uses in which inputs belong to the other side of the matrix."""


@dataclass
class Totals:
    """Sums over positions, calls and parts."""

    sums: dict[tuple[str, str], dict[str, Tensor]] = field(default_factory=dict)

    def add(
        self, key: tuple[str, str], inputs: Tensor, cotangents: Tensor, positions: int, *, other_side: bool
    ) -> None:
        own = self.sums.setdefault(key, {})
        side = _OTHER if other_side else ""
        self._into(own, f"{side}inputs", inputs)
        self._into(own, f"{side}cotangents", cotangents)
        number = torch.full((), positions, dtype=torch.float32, device=inputs.device)
        self._into(own, f"{side}positions", number)

    def add_diagonal(self, key: tuple[str, str], diagonal: Tensor) -> None:
        self._into(self.sums.setdefault(key, {}), "diagonal", diagonal)

    def add_up(self, ranks: Ranks) -> None:
        """Over the processes that have the samples between them."""
        places = [(key, name) for key, own in self.sums.items() for name in own]
        if places:
            sums = ranks.sum([self.sums[key][name] for key, name in places])
            for (key, name), tensor in zip(places, sums, strict=True):
                self.sums[key][name] = tensor

    @staticmethod
    def _into(own: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        own[name] = own[name].add_(tensor) if name in own else tensor

    def finish(self) -> dict[tuple[str, str], dict[str, Tensor]]:
        for own in self.sums.values():
            for side in ("", _OTHER):
                if f"{side}positions" in own:
                    own[f"{side}inputs"] = own[f"{side}inputs"] / own.pop(f"{side}positions").clamp_min(1)
            if f"{_OTHER}inputs" in own:
                rows, columns = own.pop(f"{_OTHER}inputs"), own.pop(f"{_OTHER}cotangents")
                pair = (own["inputs"], own["cotangents"]), (columns, rows)
                own["inputs"], own["cotangents"] = sum_of_products(*pair)
        return self.sums


def sum_of_products(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """One Kronecker product for the sum of two, with the trace of the sum.

    Each of its factors is a mean of the two over their traces, weighted by the traces of the products.
    Where one of the products is zero it is the other one, but for a number that moves between the factors.
    """
    traces = [[_trace(factor) for factor in pair] for pair in (one, other)]
    weights = [left * right for left, right in traces]
    total = torch.stack(weights).sum()
    factors = []
    for place in (0, 1):
        shares = [
            weight / torch.where(own[place] * total > 0, own[place] * total, 1.0)
            for weight, own in zip(weights, traces, strict=True)
        ]
        pair = [pair[place] for pair in (one, other)]
        if any(factor.dim() > 1 for factor in pair):
            pair = [torch.diag(factor) if factor.dim() == 1 else factor for factor in pair]
        factors.append(pair[0] * shares[0] + pair[1] * shares[1])
    return factors[0], factors[1] * total


def _trace(factor: Tensor) -> Tensor:
    return factor.sum() if factor.dim() == 1 else factor.trace()


def moments(
    use: Use, gradient: Tensor, homogeneous: bool, max_size: int, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Second moments of inputs and cotangents, summed over positions, and how many these are.

    The positions are samples, places in a sequence or a picture; inputs with a bias end with a 1. The moments
    are of the parameter's ``dtype``, which under autocast is not that of the inputs.
    """
    if use.kind == "embedding":
        indices = saved(use.node, "indices").reshape(-1)
        size = saved(use.node, "weight_sym_argsize_0")
        # bincount() would wait for the device.
        counts = gradient.new_zeros(size).index_add_(0, indices, gradient.new_ones(len(indices)))
        rows = gradient.reshape(-1, gradient.shape[-1]).to(dtype)
        yield counts.to(dtype), _second_moment(rows, max_size), len(indices)
        return
    for inputs, cotangents in use.rows(gradient):
        inputs, cotangents = inputs.to(dtype), cotangents.to(dtype)
        if homogeneous:
            inputs = torch.cat([inputs, torch.ones_like(inputs[..., :1])], dim=-1)
        yield _second_moment(inputs, max_size), _second_moment(cotangents, max_size), inputs.shape[-2]


def _second_moment(rows: Tensor, max_size: int) -> Tensor:
    """A matrix, or its diagonal; of several groups a stack of matrices, or of diagonals with one row each."""
    if rows.shape[-1] <= max_size:
        return rows.mT @ rows
    return rows.square().sum(-2, keepdim=rows.dim() > 2)


def _diagonal(factor: Tensor) -> Tensor:
    if _is_diagonal(factor):
        return factor if factor.dim() == 1 else factor.squeeze(-2)
    return factor.diagonal(dim1=-2, dim2=-1)


def _is_diagonal(factor: Tensor) -> bool:
    return factor.dim() == 1 or factor.shape[-2] < factor.shape[-1]


def mean_eigenvalue(factor: Tensor) -> Tensor:
    """Of a factor, or of each in a stack."""
    return _diagonal(factor).mean(-1)


def damped_inverses(A: Tensor, S: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Of the factors of inputs and cotangents, with the damping split between them."""
    if A.shape[-1] == 1 or (A.dim() > 2 and S.shape[-1] == 1):  # there is nothing to split it with
        product = A * S
        shift = (1e-6 * mean_eigenvalue(product)).clamp_min(damping)
        inverses = inverse(product, shift), torch.ones_like(A if A.shape[-1] == 1 else S)
        return (inverses[1], inverses[0]) if A.shape[-1] == 1 else inverses
    mean_A, mean_S, root = mean_eigenvalue(A), mean_eigenvalue(S), damping**0.5
    pi = torch.where((mean_A > 0) & (mean_S > 0), mean_A / mean_S, 1.0).sqrt()
    shifts = torch.maximum(pi * root, 1e-6 * mean_A), torch.maximum(root / pi, 1e-6 * mean_S)
    return inverse(A, shifts[0]), inverse(S, shifts[1])


def inverse(factor: Tensor, shift: Tensor) -> Tensor:
    """Of the factor with ``shift`` added to its diagonal; of a diagonal, a diagonal."""
    shift = shift.reshape(*shift.shape, *[1] * (factor.dim() - shift.dim()))
    if _is_diagonal(factor):
        return 1 / (factor + shift)
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    shifted = factorizable(factor + shift * identity)
    triangle, failed = torch.linalg.cholesky_ex(shifted)
    # Where it is singular, or rounding made it indefinite, its diagonal alone.
    diagonal = _diagonal(shifted)
    fallback = torch.diag_embed(torch.where(diagonal > 0, 1 / diagonal, 1.0))
    fine = (failed == 0)[..., None, None]
    found = torch.cholesky_inverse(torch.where(fine, triangle, identity.to(triangle.dtype)))
    fine = fine & found.isfinite().all(-1).all(-1)[..., None, None]
    return torch.where(fine, found, fallback).to(factor.dtype)


def times(factor: Tensor, matrix: Tensor) -> Tensor:
    """The product of a factor, which may be a diagonal, with a matrix; or of a stack with a stack."""
    if _is_diagonal(factor):
        return (factor[:, None] if factor.dim() == 1 else factor.mT) * matrix
    return factor @ matrix
