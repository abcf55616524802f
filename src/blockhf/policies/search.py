"""How far to go along the directions that the solver found.

A search gets a situation (the points where loss, gradient and curvature can be asked for, and for each block
a proposal) and returns a choice: the update of each block, or none where nothing was good enough. A block's
``lr`` multiplies its direction first.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from blockhf.point import Point
from blockhf.policy import Policy, PolicyState
from blockhf.scalars import read


@dataclass(frozen=True)
class Proposal:
    """A block's direction and what the block's quadratic model says of it.

    Attributes:
        gradient: The block's gradient.
        direction: The solution of the block's system.
        model: The damped model's value there.
        damping: The damping in it.
        lr: The block's learning rate.
    """

    gradient: Tensor
    direction: Tensor
    model: float
    damping: float
    lr: float

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
        return length * self.slope + 0.5 * (length * length) * self.curvature  # ** raises on overflow


def measured(proposals: Iterable[Proposal]) -> list[Proposal]:
    """The proposals, of all of which slope and norm are known after one wait for the device."""
    found = list(proposals)
    norm = torch.linalg.vector_norm
    numbers = read([own for each in found for own in (each.gradient @ each.direction, norm(each.direction))])
    for place, each in enumerate(found):
        (slope,), (length,) = numbers[2 * place : 2 * place + 2]
        vars(each).update(slope=slope, norm=length)
    return found


@dataclass(frozen=True)
class Choice:
    """What a search decided.

    Attributes:
        update: For each block what to add to its parameters; ``None`` rejects the step.
        reason: Why, in words, for the report.
        change: The change of the loss that the blocks' models foretell for the update.
        loss: The loss after the update, where the search knows it.
        before: The loss before it, where that is on other samples than the gradient's.
        signal: The slope along the directions on samples that the gradient has not seen, over that on its
            own.
        coefficients: For each block the share of its direction in the update.
        lengths: For each block the share of its direction that would be best if the others stood still and
            the gradient were exact, shortened as the update was: what curvature alone leaves of it. ``None``
            for a block without a direction.
        compared: Of which samples ``before`` and ``loss`` are, where they are not the gradient's.
        length: The share of all blocks' directions that was taken, where they were shrunk alike.
        is_finite: Whether the search has seen to it that the update is finite; if not, it is looked at.
        growth: How many times the damping had to grow for it, where the search damps itself.
    """

    update: Sequence[Tensor] | None
    reason: str
    change: float = 0.0
    loss: float | None = None
    before: float | None = None
    signal: float | None = None
    coefficients: Sequence[float] = ()
    lengths: Sequence[float | None] = ()
    compared: str = "held out"
    length: float | None = None
    is_finite: bool = False
    growth: float | None = None


@dataclass(frozen=True)
class Situation:
    """What a search decides by.

    Attributes:
        loss: The loss here, on the gradient's samples.
        proposals: One for each block.
        point: The point on the gradient's samples.
        curvature: The point on the curvature's samples.
        held_out: The point on samples that neither gradient nor curvature has seen, if there are any.
        seen: The point on as many of the gradient's samples, where the size of the whole set is known.
        seen_share: What part the gradient's samples are of all there are.
    """

    loss: float
    proposals: Sequence[Proposal]
    point: Point
    curvature: Point
    held_out: Point | None = None
    seen: Point | None = None
    seen_share: float = 0.0


class Search(Policy):
    """A rule for the length of the step."""

    @property
    def evaluates(self) -> bool:
        """Whether the loss after the step is known."""
        return True

    @property
    def uses_curvature(self) -> bool:
        """Whether it multiplies with the situation's curvature; if not, that is released before."""
        return False

    def num_held_out(self, num_available: int, num_wanted: int) -> int:
        """How many samples of a batch gradient and curvature shall leave to the search.

        Args:
            num_available: Samples of the batch.
            num_wanted: How many of them the gradient wants.
        """
        return 0

    @abc.abstractmethod
    def choose(self, situation: Situation, state: PolicyState) -> Choice:
        """The step to take; ``state`` is what the search keeps from step to step."""

    def take_back(self, loss: float, point: Point, state: PolicyState) -> Choice | None:
        """How to undo the last step, where the loss on the new gradient's samples shows that it did harm."""
        return None


@dataclass(frozen=True)
class FixedStep(Search):
    """``lr`` times the direction, whatever comes; the paper's choice.

    Args:
        evaluates: Also evaluate the loss there, for the report and for adaptive damping. It costs a
            forward pass over the gradient batch, and a step to where the loss is not finite is rejected.
    """

    evaluates: bool = False

    def choose(self, situation: Situation, state: PolicyState) -> Choice:
        choice = scaled(situation.proposals, 1.0, "fixed step")
        if not self.evaluates:
            return choice
        assert choice.update is not None
        after = float(situation.point.loss_at(choice.update))
        if not math.isfinite(after):
            return Choice(None, "the loss after the step is not finite")
        return replace(choice, loss=after)


@dataclass(frozen=True)
class Backtracking(Search):
    r"""Shrink the step until the loss on the gradient batch falls by enough (Armijo, 1966).

    Takes the first :math:`\alpha = 1, s, s^2, \ldots` with
    :math:`f(w + \alpha d) \le f(w) + c\,\alpha\, g^\top d`, each at the cost of a forward pass.

    Args:
        shrink: The factor :math:`s`.
        sufficient: The constant :math:`c`.
        max_tries: After so many the step is rejected.
        goes_on: Shrink on for as long as the loss still falls, and take the best.
    """

    shrink: float = 0.5
    sufficient: float = 1e-4
    max_tries: int = 8
    goes_on: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.shrink < 1:
            raise ValueError(f"shrink is {self.shrink}, but must be between 0 and 1.")
        if not 0 <= self.sufficient < 1:
            raise ValueError(f"sufficient is {self.sufficient}, but must be at least 0 and below 1.")
        if self.max_tries < 1:
            raise ValueError(f"max_tries is {self.max_tries}, but must be at least 1.")

    def choose(self, situation: Situation, state: PolicyState) -> Choice:
        proposals = situation.proposals
        slope = min(0.0, sum(proposal.lr * proposal.slope for proposal in proposals))
        best: Choice | None = None
        scale = 1.0
        for trial in range(self.max_tries):
            choice = scaled(proposals, scale, "first try" if trial == 0 else f"shrunk to {scale:.3g}")
            assert choice.update is not None
            after = float(situation.point.loss_at(choice.update))
            if best is not None and best.loss is not None and not after < best.loss:
                return best
            if math.isfinite(after) and after <= situation.loss + self.sufficient * scale * slope:
                best = replace(choice, loss=after, length=scale)
                if not self.goes_on:
                    return best
            scale *= self.shrink
        return best or Choice(
            None, f"no step down to {scale / self.shrink:.2g} of the direction lowers the loss enough"
        )


def scaled(proposals: Sequence[Proposal], scale: float, reason: str) -> Choice:
    """The choice of ``scale`` times each block's rate and direction."""
    return Choice(
        update=[proposal.direction * (scale * proposal.lr) for proposal in proposals],
        reason=reason,
        change=sum(proposal.change(scale) for proposal in proposals),
        coefficients=[scale * proposal.lr for proposal in proposals],
    )
