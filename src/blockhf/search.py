"""How far to go along the directions that the solver found.

A search gets the problem and, for each block, a proposal, and returns a choice: the update of each
block, or none where nothing was good enough. A block's ``lr`` multiplies its direction first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from torch import Tensor

from blockhf.objective import Problem
from blockhf.solvers import Iterate


@dataclass(frozen=True)
class Proposal:
    """A block's direction and what the block's quadratic model says of it.

    Attributes:
        gradient: The block's gradient.
        direction: The solution of the block's system.
        model: The damped model's value there.
        damping: The damping in it.
        lr: The block's learning rate.
        iterates: Solutions on the way, if the search asked for them.
    """

    gradient: Tensor
    direction: Tensor
    model: float
    damping: float
    lr: float
    iterates: Sequence[Iterate] = field(default=())

    @cached_property
    def slope(self) -> float:
        """Gradient times direction."""
        return float(self.gradient @ self.direction)

    @cached_property
    def norm(self) -> float:
        """Length of the direction."""
        return float(self.direction.norm())

    @cached_property
    def curvature(self) -> float:
        """Direction times the undamped matrix times direction, known without a product."""
        return 2 * (self.model - self.slope) - self.damping * self.norm**2

    def change(self, scale: float = 1.0) -> float:
        """The change of the loss that the undamped model foretells for ``scale * lr * direction``."""
        length = scale * self.lr
        return length * self.slope + 0.5 * length**2 * self.curvature


@dataclass(frozen=True)
class Choice:
    """What a search decided.

    Attributes:
        update: For each block what to add to its parameters; ``None`` rejects the step.
        reason: Why, in words, for the report.
        change: The change of the loss that the blocks' models foretell for the update.
        loss: The loss after the update, where the search knows it.
        coefficients: For each block the share of its direction in the update.
    """

    update: Sequence[Tensor] | None
    reason: str
    change: float = 0.0
    loss: float | None = None
    coefficients: Sequence[float] = ()


class Search(Protocol):
    """A rule for the length of the step."""

    @property
    def evaluates(self) -> bool:
        """Whether the loss after the step is known."""
        ...

    @property
    def record(self) -> float | None:
        """The growth of the intervals at which the solver shall keep iterates, if at all."""
        ...

    def choose(self, problem: Problem, loss: float, proposals: Sequence[Proposal]) -> Choice: ...


@dataclass(frozen=True)
class FixedStep:
    """``lr`` times the direction, whatever comes; the paper's choice.

    Args:
        evaluates: Also evaluate the loss there, for the report and for adaptive damping. It costs a
            forward pass over the gradient batch, and a step to where the loss is not finite is rejected.
    """

    evaluates: bool = False
    record: None = None

    def choose(self, problem: Problem, loss: float, proposals: Sequence[Proposal]) -> Choice:
        choice = _scaled(proposals, 1.0, "fixed step")
        if not self.evaluates:
            return choice
        assert choice.update is not None
        after = float(problem.loss_at(choice.update))
        if not math.isfinite(after):
            return Choice(None, "the loss after the step is not finite")
        return replace(choice, loss=after)


@dataclass(frozen=True)
class Backtracking:
    r"""Shrink the step until the loss on the gradient batch falls by enough (Armijo, 1966).

    Takes the first :math:`\alpha = 1, s, s^2, \ldots` with
    :math:`f(w + \alpha d) \le f(w) + c\,\alpha\, g^\top d`, each at the cost of a forward pass.

    Args:
        shrink: The factor :math:`s`.
        sufficient: The constant :math:`c`.
        max_tries: After so many the step is rejected.
    """

    shrink: float = 0.5
    sufficient: float = 1e-4
    max_tries: int = 8
    evaluates: bool = True
    record: None = None

    def __post_init__(self) -> None:
        if not 0 < self.shrink < 1:
            raise ValueError(f"shrink is {self.shrink}, but must be between 0 and 1.")
        if not 0 <= self.sufficient < 1:
            raise ValueError(f"sufficient is {self.sufficient}, but must be at least 0 and below 1.")
        if self.max_tries < 1:
            raise ValueError(f"max_tries is {self.max_tries}, but must be at least 1.")

    def choose(self, problem: Problem, loss: float, proposals: Sequence[Proposal]) -> Choice:
        slope = min(0.0, sum(proposal.lr * proposal.slope for proposal in proposals))
        scale = 1.0
        for trial in range(self.max_tries):
            choice = _scaled(proposals, scale, "first try" if trial == 0 else f"shrunk to {scale:.3g}")
            assert choice.update is not None
            after = float(problem.loss_at(choice.update))
            if math.isfinite(after) and after <= loss + self.sufficient * scale * slope:
                return replace(choice, loss=after)
            scale *= self.shrink
        return Choice(
            None, f"no step down to {scale / self.shrink:.2g} of the direction lowers the loss enough"
        )


@dataclass(frozen=True)
class BestIterate:
    """The best of the iterates that conjugate gradients passed (Martens, 2010, section 4.6).

    Goes back from the last iterate for as long as the loss on the gradient batch falls. Late iterates
    fit the curvature batch best, and often too well.

    Args:
        record: The growth of the intervals at which iterates are kept.
    """

    record: float = 1.3
    evaluates: bool = True

    def __post_init__(self) -> None:
        if self.record <= 1:
            raise ValueError(f"record is {self.record}, but must be above 1.")

    def choose(self, problem: Problem, loss: float, proposals: Sequence[Proposal]) -> Choice:
        if not all(proposal.iterates for proposal in proposals):
            raise ValueError("BestIterate needs iterates, and the solver kept none. Use ConjugateGradient().")
        depth = max(len(proposal.iterates) for proposal in proposals)
        best = Choice(None, "no iterate lowers the loss", loss=loss)
        for back in range(1, depth + 1):
            earlier = [_back(proposal, back) for proposal in proposals]
            steps = "/".join(str(iterate.step) for _, iterate in earlier)
            choice = _scaled([proposal for proposal, _ in earlier], 1.0, f"iterate {steps}")
            assert choice.update is not None
            assert best.loss is not None
            after = float(problem.loss_at(choice.update))
            if math.isfinite(after) and after < best.loss:
                best = replace(choice, loss=after)
            elif best.update is not None:
                break
        return best


def _back(proposal: Proposal, back: int) -> tuple[Proposal, Iterate]:
    """The proposal at its iterate so many places from the last, or at its first."""
    iterate = proposal.iterates[-min(back, len(proposal.iterates))]
    return replace(proposal, direction=iterate.x, model=iterate.model, iterates=()), iterate


def _scaled(proposals: Sequence[Proposal], scale: float, reason: str) -> Choice:
    return Choice(
        update=[proposal.direction * (scale * proposal.lr) for proposal in proposals],
        reason=reason,
        change=sum(proposal.change(scale) for proposal in proposals),
        coefficients=[scale * proposal.lr for proposal in proposals],
    )
