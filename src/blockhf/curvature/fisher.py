"""Fisher matrices: averages of outer products of gradients, sample by sample.

With ``r`` the gradient of a sample's loss with respect to its outputs, the sample's share is
``Jᵀ r rᵀ J``: a Gauss-Newton matrix whose ``H`` is replaced by ``r rᵀ``. The samples must be told apart
in the outputs, so these have the samples first, and each sample's outputs depend on that sample alone
(no BatchNorm in train mode).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution

from blockhf.batches import batch_size
from blockhf.blocks import Block
from blockhf.curvature.base import Curvature
from blockhf.curvature.double_backward import Linearization
from blockhf.curvature.draws import Noise, signed_slopes
from blockhf.linalg import BlockOperator
from blockhf.objective import Evaluation, check_outputs
from blockhf.samples import Part, Samples


@dataclass(frozen=True)
class EmpiricalFisher(Curvature):
    r""":math:`\frac1N \sum_i g_i g_i^\top` with :math:`g_i` the gradient of sample ``i`` on its target."""

    def at(self, evaluation: Evaluation, blocks: Sequence[Block]) -> BlockOperator:
        check_outputs(evaluation, twice_in_loss=False)
        num_samples = _check_samples(evaluation)
        slopes = torch.autograd.grad(
            evaluation.loss, evaluation.outputs, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        # A mean loss has slopes r / N, a sum has slopes r; the matrix is the mean or the sum of r rᵀ.
        weight = float(num_samples) if evaluation.reduction == "mean" else 1.0
        return _Matrix(Linearization(evaluation.outputs, blocks), [slopes], weight)

    def draw(self, evaluation: Evaluation, noise: Noise) -> list[Tensor]:
        """The slopes with random signs, which take no second derivative of the loss."""
        return signed_slopes(evaluation, noise)

    def weight(self, samples: Samples, part: Part) -> float:
        """In a weighted mean a part's slopes have its weight, and their squares that of the square."""
        if isinstance(samples.reduction, str) or part.batch is None:
            return part.weight
        return part.weight**2 * samples.share.total / batch_size(part.batch)


@dataclass(frozen=True)
class MonteCarloFisher(Curvature):
    r""":math:`\frac1N \sum_i \mathbb{E}\, g_i g_i^\top` over targets drawn from the model's own prediction.

    Its mean is the Gauss-Newton matrix where the loss is the negative log likelihood in the natural
    parameters, e.g. cross entropy of logits. The log likelihood is summed within a sample: where the loss
    is a mean over T time steps, this matrix is T times as large. The draws are made once per step.

    Args:
        distribution: From the outputs, each tensor an argument of its own, to the predicted distribution
            of the targets, e.g. ``lambda logits: Categorical(logits=logits)``.
        num_draws: How many targets to draw for each sample.
    """

    distribution: Callable[..., Distribution]
    num_draws: int = 1

    def __post_init__(self) -> None:
        if self.num_draws < 1:
            raise ValueError(f"num_draws is {self.num_draws}, but must be at least 1.")

    def at(self, evaluation: Evaluation, blocks: Sequence[Block]) -> BlockOperator:
        check_outputs(evaluation, twice_in_loss=False)
        num_samples = _check_samples(evaluation)
        leaves = tuple(output.detach().requires_grad_() for output in evaluation.outputs)
        predicted = self.distribution(*leaves)
        draws = []
        for _ in range(self.num_draws):
            with torch.no_grad():
                targets = predicted.sample()
            surprise = -predicted.log_prob(targets).sum()
            draws.append(
                torch.autograd.grad(
                    surprise, leaves, retain_graph=True, allow_unused=True, materialize_grads=True
                )
            )
        samples = num_samples if evaluation.reduction == "mean" else 1
        return _Matrix(Linearization(evaluation.outputs, blocks), draws, 1.0 / (samples * self.num_draws))

    def weight(self, samples: Samples, part: Part) -> float:
        """Each sample counts alike, whatever its own target weighs."""
        if isinstance(samples.reduction, str) or part.batch is None:
            return part.weight
        return 0.0 if part.is_stand_in else batch_size(part.batch) / samples.share.total


@dataclass(frozen=True, eq=False)
class _Matrix(BlockOperator):
    linearization: Linearization
    draws: Sequence[Sequence[Tensor]]
    weight: float

    @property
    def sizes(self) -> Sequence[int]:
        return self.linearization.sizes

    def has_influence(self, block: int) -> bool:
        return self.linearization.has_influence(block)

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        tangents = self.linearization.pushforward(column, vector)
        return self.linearization.pullback(row, self._outer(tangents))

    def _outer(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        """The sum over draws of ``r (r · t)``, sample by sample."""
        totals = [torch.zeros_like(tangent) for tangent in tangents]
        for slopes in self.draws:
            along = sum(
                (slope * tangent).flatten(1).sum(1) if slope.dim() > 1 else slope * tangent
                for slope, tangent in zip(slopes, tangents, strict=True)
            )
            assert isinstance(along, Tensor)
            for total, slope in zip(totals, slopes, strict=True):
                total.add_(slope * along.view(-1, *[1] * (slope.dim() - 1)), alpha=self.weight)
        return totals


def _check_samples(evaluation: Evaluation) -> int:
    sizes = {tuple(output.shape[:1]) for output in evaluation.outputs}
    num_samples = evaluation.num_samples
    if len(sizes) != 1 or () in sizes or (num_samples is not None and sizes != {(num_samples,)}):
        shapes = ", ".join(str(tuple(output.shape)) for output in evaluation.outputs)
        raise ValueError(
            f"A Fisher matrix needs outputs with the samples first, {num_samples or 'N'} of them, but the "
            f"outputs have shapes {shapes}. Move the sample dimension to the front, or use GaussNewton()."
        )
    return sizes.pop()[0]
