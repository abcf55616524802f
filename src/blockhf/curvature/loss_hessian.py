"""The second derivatives of common losses by the outputs, in closed form.

A loss does not say which one it is. Candidates are compared with a product by autograd, and what agrees is
taken: cross entropy of logits, position by position (targets that are left out, weights of classes and label
smoothing only scale a position), and whatever has a diagonal ``H`` (squared error, binary cross entropy of
logits, Poisson and Huber losses).
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockhf.linalg import factorizable
from blockhf.objective import Evaluation
from blockhf.scalars import read

HessianProduct = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""From tensors like the outputs to ``H`` times them."""


class OutputHessian(abc.ABC):
    """The second derivatives of the loss by one of the outputs, which no other output has a part in.

    Tensors are like the output, with any number of dimensions before its own.
    """

    @abc.abstractmethod
    def times(self, tangent: Tensor) -> Tensor:
        """``H t``."""

    @abc.abstractmethod
    def root_times(self, noise: Tensor) -> Tensor:
        """``S n`` with ``S Sᵀ = H``; a direction of negative curvature has no part in it."""

    @property
    def cancelling(self) -> float:
        """How large the terms are that all but cancel in ``H``, where some do; only rounding is left then."""
        return 0.0

    @abc.abstractmethod
    def of_samples(self, start: int, stop: int) -> OutputHessian:
        """Of some of the samples, which the output has first."""


@dataclass(frozen=True, eq=False)
class Diagonal(OutputHessian):
    """Of a loss that ties no outputs together."""

    diagonal: Tensor

    def times(self, tangent: Tensor) -> Tensor:
        return self.diagonal * tangent

    def root_times(self, noise: Tensor) -> Tensor:
        return self.diagonal.clamp_min(0).sqrt() * noise

    def of_samples(self, start: int, stop: int) -> Diagonal:
        return Diagonal(self.diagonal[start:stop])


@dataclass(frozen=True, eq=False)
class Softmax(OutputHessian):
    r"""Of cross entropy: :math:`w (\mathrm{diag}\,\pi - \pi\pi^\top)` for each position.

    Attributes:
        probabilities: The predictions, like the output.
        weights: Of the positions.
        dim: That of the classes, counted from the last.
    """

    probabilities: Tensor
    weights: Tensor
    dim: int

    @property
    def cancelling(self) -> float:
        return float(self.weights.max())

    def times(self, tangent: Tensor) -> Tensor:
        weighted = self.probabilities * tangent
        return self.weights * (weighted - self.probabilities * weighted.sum(self.dim, keepdim=True))

    def root_times(self, noise: Tensor) -> Tensor:
        scaled = self.probabilities.sqrt() * noise
        return self.weights.sqrt() * (scaled - self.probabilities * scaled.sum(self.dim, keepdim=True))

    def of_samples(self, start: int, stop: int) -> Softmax:
        return Softmax(self.probabilities[start:stop], self.weights[start:stop], self.dim)


def second_derivatives(evaluation: Evaluation) -> HessianProduct | None:
    """Products with ``H`` by autograd, which take no pass through the network; none where ``H`` is zero."""
    outputs = evaluation.outputs
    slopes = torch.autograd.grad(
        evaluation.loss, outputs, create_graph=True, allow_unused=True, materialize_grads=True
    )
    if not any(slope.requires_grad for slope in slopes):
        return None

    def product(tangents: Sequence[Tensor]) -> Sequence[Tensor]:
        pairs = [(s, v) for s, v in zip(slopes, tangents, strict=True) if s.requires_grad]
        return torch.autograd.grad(
            [slope for slope, _ in pairs],
            outputs,
            [vector for _, vector in pairs],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )

    return product


