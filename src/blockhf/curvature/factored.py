"""Square roots of Gauss-Newton blocks: the Jacobians themselves, scaled by the root of the loss's curvature.

``G = Rᵀ R`` with ``R`` of as many rows as there are samples times outputs. Products take two passes over
``R``, and a solver can factorize whichever of ``Rᵀ R`` and ``R Rᵀ`` is smaller. The gradient is ``Rᵀ s``, so
systems can be solved among the samples without a subtraction, which keeps all digits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from blockhf.batches import lengths
from blockhf.curvature.base import Curvature, Products, closeness, coarsest, disagreement
from blockhf.curvature.double_backward import DoubleBackward
from blockhf.curvature.gauss_newton import GaussNewton
from blockhf.curvature.jacobian import FormingError, PerSampleJacobian, SampleHessians
from blockhf.ledger import PRODUCT
from blockhf.linalg import BlockOperator, Described, Root
from blockhf.objective import Evaluation, check_outputs
from blockhf.policy import PolicyState
from blockhf.samples import Part, Samples

_CONCAVE = 0.01
"""Negative curvature of the loss up to this share of the largest is taken for rounding, and left out."""


_Scales = Sequence[tuple[Sequence[int], Tensor]]
_At = tuple[Sequence[Tensor], _Scales]
"""The outputs at the point, and what they are scaled by, kind by kind."""


def price(num_rows: int, sizes: Sequence[int], gradient: float) -> float:
    """What exact solutions of all blocks cost, in products with a Gauss-Newton matrix.

    Args:
        num_rows: Samples times outputs.
        sizes: Parameters of the blocks.
        gradient: Counted operations of a gradient.
    """
    sides = [min(num_rows, size) for size in sizes]
    exact = sum(2 * num_rows * size * side + side**3 / 3 for size, side in zip(sizes, sides, strict=True))
    return exact / (PRODUCT * gradient)


@dataclass(frozen=True)
class Factored(Products):
    """Products with Gauss-Newton matrices whose square roots are stored.

    For losses that are convex in the outputs, on samples that do not see each other. Memory and counted
    operations set the limits, and the number of parameters or samples does not.

    Args:
        memory_budget: How many bytes the Jacobians of all blocks may take.
        other: How to multiply where there is no root to be stored; without it, ``linearize`` raises
            ``FormingError``.
        warns: Whether a warning says once that there is none.
        worth: How many products an exact solution of all blocks may cost, by counted operations; ``None``
            stands for any number.
    """

    memory_budget: int = 2**31
    other: Products | None = None
    warns: bool = True
    worth: int | None = None

    def linearize(
        self, curvature: Curvature, samples: Samples, num_products: Sequence[int], state: PolicyState
    ) -> BlockOperator:
        """The matrix, with its roots where it has them."""
        if self.other is None:
            return self._with_roots(curvature, samples, state)
        reason = state.shared.get("no_root")
        if reason is None:
            found = None
            try:
                found = self._with_roots(curvature, samples, state)
            except FormingError as error:
                reason = str(error)
            if samples.ranks.agree(found is not None, samples.devices[0]) and found is not None:
                return found
            reason = reason or "another process cannot"
        operator = self.other.linearize(curvature, samples, num_products, state)  # or else the user's mistake
        if "no_root" not in state.shared:
            state.shared["no_root"] = reason
            if self.warns:
                warnings.warn(
                    f"Jacobians cannot be stored: {reason}. Systems are solved by conjugate gradients "
                    "instead.",
                    stacklevel=2,
                )
        notes = cache(lambda: [operator.note(index) for index in range(len(samples.blocks))])
        return Described(operator, lambda: [f"{note} (no Jacobian stored: {reason})" for note in notes()])

    def _with_roots(self, curvature: Curvature, samples: Samples, state: PolicyState) -> BlockOperator:
        if not isinstance(curvature, GaussNewton):
            raise FormingError(f"{type(curvature).__name__} has no stored root, only GaussNewton has")
        rows: list[list[Tensor]] = [[] for _ in samples.blocks]
        self._check_worth(samples)
        slopes, scales = [], []
        for part in samples.parts:
            found, own, at = (
                self._root_of_all(samples, part)
                if samples.batch is None
                else self._root(samples, part, state.cache)
            )
            slopes.append(own)
            scales.append(at)
            for kept, new in zip(rows, found, strict=True):
                kept.append(new)
        roots = [Root(torch.cat(own), torch.cat(slopes)) for own in rows]
        operator = _Factored(roots, scales)
        checked: set[Any] = state.cache.setdefault("factored", set())
        key = samples.scope
        if key not in checked:
            with samples.ledger.once():
                self._check(curvature, samples, operator)
            checked.add(key)
        return operator

    def _root(self, samples: Samples, part: Part, cache: dict[Any, Any]) -> tuple[list[Tensor], Tensor, _At]:
        """Sample by sample; samples of several kinds one kind after the other."""
        evaluation = samples.evaluate(part)
        pieces: list[list[Tensor]] = [[] for _ in samples.blocks]
        slopes, scales = [], []
        for length, chosen in _kinds(evaluation, lengths(part.batch)):
            own = replace(evaluation, outputs=tuple(evaluation.outputs[index] for index in chosen))
            own = own if length is None else replace(own, num_samples=length)
            hessians = SampleHessians(own).dense()
            num_outputs = hessians.shape[-1]
            size = num_outputs * sum(block.size for block in samples.blocks) * hessians.element_size()
            self._check_size(samples.share.total * size)
            # Where nothing counts, the loss may be no number.
            weighed = hessians * part.weight if part.weight else torch.zeros_like(hessians)
            lower, along = _scaled_slopes(own, weighed, part.weight)
            slopes.append(along)
            scales.append((chosen, lower))
            kind = (length, None if length is None else chosen)
            jacobian = PerSampleJacobian(samples, part, samples.blocks, num_outputs, cache, *kind)
            names = (*((block.name, block.size) for block in samples.blocks), length)
            with samples.ledger.counting("forming", part.shapes, names):
                for kept, rows in zip(pieces, _rows(jacobian, lower, max(1, 2**26 // size)), strict=True):
                    kept += rows
        rows = [torch.cat(kept) for kept in pieces]
        return rows, torch.cat(slopes), (evaluation.detached().outputs, scales)

    def _root_of_all(self, samples: Samples, part: Part) -> tuple[list[Tensor], Tensor, _At]:
        """Of an objective without a batch, whose outputs are residuals of any shapes: row by row."""
        evaluation = samples.evaluate(part)
        curved, slopes = _diagonal_hessian(evaluation)
        size = sum(block.size for block in samples.blocks) * curved.element_size()
        self._check_size(len(curved) * size)
        if not bool((curved >= 0).all()):
            raise FormingError("the loss is not convex in the outputs")
        root = curved.sqrt()
        chunk = max(1, 2**26 // size)
        pieces: list[list[Tensor]] = [[] for _ in samples.blocks]
        shapes = [output.shape for output in evaluation.outputs]
        counts = [shape.numel() for shape in shapes]
        for start in range(0, len(curved), chunk):
            stop = min(start + chunk, len(curved))
            lines = torch.arange(start, stop, device=curved.device)
            directions = curved.new_zeros(len(lines), len(curved))
            directions[lines - start, lines] = root[start:stop]
            cotangents = [
                own.view(-1, *shape)
                for own, shape in zip(torch.split(directions, counts, 1), shapes, strict=True)
            ]
            rows = _pulled_back(evaluation.outputs, samples.params, cotangents)
            for block, kept in zip(samples.blocks, pieces, strict=True):
                own = [next(rows).reshape(stop - start, -1) for _ in block.params]
                kept.append(torch.cat(own, dim=1).detach())
        along = torch.where(root > 0, slopes / root, 0.0)
        chosen = range(len(evaluation.outputs))
        return [torch.cat(own) for own in pieces], along, (evaluation.detached().outputs, [(chosen, root)])

    def _check_worth(self, samples: Samples) -> None:
        """Raise where an exact solution takes many times the operations of many conjugate gradients."""
        if self.worth is None:
            return
        outputs = samples.structure.num_outputs
        number = samples.share.total
        num_rows = outputs if samples.batch is None else number * outputs
        sizes = [block.size for block in samples.blocks]
        counted = sum(samples.ledger.known("gradient", part.shapes) or 0 for part in samples.parts)
        gradient = max(counted * number // samples.num_samples, 6 * number * sum(sizes))
        # Without a batch each row is a backward pass over all samples.
        cost = price(num_rows, sizes, gradient) + (num_rows / PRODUCT if samples.batch is None else 0)
        if cost > self.worth:
            raise FormingError(
                f"an exact solution costs as much as {cost:.0f} products, which is more than {self.worth}"
            )

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self.memory_budget:
            raise FormingError(
                f"the Jacobians would take {num_bytes / 2**20:.0f} MiB, more than the memory_budget of "
                f"{self.memory_budget / 2**20:.0f} MiB"
            )

    @staticmethod
    def _check(curvature: Curvature, samples: Samples, operator: BlockOperator) -> None:
        evaluation = samples.evaluate(samples.parts[0], fresh=True)
        check_outputs(evaluation)
        eps = coarsest(evaluation.outputs)
        reference = DoubleBackward().operator(curvature, samples)
        for index, block in enumerate(samples.blocks):
            if off := disagreement(operator, reference, index, block.params[0], eps=eps):
                raise FormingError(
                    f"the samples see each other: the matrix of block {block.name!r}, put together sample by "
                    f"sample, is off by {off:.1e}"
                )


class _Factored(BlockOperator):
    def __init__(self, roots: Sequence[Root], parts: Sequence[_At]) -> None:
        self._roots = roots
        self._outputs, self._scales = zip(*parts, strict=True)

    def scaled_outputs(self, outputs: Sequence[Sequence[Tensor]] | None = None) -> Tensor:
        outputs = self._outputs if outputs is None else outputs
        return torch.cat([_scaled(own, lower) for own, lower in zip(outputs, self._scales, strict=True)])

    @property
    def sizes(self) -> Sequence[int]:
        return [root.rows.shape[1] for root in self._roots]

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        return self._roots[row].rows.T @ (self._roots[column].rows @ vector)

    def products(self, row: int, column: int, vectors: Tensor) -> Tensor:
        return self._roots[row].rows.T @ (self._roots[column].rows @ vectors)

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        images = torch.stack(
            [self._roots[column].rows @ vector for column, vector in zip(columns, vectors, strict=True)]
        )
        return images @ images.T

    def root(self, block: int) -> Root:
        return self._roots[block]

    def note(self, block: int) -> str:
        rows, columns = self._roots[block].rows.shape
        return f"Jacobian, {rows} x {columns}"


def _scaled(outputs: Sequence[Tensor], scales: _Scales) -> Tensor:
    """``Lᵀ`` times the outputs of each sample, or one number times each output."""
    pieces = []
    for chosen, lower in scales:
        own = [outputs[index] for index in chosen]
        if lower.dim() == 1:
            pieces.append(torch.cat([each.reshape(-1) for each in own]) * lower)
        else:
            flat = torch.cat([each.reshape(len(lower), -1) for each in own], dim=1)
            pieces.append((lower.transpose(1, 2) @ flat[..., None]).reshape(-1))
    return torch.cat(pieces)


def _kinds(evaluation: Evaluation, sizes: Mapping[Any, int]) -> Iterator[tuple[int | None, Sequence[int]]]:
    """For each kind of samples how many there are, and which outputs are of that kind.

    Kinds of one length need not be told apart: what has them in pairs has each of them.
    """
    firsts = [output.shape[0] if output.dim() > 0 else 0 for output in evaluation.outputs]
    if not sizes:
        yield None, range(len(firsts))
        return
    if unknown := sorted(set(firsts) - set(sizes.values())):
        raise FormingError(
            f"an output has {unknown[0]} rows, and there are {', '.join(map(str, sizes.values()))} samples "
            "of the kinds. Return the residuals of each kind as an output of their own"
        )
    for length in dict.fromkeys(firsts):
        yield length, [index for index, own in enumerate(firsts) if own == length]


def _rows(jacobian: PerSampleJacobian, lower: Tensor, chunk: int) -> list[list[Tensor]]:
    """For each block its rows, scaled, in pieces of so many samples."""
    pieces: list[list[Tensor]] = [[] for _ in jacobian.blocks]
    for start in range(0, len(lower), chunk):
        own = lower[start : start + chunk]
        for kept, rows in zip(pieces, jacobian.rows(start, start + len(own)), strict=True):
            rows = rows.view(len(own), own.shape[-1], -1)
            kept.append((rows * own if own.shape[-1] == 1 else own.transpose(1, 2) @ rows).flatten(0, 1))
    return pieces


def _diagonal_hessian(evaluation: Evaluation) -> tuple[Tensor, Tensor]:
    """The loss's second derivatives by each of the outputs, and the first ones, each in a row."""
    outputs = evaluation.outputs
    if any(output.dtype != outputs[0].dtype for output in outputs):
        raise FormingError("the outputs are of several types of numbers")
    slopes = torch.autograd.grad(
        evaluation.loss, outputs, create_graph=True, allow_unused=True, materialize_grads=True
    )
    flat = torch.cat([slope.reshape(-1) for slope in slopes])

    def product(vector: Tensor) -> Tensor:
        if not flat.requires_grad:
            return torch.zeros_like(flat)
        found = torch.autograd.grad(
            flat, outputs, vector, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return torch.cat([own.reshape(-1) for own in found])

    diagonal = product(torch.ones_like(flat)).detach()
    probe = torch.sin(torch.arange(1, len(flat) + 1, device=flat.device)).to(flat.dtype)
    off, rounding = closeness(product(probe).detach(), diagonal * probe)
    if off > rounding:
        raise FormingError(
            f"the loss ties outputs together: its curvature is off a diagonal one by {off:.1e}. Return as "
            "outputs the residuals whose squares the loss adds up"
        )
    return diagonal, flat.detach()


def _pulled_back(
    outputs: Sequence[Tensor], params: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> Iterator[Tensor]:
    """The products of several cotangents with the Jacobian, for each parameter."""
    try:
        batched = torch.autograd.grad(
            outputs,
            params,
            cotangents,
            retain_graph=True,
            is_grads_batched=True,
            allow_unused=True,
            materialize_grads=True,
        )
    except RuntimeError:  # an operation without a batching rule
        found = [
            torch.autograd.grad(
                outputs, params, own, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for own in zip(*cotangents, strict=True)
        ]
        batched = tuple(torch.stack(each) for each in zip(*found, strict=True))
    return iter(batched)


def _scaled_slopes(evaluation: Evaluation, hessians: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """The root ``L`` of each sample's ``H = L Lᵀ``, and ``L⁻¹`` times its slope, in a row.

    A direction in which the loss is straight, as one of cross entropy's is, has no part in either.
    """
    if hessians.dtype not in (torch.float32, torch.float64):
        raise FormingError(f"the outputs are of type {hessians.dtype}, in which nothing can be factorized")
    slopes = torch.autograd.grad(
        evaluation.loss, evaluation.outputs, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    flat = torch.cat([own.reshape(len(hessians), -1) for own in slopes], dim=1).detach()
    flat = flat * weight if weight else torch.zeros_like(flat)
    if hessians.shape[-1] == 1:
        values, vectors = hessians[..., 0], torch.ones_like(hessians)
    else:
        lower, failed = torch.linalg.cholesky_ex(hessians)
        if not bool(failed.any()):
            solved = torch.linalg.solve_triangular(lower, flat[..., None], upper=False)
            return lower, solved.reshape(-1)
        values, vectors = torch.linalg.eigh(hessians)
    rounding = 8 * hessians.shape[-1] * torch.finfo(values.dtype).eps
    largest = values.abs().amax(dim=1, keepdim=True)
    # Where a sample is fitted well, rounding in others of its derivatives than the largest shows.
    if not bool((values >= -_CONCAVE * largest.max()).all()):  # also where something is not a number
        raise FormingError("the loss is not convex in the outputs")
    values = torch.where(values > rounding * largest, values, 0.0).sqrt()
    along = (vectors.transpose(1, 2) @ flat[..., None])[..., 0]
    scaled = torch.where(values > 0, along / values, 0.0)
    return vectors * values[:, None], scaled.reshape(-1)
