"""Diagonal preconditioners, for blocks without other structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from blockhf.objective import Evaluation, Problem
from blockhf.operators import BlockMatrix, LinearOperator
from blockhf.preconditioners.draws import Noise, curvature_draw, signed_slopes


class Estimator(Protocol):
    """A way to the diagonal of the matrix."""

    def estimate(self, problem: Problem, matrix: BlockMatrix, seed: int) -> list[Tensor]:
        """For each block an estimate of its diagonal, of which averages are taken over the steps.

        ``seed`` is another in each step.
        """
        ...


@dataclass(frozen=True)
class CurvatureDraws:
    """Squares of gradients that come from random cotangents with the covariance of the curvature.

    Their mean is the diagonal of the Gauss-Newton matrix. A draw costs a backward pass.
    """

    num_draws: int = 1

    def estimate(self, problem: Problem, matrix: BlockMatrix, seed: int) -> list[Tensor]:
        return _squares(problem, seed, curvature_draw, self.num_draws)


@dataclass(frozen=True)
class SignedGradients:
    """The empirical Fisher matrix's diagonal: the mean of the samples' squared gradients (Martens, 2010).

    The samples' gradients are added with random signs, so that one backward pass does for all.
    """

    num_draws: int = 1

    def estimate(self, problem: Problem, matrix: BlockMatrix, seed: int) -> list[Tensor]:
        return _squares(problem, seed, signed_slopes, self.num_draws)


@dataclass(frozen=True)
class Hutchinson:
    """The mean of ``z ∘ G z`` over random signs ``z`` (Bekas et al., 2007): any matrix, a product a draw."""

    num_draws: int = 1

    def estimate(self, problem: Problem, matrix: BlockMatrix, seed: int) -> list[Tensor]:
        diagonals = []
        for index, block in enumerate(problem.blocks):
            total = block.params[0].new_zeros(block.size)
            generator = torch.Generator(total.device).manual_seed(seed)
            for _ in range(self.num_draws):
                signs = torch.empty_like(total).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
                total.add_(signs * matrix.product(index, index, signs), alpha=1 / self.num_draws)
            diagonals.append(total)
        return diagonals


class Diagonal:
    r"""Divides by :math:`(d + \lambda)^\alpha` with ``d`` an estimate of the matrix's diagonal.

    Args:
        estimator: Where the diagonal comes from: ``CurvatureDraws()``, ``SignedGradients()`` or
            ``Hutchinson()``.
        exponent: :math:`\alpha`; Martens (2010, section 4.7) takes 0.75 with ``SignedGradients()``.
        decay: The most weight that the average over the steps gives to the past.
        seed: Of the random numbers, which leave torch's own alone.
    """

    def __init__(
        self,
        estimator: Estimator | None = None,
        *,
        exponent: float = 1.0,
        decay: float = 0.95,
        seed: int = 0,
    ) -> None:
        if not 0 < exponent <= 1:
            raise ValueError(f"exponent is {exponent}, but must be above 0 and at most 1.")
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}, but must be at least 0 and below 1.")
        self.estimator: Estimator = estimator or CurvatureDraws()
        self.exponent, self.decay, self.seed = exponent, decay, seed
        self._num_steps = 0
        self._averages: dict[str, Tensor] = {}

    def prepare(
        self, problem: Problem, matrix: BlockMatrix, dampings: Sequence[float]
    ) -> Sequence[LinearOperator | None]:
        self._num_steps += 1
        weight = min(1 - 1 / self._num_steps, self.decay)
        inverses: list[LinearOperator | None] = []
        estimates = self.estimator.estimate(problem, matrix, self.seed + self._num_steps)
        for block, new, damping in zip(problem.blocks, estimates, dampings, strict=True):
            new = new.nan_to_num(0.0, 0.0, 0.0).clamp_min_(0)
            known = self._averages.get(block.name)
            average = new
            if known is not None and known.shape == new.shape:
                average = known.to(new).lerp(new, 1 - weight)
            self._averages[block.name] = average
            shift = max(damping, 1e-6 * float(average.mean())) or 1.0
            inverses.append(Scaling((average + shift).pow_(-self.exponent)))
        return inverses

    def forget(self, names: set[str]) -> None:
        """Drop what is known of blocks that are solved elsewhere."""
        self._averages = {key: own for key, own in self._averages.items() if key not in names}

    def state_dict(self) -> dict[str, Any]:
        averages = {name: tensor.clone() for name, tensor in self._averages.items()}
        return {"num_steps": self._num_steps, "averages": averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_steps = int(state["num_steps"])
        self._averages = {name: tensor.clone() for name, tensor in state["averages"].items()}


@dataclass(frozen=True, eq=False)
class Scaling:
    """A diagonal matrix."""

    diagonal: Tensor

    def __matmul__(self, vector: Tensor) -> Tensor:
        return self.diagonal * vector


def _squares(
    problem: Problem,
    seed: int,
    draw: Callable[[Evaluation, Noise], list[Tensor]],
    num_draws: int,
) -> list[Tensor]:
    """For each block the squares of ``Jᵀ r``, averaged over the draws."""
    params = [param for block in problem.blocks for param in block.params]
    names = tuple((block.name, block.size) for block in problem.blocks)
    # Squared when all samples are together, so that it does not matter which part a sample is in.
    sums = [block.params[0].new_zeros(num_draws, block.size) for block in problem.blocks]
    with torch.enable_grad():
        for part in problem.curvature_parts():
            evaluation = problem.linearizable(part, fresh=True)
            if not evaluation.outputs:  # the loss alone: nothing is known, and all entries are alike
                break
            for number in range(num_draws):
                with problem.meter.counting("diagonal", part.shapes, names):
                    cotangents = draw(evaluation, Noise(seed, part.place, number))
                    gradients = iter(
                        torch.autograd.grad(
                            evaluation.outputs, params, cotangents, retain_graph=True, allow_unused=True
                        )
                    )
                for block, own in zip(problem.blocks, sums, strict=True):
                    own[number].add_(
                        block.flatten([next(gradients) for _ in block.params]), alpha=part.weight**0.5
                    )
    return [own.square().mean(0) for own in problem.summed(sums)]