def closed_forms(outputs: Sequence[Tensor], product: HessianProduct) -> list[OutputHessian] | None:
    """``H`` for each of the outputs, where it is known in closed form and ties none of them together.

    Args:
        outputs: The outputs.
        product: Products with ``H``; one is asked for, or two.
    """
    ends = itertools.accumulate(map(Tensor.numel, outputs), initial=0)
    probe = [_probe(output, before) for output, before in zip(outputs, ends, strict=False)]
    images = product(probe)
    found: list[OutputHessian | None] = [
        _softmax(output.detach(), *pair) for output, *pair in zip(outputs, probe, images, strict=True)
    ]
    if any(form is None for form in found):
        diagonals = product([torch.ones_like(output) for output in outputs])
        found = [
            form or _diagonal(diagonal, *pair)
            for form, diagonal, *pair in zip(found, diagonals, probe, images, strict=True)
        ]
    forms = [form for form in found if form is not None]
    return forms if len(forms) == len(outputs) else None


def separate_positions(output: Tensor, product: HessianProduct) -> int | None:
    """The dimension within whose lines alone the loss ties the entries of its only output together.

    It is that of the classes, for predictions at several positions of a sample: the last, or the second.
    ``None`` where there is no such dimension.
    """
    for dim in (-1, 1):
        if output.dim() < 3:
            break
        lines = output.select(dim, 0)
        some = (_probe(lines) > 0).to(output).unsqueeze(dim)
        (image,) = product([_probe(output) * some])
        if _agree((image * some, image)):
            return dim - output.dim() if dim > 0 else dim
    return None


def ties_samples(outputs: Sequence[Tensor], product: HessianProduct) -> bool:
    """Whether the loss ties samples together, which all outputs have first."""
    some = _probe(outputs[0].detach().flatten(1)[:, 0] if outputs[0].dim() > 1 else outputs[0].detach()) > 0
    masks = [some.view(-1, *[1] * (output.dim() - 1)) for output in outputs]
    images = product([_probe(output) * mask for output, mask in zip(outputs, masks, strict=True)])
    return not _agree(*((image * mask, image) for image, mask in zip(images, masks, strict=True)))


def _softmax(output: Tensor, probe: Tensor, image: Tensor) -> Softmax | None:
    eps = torch.finfo(output.dtype).eps
    numbers, probe, image = (factorizable(own) for own in (output, probe, image))
    for dim in dict.fromkeys((-1, 1 - output.dim())) if output.dim() else ():
        probabilities = torch.softmax(numbers, dim)
        plain = Softmax(probabilities, torch.ones_like(probabilities.select(dim, 0).unsqueeze(dim)), dim)
        curved = plain.times(probe)
        square = curved.square().sum(dim, keepdim=True)
        weights = (curved * image).sum(dim, keepdim=True) / square.clamp_min(torch.finfo(square.dtype).tiny)
        # Where a prediction is all but certain, its weight is lost in rounding, and hardly matters.
        sure = square < eps * square.max()
        weights = torch.minimum(weights.clamp_min(0), torch.where(sure, 0.0, weights).max())
        form = Softmax(probabilities, weights, dim)
        sums = image - image.mean(dim, keepdim=True)  # H times ones is zero
        if _agree((image, sums, eps), (form.times(probe), image, eps)):
            return form
    return None


def _diagonal(diagonal: Tensor, probe: Tensor, image: Tensor) -> Diagonal | None:
    return Diagonal(diagonal) if _agree((diagonal * probe, image)) else None


def _agree(*pairs: tuple[Tensor, Tensor] | tuple[Tensor, Tensor, float]) -> bool:
    """Whether products that should be equal are, but for rounding, by one wait for the device."""
    norm = torch.linalg.vector_norm
    numbers = read([own for one, other, *_ in pairs for own in (norm(one - other), norm(other))])
    return all(
        apart <= max([*eps, torch.finfo(other.dtype).eps]) ** 0.5 * size
        for (_, other, *eps), (apart,), (size,) in zip(pairs, numbers[::2], numbers[1::2], strict=True)
    )


def _probe(like: Tensor, before: int = 0) -> Tensor:
    """Numbers without any structure, the same each time; ``before`` of them are passed over."""
    places = torch.arange(before + 1, before + like.numel() + 1, device=like.device)
    return torch.sin(places.square()).to(like.dtype).view(like.shape)
