"""How far to go along the directions that the solver found.

A search gets the problem and, for each block, a proposal, and returns a choice: the update of each
block, or none where nothing was good enough. A block's ``lr`` multiplies its direction first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from blockhf.objective import Problem
from blockhf.operators import gram
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
        before: The loss before it, where that is on other samples than the gradient's.
        signal: The slope along the directions on samples that the gradient has not seen, over that on its
            own.
        coefficients: For each block the share of its direction in the update.
        lengths: For each block the share of its direction that would be best if the others stood still and
            the gradient were exact, shortened as the update was: what curvature alone leaves of it. ``None``
            for a block without a direction.
        compared: Of which samples ``before`` and ``loss`` are, where they are not the gradient's.
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


class Search(Protocol):
    """A rule for the length of the step.

    A search that wants samples for itself also has ``num_held_out(num_available, num_wanted)``: how many of
    a batch gradient and curvature shall leave to it, where the gradient wants so many. One that multiplies
    with the problem's matrix has a true ``uses_curvature``; otherwise the matrix is let go of before.
    """

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


LossAt = Callable[[Sequence[Tensor]], Tensor]
"""The loss after an update."""


@dataclass(frozen=True)
class _Mixed:
    """The loss of all samples there are: those seen by themselves, the others as those held out are."""

    share: float
    seen: LossAt
    unseen: LossAt

    def of(self, seen: Tensor, unseen: Tensor) -> Tensor:
        return self.share * seen + (1 - self.share) * unseen

    def __call__(self, update: Sequence[Tensor]) -> Tensor:
        return self.of(self.seen(update), self.unseen(update))


_FEWEST_HELD_OUT = 32
_TREND = 0.8


class Subspace:
    r"""The best combination of the blocks' directions and their last updates, on samples not seen before.

    With ``D`` the directions :math:`d_b`, the last update of each block and its trend, which is the sum of
    all updates with weights :math:`1, 0.8, 0.8^2, \ldots` back in time, and with gradient ``g`` and matrix
    ``G`` of *held-out* samples, the coefficients solve

    .. math:: (D^\top G D + \lambda D^\top D)\, c = -D^\top g.

    That takes the place of a learning rate, mends what the blocks do not know of each other, and is momentum
    where momentum helps. Directions fit the samples they come from, so on those samples any step looks good;
    on others the coefficients are honest. A block's ``lr`` multiplies the result.

    Where the samples are part of a finite set whose own loss counts (``population`` of the optimizer), and a
    share ``s`` of it was seen, :math:`g` and the loss are ``s`` times those of the samples seen and
    :math:`1 - s` times those of the samples held out. That is unbiased for the whole set; without it, those
    held out lean against those seen, and the step is too short where ``s`` is large.

    The step is halved until that loss falls. The damping :math:`\lambda` follows the reduction ratio
    like that of ``LevenbergMarquardt``.

    Args:
        held_out: The share of the batch that is held out. Where that makes fewer than 32 samples, those of
            gradient and curvature have to do.
        max_held_out: The most samples to hold out while the gradient has few.
        per_sample: The most for each sample of the gradient where that makes more: with few held-out samples
            the noise is theirs.
        momentum: Whether the last update and the trend are among the directions.
        damping: Where :math:`\lambda` starts.
        floor: The least :math:`\lambda`.
        max_tries: After so many the step is rejected.
    """

    evaluates = True
    record = None
    uses_curvature = True

    def __init__(
        self,
        *,
        held_out: float = 0.25,
        max_held_out: int = 512,
        per_sample: float = 1 / 32,
        momentum: bool = True,
        damping: float = 1e-3,
        floor: float = 1e-6,
        max_tries: int = 4,
    ) -> None:
        if not 0 <= held_out < 1:
            raise ValueError(f"held_out is {held_out}, but must be at least 0 and below 1.")
        if not 0 < floor <= damping:
            raise ValueError(
                f"damping is {damping}, but must be at least the floor, {floor}, and that positive."
            )
        if max_tries < 1:
            raise ValueError(f"max_tries is {max_tries}, but must be at least 1.")
        if max_held_out < 0 or per_sample < 0:
            raise ValueError(
                f"max_held_out and per_sample are {max_held_out} and {per_sample}, but must be at least 0."
            )
        self.held_out, self.max_held_out, self.momentum = held_out, max_held_out, momentum
        self.per_sample = per_sample
        self.damping, self.floor, self.max_tries = damping, floor, max_tries
        self._last: dict[str, Tensor] = {}
        self._trend: dict[str, Tensor] = {}

    def num_held_out(self, num_available: int, num_wanted: int) -> int:
        # In whole steps, as their products are traced anew for each new size.
        unit = max(self.max_held_out // 2, 1)
        most = max(self.max_held_out, int(self.per_sample * num_wanted) // unit * unit)
        number = min(int(self.held_out * num_available), most)
        return number if number >= _FEWEST_HELD_OUT else 0

    def choose(self, problem: Problem, loss: float, proposals: Sequence[Proposal]) -> Choice:
        unseen = problem.held_out()
        if unseen is None:
            own = [proposal.gradient for proposal in proposals]
            return self._choose(problem, problem.loss_at, loss, own, proposals)
        with unseen:
            before, gradient = unseen.differentiate()
            slope = sum(proposal.slope for proposal in proposals)
            found = sum(float(own @ each.direction) for own, each in zip(gradient, proposals, strict=True))
            loss_at, seen = unseen.loss_at, problem.seen_again()
            if seen is not None:
                loss_at = _Mixed(problem.seen, seen.loss_at, unseen.loss_at)
                before = loss_at.of(seen.loss_at([torch.zeros_like(own) for own in gradient]), before)
                gradient = [loss_at.of(p.gradient, own) for p, own in zip(proposals, gradient, strict=True)]
            choice = self._choose(unseen, loss_at, float(before), gradient, proposals)
        return replace(
            choice,
            before=float(before),
            signal=found / slope if slope < 0 else None,
            compared="held out" if seen is None else "of the whole set",
        )

    def _choose(
        self,
        problem: Problem,
        loss_at: LossAt,
        before: float,
        gradient: Sequence[Tensor],
        proposals: Sequence[Proposal],
    ) -> Choice:
        columns, vectors = self._directions(problem, proposals)
        if not vectors:
            return Choice(None, "no block has a direction")
        slopes = torch.stack([gradient[column] @ v for column, v in zip(columns, vectors, strict=True)])
        curved = gram(problem.matrix(), columns, vectors)
        lengths = self._lengths(columns, vectors)
        slopes, curved, lengths = (tensor.double().cpu() for tensor in (slopes, curved, lengths))
        damped = curved + self.damping * lengths
        coefficients = self._solve(slopes, damped)
        if coefficients is None:
            return self._rejected("the model along the directions is not finite")

        rates = torch.tensor([proposals[column].lr for column in columns], dtype=torch.float64)
        full = coefficients * rates
        if not bool(full.any()):
            zeros = [torch.zeros_like(proposal.direction) for proposal in proposals]
            return Choice(zeros, "nothing to take", loss=before)
        direction = self._combined(proposals, columns, vectors, full.tolist())
        scale = 1.0
        for trial in range(self.max_tries):
            update = [own * scale for own in direction] if trial else direction
            after = float(loss_at(update))
            taken = scale * full
            change = float(slopes @ taken + 0.5 * taken @ curved @ taken)
            if math.isfinite(after) and after < before:
                ratio = (after - before) / change if change < 0 else 0.0
                self._adapt(ratio if trial == 0 else 0.0)
                self._remember(problem, update)
                curvatures = _firsts(len(proposals), columns, damped.diagonal())
                return Choice(
                    update,
                    "best combination" if trial == 0 else f"best combination, shrunk to {scale:.3g}",
                    change=change,
                    loss=after,
                    coefficients=_firsts(len(proposals), columns, taken),
                    lengths=[
                        -scale * proposal.slope / curvature if proposal.norm > 0 and curvature else None
                        for proposal, curvature in zip(proposals, curvatures, strict=True)
                    ],
                )
            scale *= 0.5
        return self._rejected(f"no step down to {2 * scale:.2g} of the best combination lowers the loss")

    def state_dict(self) -> dict[str, Any]:
        return {
            "damping": self.damping,
            "last": {name: own.clone() for name, own in self._last.items()},
            "trend": {name: own.clone() for name, own in self._trend.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.damping = float(state["damping"])
        self._last = {name: own.clone() for name, own in state["last"].items()}
        self._trend = {name: own.clone() for name, own in state.get("trend", {}).items()}

    def _directions(self, problem: Problem, proposals: Sequence[Proposal]) -> tuple[list[int], list[Tensor]]:
        """Each block's direction, then each one's last update, then each one's trend, if there are any."""
        found = [(index, proposal.direction) for index, proposal in enumerate(proposals) if proposal.norm > 0]
        for past in (self._last, self._trend) if self.momentum else ():
            for index, block in enumerate(problem.blocks):
                own = past.get(block.name)
                if own is None or len(own) != block.size or not bool(own.any()):
                    continue
                if past is self._trend and torch.equal(own, self._last[block.name]):
                    continue  # there was but one update
                found.append((index, own.to(proposals[index].direction)))
        return [index for index, _ in found], [vector for _, vector in found]

    def _remember(self, problem: Problem, update: Sequence[Tensor]) -> None:
        self._last = {block.name: own.clone() for block, own in zip(problem.blocks, update, strict=True)}
        trend = {name: own.clone() for name, own in self._last.items()}
        for name, own in trend.items():
            past = self._trend.get(name)
            if past is not None and past.shape == own.shape:
                own.add_(past.to(own), alpha=_TREND)
        self._trend = trend

    @staticmethod
    def _lengths(columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        rows = [
            torch.stack(
                [
                    u @ v if row == column else u.new_zeros(())
                    for column, v in zip(columns, vectors, strict=True)
                ]
            )
            for row, u in zip(columns, vectors, strict=True)
        ]
        return torch.stack(rows)

    @staticmethod
    def _solve(slopes: Tensor, matrix: Tensor) -> Tensor | None:
        scale = matrix.diagonal().clamp_min(1e-300).rsqrt()
        scaled = scale[:, None] * matrix * scale + 1e-6 * torch.eye(len(matrix), dtype=matrix.dtype)
        if not bool(scaled.isfinite().all() & slopes.isfinite().all()):
            return None
        # By eigenvalues, because the Hessian, or rounding, may leave some negative.
        values, vectors = torch.linalg.eigh((scaled + scaled.T) / 2)
        coefficients: Tensor = vectors @ ((vectors.T @ (-slopes * scale)) / values.abs().clamp_min(1e-6))
        return coefficients * scale

    @staticmethod
    def _combined(
        proposals: Sequence[Proposal],
        columns: Sequence[int],
        vectors: Sequence[Tensor],
        factors: Sequence[float],
    ) -> list[Tensor]:
        combined = [torch.zeros_like(proposal.direction) for proposal in proposals]
        for column, vector, factor in zip(columns, vectors, factors, strict=True):
            combined[column].add_(vector, alpha=factor)
        return combined

    def _adapt(self, ratio: float) -> None:
        if ratio > 0.75:
            self.damping = max(0.7 * self.damping, self.floor)
        elif ratio < 0.25:
            self.damping = min(self.damping / 0.7, 1e8)

    def _rejected(self, reason: str) -> Choice:
        self._adapt(0.0)
        return Choice(None, reason)


def _firsts(number: int, columns: Sequence[int], values: Tensor) -> list[float]:
    """For each block the first of its values, which is that of its direction, or zero."""
    firsts = [0.0] * number
    for column, value in reversed(list(zip(columns, values.tolist(), strict=True))):
        firsts[column] = value
    return firsts


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
