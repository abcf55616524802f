"""Levenberg-Marquardt steps that bend with the residuals, for losses without noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockhf.linalg import BlockOperator, Root
from blockhf.linalg.operators import measure_roots
from blockhf.policies.search import Backtracking, Choice, Search, Situation
from blockhf.policy import PolicyState
from blockhf.scalars import gathered, read


@dataclass(frozen=True)
class Geodesic(Search):
    r"""Damp until the loss falls; follow the curvature of the residuals; keep some of the last step.

    With ``G = Rᵀ R`` a block's matrix, ``s`` the residuals in the same units, and ``p`` the last update, the
    step is :math:`v + \tfrac12 a` with

    .. math:: v = \mu p - (G + \lambda I)^{-1} R^\top (s + \mu R p), \qquad
              a = -(G + \lambda I)^{-1} R^\top s_{vv},

    where :math:`s_{vv}` is the second derivative along ``v``, by a difference (geodesic acceleration;
    Transtrum & Sethna, 2012). The momentum :math:`\mu` damps towards the last step instead of towards none,
    which gets ahead where curvature is far below the damping. A step whose bend is too long, or that does
    not lower the loss, is tried without momentum, then with more damping: that takes another factorization
    of the matrix that is already there, and no other Jacobian.

    Several blocks' steps are weighed so that the sum is best for the joint model.

    It needs square roots of all blocks (``products=Factored()``); where there are none, ``other`` decides.

    Args:
        momentum: :math:`\mu`.
        growth: By how much the damping grows from try to try; by its third power after three of them.
        probe: The length of the difference, as a share of ``v``.
        longest: The longest bend ``a``, as a share of ``v``.
        max_tries: After so many dampings the step is rejected.
        rescales: Damp each parameter by its own curvature, as ``Cholesky(rescales=True)`` does.
        other: Decides where roots are not stored.
    """

    momentum: float = 0.5
    growth: float = 2.0
    probe: float = 0.1
    longest: float = 0.75
    max_tries: int = 12
    rescales: bool = False
    other: Search = field(default_factory=lambda: Backtracking(max_tries=16, goes_on=True))

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}, but must be at least 0 and below 1.")
        if self.growth <= 1:
            raise ValueError(f"growth is {self.growth}, but must be above 1.")
        if not 0 < self.probe <= 1:
            raise ValueError(f"probe is {self.probe}, but must be above 0 and at most 1.")
        if self.longest <= 0:
            raise ValueError(f"longest is {self.longest}, but must be above 0.")
        if self.max_tries < 1:
            raise ValueError(f"max_tries is {self.max_tries}, but must be at least 1.")

    @property
    def uses_curvature(self) -> bool:
        return True

    def choose(self, situation: Situation, state: PolicyState) -> Choice:
        if situation.curvature.samples.num_samples != situation.point.samples.num_samples:
            return self.other.choose(situation, state)
        with situation.curvature.linearize() as operator:
            roots = [operator.root(index) for index in range(len(situation.proposals))]
            found = [root for root in roots if root is not None]
            if len(found) < len(roots):
                return self.other.choose(situation, state)
            path = _Path(self, situation, operator, found)
            names = [block.name for block in situation.point.blocks]
            last = [state.of(name).get("step") for name in names]
            known = [
                own.to(like.direction)
                for own, like in zip(last, situation.proposals, strict=True)
                if own is not None and own.shape == like.direction.shape
            ]
            choice = path.descend(known if self.momentum > 0 and len(known) == len(last) else None)
        for index, name in enumerate(names):
            state.of(name).pop("step", None)
            if choice.update is not None:
                state.of(name)["step"] = choice.update[index].clone()
        return choice


class _Path:
    """The steps from one point, and what the loss is there."""

    def __init__(
        self, settings: Geodesic, situation: Situation, operator: BlockOperator, roots: Sequence[Root]
    ) -> None:
        self.settings, self.situation, self.operator = settings, situation, operator
        self.rates = [proposal.lr for proposal in situation.proposals]
        self.dampings = [proposal.damping for proposal in situation.proposals]
        self.slopes = roots[0].slopes
        self.roots = list(roots)
        self.units: list[Tensor | float] = [1.0 for _ in roots]
        if settings.rescales:
            self._rescale()
        here = operator.scaled_outputs()
        assert here is not None
        self._here = here

    def _rescale(self) -> None:
        scaled = [root.in_own_units() for root in self.roots]
        measure_roots([*self.roots, *scaled])
        for index, (root, own) in enumerate(zip(list(self.roots), scaled, strict=True)):
            self.roots[index] = own
            self.units[index] = own.units
            self.dampings[index] *= own.mean_diagonal / (root.mean_diagonal or 1.0)

    def descend(self, last: Sequence[Tensor] | None) -> Choice:
        own, growth = self.settings, 1.0
        for trial in range(own.max_tries):
            for momentum in (last, None) if last is not None else (None,):
                choice = self._attempt(momentum, growth)
                if choice is not None:
                    return choice
            growth *= own.growth if trial < 3 else own.growth**3
        reason = f"no damping below {growth:.2g} times as much lowers the loss"
        return Choice(None, reason, growth=1.0)  # so much was tried that more would not do it either

    def _attempt(self, last: Sequence[Tensor] | None, growth: float) -> Choice | None:
        own, target = self.settings, self.slopes
        if last is not None:
            last = [vector * own.momentum for vector in last]
            target = target + self._image(last)
        step = self._solve(target, growth)
        if step is None:
            return None
        if last is not None:
            step = [a + b for a, b in zip(step, last, strict=True)]
        if len(step) > 1:
            step = self._balanced(step, growth)
        image = self._image(step)
        probed = self._outputs([own.probe * vector for vector in step])
        bend = (2 / own.probe) * ((probed - self._here) / own.probe - image)
        bent = self._solve(bend, growth)
        if bent is None:
            return None
        (length,), (bow,) = read([_norm(step), _norm(bent)])
        if bow > own.longest * length:
            return None
        return self._choice([a + b / 2 for a, b in zip(step, bent, strict=True)], growth, last is not None)

    def _choice(self, step: Sequence[Tensor], growth: float, is_moved: bool) -> Choice | None:
        update = [rate * vector for rate, vector in zip(self.rates, step, strict=True)]
        image = self._image(update)
        asked = [self.situation.point.loss_at(update), self.slopes @ image + image @ image / 2]
        (after,), (change,), *finite = read([*asked, *(own.isfinite().all() for own in update)])
        if not (math.isfinite(after) and after < self.situation.loss and all(fine for (fine,) in finite)):
            return None
        words = ["with momentum"] if is_moved else []
        words += [f"damping times {growth:.3g}"] if growth > 1 else []
        return Choice(
            update,
            ", ".join(words) or "first try",
            change,
            after,
            coefficients=self.rates,
            growth=growth,
            is_finite=True,
        )

    def _solve(self, target: Tensor, growth: float) -> list[Tensor] | None:
        """For each block ``-(Rᵀ R + damping)⁻¹ Rᵀ target``."""
        found = []
        for root, damping in zip(self.roots, self.dampings, strict=True):
            factor, failed = root.attempt(damping * growth)
            x = root.solve(target, factor)
            found.append((x, gathered(failed, x.isfinite().all())))
        step = []
        for index, (is_broken, is_fine) in enumerate(read([flags for _, flags in found])):
            x, root = found[index][0], self.roots[index]
            if is_broken:  # more damping, for rounding's sake
                more = root.factor(self.dampings[index] * growth)
                x = x if more is None else root.solve(target, more)
                is_fine = more is not None and bool(x.isfinite().all())
            if not is_fine:
                return None
            step.append(x / self.units[index])
        return step

    def _images(self, step: Sequence[Tensor]) -> Tensor:
        """The change of the scaled outputs by each block, to first order."""
        images = [
            root.rows @ (vector * units)
            for root, vector, units in zip(self.roots, step, self.units, strict=True)
        ]
        return torch.stack(images)

    def _image(self, step: Sequence[Tensor]) -> Tensor:
        return self._images(step).sum(0)

    def _balanced(self, step: Sequence[Tensor], growth: float) -> list[Tensor]:
        """As much of each block's step as is best for all together: each mends the same errors."""
        images = self._images(step)
        squares = torch.stack(
            [
                damping * growth * (vector * units).square().sum()
                for vector, units, damping in zip(step, self.units, self.dampings, strict=True)
            ]
        )
        gram = (images @ images.T + squares.diag()).double()
        scale = gram.diagonal().clamp_min(torch.finfo(torch.float64).tiny).rsqrt()
        gram = gram * scale * scale[:, None]
        gram.diagonal().add_(len(step) * torch.finfo(images.dtype).eps)
        share = -scale * torch.linalg.solve(gram, scale * (images @ self.slopes).double())
        share = torch.where(share.isfinite(), share, 1.0).to(images)
        return [vector * own for vector, own in zip(step, share, strict=True)]

    def _outputs(self, update: Sequence[Tensor]) -> Tensor:
        scaled = self.operator.scaled_outputs(self.situation.point.outputs_at(update))
        assert scaled is not None
        return scaled


def _norm(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack([vector @ vector for vector in vectors]).sum().sqrt()
