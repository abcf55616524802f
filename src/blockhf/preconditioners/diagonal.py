"""Diagonal preconditioners, for blocks without other structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockhf.curvature import Curvature, Noise
from blockhf.linalg import BlockOperator, LinearOperator
from blockhf.policy import PolicyState
from blockhf.preconditioners.base import Preconditioner
from blockhf.samples import Samples


@dataclass(frozen=True)
class Diagonal(Preconditioner):
    r"""Divides by :math:`(d + \lambda)^\alpha` with ``d`` an estimate of the Gauss-Newton matrix's diagonal.

    The estimate is the mean square of gradients that come from random cotangents with the covariance of the
    loss's curvature; a draw costs a backward pass.

    Args:
        exponent: :math:`\alpha`; Martens (2010, section 4.7) takes 0.75.
        decay: The most weight that the average over the steps gives to the past.
        num_draws: Draws in a step.
        seed: Of the random numbers, which leave torch's own alone.
    """

    exponent: float = 1.0
    decay: float = 0.95
    num_draws: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.exponent <= 1:
            raise ValueError(f"exponent is {self.exponent}, but must be above 0 and at most 1.")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay is {self.decay}, but must be at least 0 and below 1.")
        if self.num_draws < 1:
            raise ValueError(f"num_draws is {self.num_draws}, but must be at least 1.")

    def prepare(
        self,
        samples: Samples,
        curvature: Curvature,
        operator: BlockOperator,
        dampings: Sequence[float],
        state: PolicyState,
    ) -> Sequence[LinearOperator | None]:
        num_steps = state.shared["num_steps"] = state.shared.get("num_steps", 0) + 1
        weight = min(1 - 1 / num_steps, self.decay)
        inverses: list[LinearOperator | None] = []
        estimates = self._estimate(samples, curvature, self.seed + num_steps)
        for block, new, damping in zip(samples.blocks, estimates, dampings, strict=True):
            new = new.nan_to_num(0.0, 0.0, 0.0).clamp_min_(0)
            known = state.of(block.name).get("average")
            average = new
            if known is not None and known.shape == new.shape:
                average = known.to(new).lerp(new, 1 - weight)
            state.of(block.name)["average"] = average
            shift = (1e-6 * average.mean()).clamp_min(damping)
            shift = torch.where(shift > 0, shift, 1.0)
            inverses.append(Scaling((average + shift).pow_(-self.exponent)))
        return inverses

    def _estimate(self, samples: Samples, curvature: Curvature, seed: int) -> list[Tensor]:
        """For each block the squares of ``Jᵀ r``, averaged over the draws."""
        names = tuple((block.name, block.size) for block in samples.blocks)
        # Squared when all samples are together, so that it does not matter which part a sample is in.
        sums = [block.params[0].new_zeros(self.num_draws, block.size) for block in samples.blocks]
        with torch.enable_grad():
            for part in samples.parts:
                evaluation = samples.evaluate(part, fresh=True)
                if not evaluation.outputs:  # the loss alone: nothing is known, and all entries are alike
                    break
                for number in range(self.num_draws):
                    with samples.ledger.counting("diagonal", part.shapes, names):
                        cotangents = curvature.draw(evaluation, Noise(seed, part.place, number))
                        gradients = iter(
                            torch.autograd.grad(
                                evaluation.outputs,
                                samples.params,
                                cotangents,
                                retain_graph=True,
                                allow_unused=True,
                            )
                        )
                    for block, own in zip(samples.blocks, sums, strict=True):
                        flat = block.flatten([next(gradients) for _ in block.params])
                        if part.weight:
                            own[number].add_(flat, alpha=part.weight**0.5)
        return [own.square().mean(0) for own in samples.ranks.sum(sums)]


@dataclass(frozen=True, eq=False)
class Scaling:
    """A diagonal matrix."""

    diagonal: Tensor

    def __matmul__(self, vector: Tensor) -> Tensor:
        return self.diagonal * vector
