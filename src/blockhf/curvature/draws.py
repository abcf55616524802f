"""Random cotangents whose covariance is the curvature of the loss by the outputs.

Back-propagated, such a draw ``r`` gives gradients ``Jᵀ r`` whose covariance is the Gauss-Newton matrix,
for any loss and at the price of one backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockhf.curvature.loss_hessian import closed_forms, second_derivatives, separate_positions
from blockhf.linalg import factorizable
from blockhf.objective import Evaluation

_MOST_STEPS = 10
_TOGETHER = 64


@dataclass(frozen=True)
class Noise:
    """Random numbers for samples, the same for a sample whichever part of the batch it is in.

    Args:
        seed: Another one gives other numbers.
        place: Where the first sample is among all.
        number: Of the draw, where there are several.
    """

    seed: int
    place: int = 0
    number: int = 0

    def rows(self, like: Tensor, fill: Callable[[Tensor, torch.Generator], Tensor]) -> Tensor:
        """Rows like those given, one for each sample; ``fill`` fills a tensor from a generator."""
        # A generator for each few samples, so that none depends on how many there are.
        first, last = self.place // _TOGETHER, (self.place + len(like) - 1) // _TOGETHER
        filled = []
        for group in range(first, last + 1):
            generator = torch.Generator(like.device)
            generator.manual_seed(self.seed + 1_000_003 * group + 1_000_000_007 * self.number)
            filled.append(fill(like.new_empty(_TOGETHER, *like.shape[1:]), generator))
        start = self.place - first * _TOGETHER
        return torch.cat(filled)[start : start + len(like)]

    def normal(self, like: Tensor) -> Tensor:
        return self.rows(like, lambda rows, generator: rows.normal_(generator=generator))

    def signs(self, like: Tensor) -> Tensor:
        return self.rows(
            like, lambda rows, generator: rows.bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        )


def curvature_draw(evaluation: Evaluation, noise: Noise) -> list[Tensor]:
    r"""A draw with covariance ``H``, the second derivatives of the loss by the outputs.

    It is :math:`S \varepsilon` with :math:`S S^\top = H`. For cross entropy and losses with a diagonal ``H``,
    ``S`` is known. For others it is the square root by the Lanczos process, for each position by itself where
    the loss ties no positions together, else for each sample: a few products with ``H``, which take no pass
    through the network.
    """
    outputs = evaluation.outputs
    product = second_derivatives(evaluation)
    if product is None:
        return [torch.zeros_like(output) for output in outputs]
    join, split = _rows(outputs, evaluation.num_samples)
    normal = split(noise.normal(join([output.detach() for output in outputs])))
    if (forms := closed_forms(outputs, product)) is not None:
        return [form.root_times(own).to(own.dtype) for form, own in zip(forms, normal, strict=True)]
    if len(outputs) == 1 and (dim := separate_positions(outputs[0], product)) is not None:
        join, split = _lines(outputs[0], dim)
    return split(_square_root(lambda rows: join(product(split(rows))), join(normal)))


def signed_slopes(evaluation: Evaluation, noise: Noise) -> list[Tensor]:
    """The slopes of the samples' losses by the outputs, each with a random sign.

    Back-propagated, their covariance is the empirical Fisher matrix.
    """
    slopes = torch.autograd.grad(
        evaluation.loss, evaluation.outputs, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    join, split = _rows(evaluation.outputs, evaluation.num_samples)
    rows = join(slopes)
    signs = noise.signs(rows[:, :1])
    # A mean loss has the slopes r / N, and the mean of r rᵀ is to be had from r / √N.
    scale = (evaluation.num_samples or 1) ** 0.5 if evaluation.reduction == "mean" else 1.0
    return split(rows * (scale * signs))


def _rows(
    outputs: Sequence[Tensor], num_samples: int | None
) -> tuple[Callable[[Sequence[Tensor]], Tensor], Callable[[Tensor], list[Tensor]]]:
    """From tensors like the outputs to one row per sample, and back.

    One row for all where the outputs do not have the samples first.
    """
    by_sample = all(output.dim() > 0 and output.shape[0] == num_samples for output in outputs)
    num_rows = num_samples if by_sample and num_samples else 1
    widths = [output.numel() // num_rows for output in outputs]

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(num_rows, -1) for tensor in tensors], dim=1)

    def split(rows: Tensor) -> list[Tensor]:
        pieces = torch.split(rows, widths, dim=1)
        return [piece.reshape(output.shape) for piece, output in zip(pieces, outputs, strict=True)]

    return join, split


def _lines(
    output: Tensor, dim: int
) -> tuple[Callable[[Sequence[Tensor]], Tensor], Callable[[Tensor], list[Tensor]]]:
    """From a tensor like the output to one row for each line along a dimension, and back."""
    shape = output.movedim(dim, -1).shape

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].movedim(dim, -1).reshape(-1, shape[-1])

    def split(rows: Tensor) -> list[Tensor]:
        return [rows.view(shape).movedim(-1, dim)]

    return join, split


def _square_root(product: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """The square root of a block-diagonal matrix, a block per row, times ``start``."""
    tiny = torch.finfo(start.dtype).tiny
    lengths = torch.linalg.vector_norm(start, dim=1, keepdim=True)
    basis = [start / lengths.clamp_min(tiny)]
    diagonal, beside = [], []
    for step in range(1, min(_MOST_STEPS, start.shape[1]) + 1):
        image = product(basis[-1])
        diagonal.append((image * basis[-1]).sum(1))
        for other in basis:
            image = image - (image * other).sum(1, keepdim=True) * other
        length = torch.linalg.vector_norm(image, dim=1)
        scale = torch.stack(diagonal).abs().max()
        if step == min(_MOST_STEPS, start.shape[1]) or bool((length <= 1e-4 * scale).all()):
            break
        beside.append(length)
        # A row that is done gets a next vector of zeros, which adds nothing.
        basis.append(torch.where(length[:, None] > 1e-6 * scale, image / length[:, None].clamp_min(tiny), 0))
    T = torch.diag_embed(torch.stack(diagonal, 1))
    if beside:
        off = torch.stack(beside, 1)
        T = T + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    # Where the loss's curvature overflows, products say so; here nothing may stop for it.
    finite = torch.nan_to_num(factorizable(T), 0.0, 0.0, 0.0)
    values, vectors = (own.to(T.dtype) for own in torch.linalg.eigh(finite))
    first: Tensor = (vectors * values.clamp_min(0).sqrt()[:, None, :]) @ vectors[:, 0, :, None]
    total: Tensor = torch.stack([first[:, i] * vector for i, vector in enumerate(basis)]).sum(0)
    scaled: Tensor = lengths * total
    return scaled
