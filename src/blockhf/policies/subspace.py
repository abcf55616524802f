"""The best combination of the blocks' directions and of past updates, on samples not seen before."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockhf.blocks import Block
from blockhf.linalg import BlockOperator
from blockhf.point import Point
from blockhf.policies.search import Choice, Proposal, Search, Situation
from blockhf.policy import PolicyState
from blockhf.scalars import on_host, read

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
_FEW, _FAR = 5, 6.0  # comparisons, before which nothing is usual; times the usual that is far
_TREND = 0.8


@dataclass(frozen=True)
class Subspace(Search):
    r"""The best combination of the blocks' directions and their last updates, on samples not seen before.

    With ``D`` the directions :math:`d_b`, the last update of each block and its trend, which is the sum of
    all updates with weights :math:`1, 0.8, 0.8^2, \ldots` back in time, and with gradient ``g`` and matrix
    ``G`` of *held-out* samples, the coefficients solve

    .. math:: (D^\top G D + \lambda\, \mathrm{diag}(D^\top G D))\, c = -D^\top g.

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
        max_held_out: The most samples to hold out while the gradient has few: about half as many as that.
        per_sample: The most for each sample of the gradient where that makes more: with few held-out samples
            the noise is theirs.
        momentum: Whether the last update and the trend are among the directions.
        damping: Where :math:`\lambda` starts.
        floor: The least :math:`\lambda`.
        max_tries: After so many the step is rejected.
    """

    held_out: float = 0.25
    max_held_out: int = 512
    per_sample: float = 1 / 32
    momentum: bool = True
    damping: float = 1e-3
    floor: float = 1e-6
    max_tries: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}, but must be at least 0 and below 1.")
        if not 0 < self.floor <= self.damping:
            raise ValueError(
                f"damping is {self.damping}, but must be at least the floor, {self.floor}, and that positive."
            )
        if self.max_tries < 1:
            raise ValueError(f"max_tries is {self.max_tries}, but must be at least 1.")
        if self.max_held_out < 0 or self.per_sample < 0:
            raise ValueError(
                f"max_held_out and per_sample are {self.max_held_out} and {self.per_sample}, but must be at "
                "least 0."
            )

    @property
    def uses_curvature(self) -> bool:
        return True

    def num_held_out(self, num_available: int, num_wanted: int) -> int:
        # In whole steps, as their products are traced anew for each new size.
        unit = max(self.max_held_out // 2, 1)
        few = 1 << max(num_wanted // 2, 4 * _FEWEST_HELD_OUT).bit_length() - 1
        most = max(min(self.max_held_out, few), int(self.per_sample * num_wanted) // unit * unit)
        number = min(int(self.held_out * num_available), most)
        return number if number >= _FEWEST_HELD_OUT else 0

    def choose(self, situation: Situation, state: PolicyState) -> Choice:
        proposals, unseen, seen = situation.proposals, situation.held_out, situation.seen
        loss_at: LossAt
        if unseen is None:
            with situation.curvature.linearize() as operator:
                own = [proposal.gradient for proposal in proposals]
                loss_at = situation.point.loss_at
                return self._choose(operator, loss_at, situation.loss, own, situation, state)
        loss, gradient = unseen.gradient()
        slope = sum(proposal.slope for proposal in proposals)
        along = [own @ each.direction for own, each in zip(gradient, proposals, strict=True)]
        loss_at = unseen.loss_at
        if seen is not None:
            mixed = loss_at = _Mixed(situation.seen_share, seen.loss_at, unseen.loss_at)
            loss = mixed.of(seen.loss_at([torch.zeros_like(own) for own in gradient]), loss)
            gradient = [mixed.of(p.gradient, own) for p, own in zip(proposals, gradient, strict=True)]
        (before,), *slopes = read([loss, *along])
        with unseen.linearize() as operator:
            choice = self._choose(operator, loss_at, before, gradient, situation, state)
        if choice.update is not None and choice.loss is not None:
            state.shared["expected"] = situation.loss + choice.loss - before
            moved = zip(situation.point.origin, choice.update, strict=True)
            state.shared["moved to"] = _sums([value + change for value, change in moved])
        return replace(
            choice,
            before=before,
            signal=sum(own for (own,) in slopes) / slope if slope < 0 else None,
            compared="held out" if seen is None else "of the whole set",
        )

    def take_back(self, loss: float, point: Point, state: PolicyState) -> Choice | None:
        """Undo a step after which new samples have a far higher loss than those held out foretold.

        Few samples held out may have none of those on which a step does harm. A loss above the expected one
        by six times what it is usually off is taken for such harm, unless others have moved the parameters.
        One that is no number speaks of the samples, not of the step.
        """
        memory = state.shared
        if not math.isfinite(loss):
            return None
        expected, moved_to = memory.pop("expected", None), memory.pop("moved to", None)
        if expected is None:
            return None
        number, usual = memory.get("num_compared", 0), memory.get("usual", 0.0)
        if number < _FEW or loss <= expected + _FAR * usual:
            weight = max(0.2, 1 / (number + 1))
            memory.update(num_compared=number + 1, usual=usual + weight * (abs(loss - expected) - usual))
            return None
        last = [state.of(block.name).get("last") for block in point.blocks]
        state.blocks.clear()
        now = _sums(point.origin)
        if moved_to is None or not torch.equal(moved_to.to(now), now):
            return None
        told = f"the last step is taken back: on new samples the loss is {loss:.4g} instead of {expected:.4g}"
        pairs = zip(last, point.origin, strict=True)  # a block that stood still has nothing to undo
        return Choice([torch.zeros_like(at) if own is None else -own.to(at) for own, at in pairs], told)

    def _choose(
        self,
        operator: BlockOperator,
        loss_at: LossAt,
        before: float,
        gradient: Sequence[Tensor],
        situation: Situation,
        state: PolicyState,
    ) -> Choice:
        proposals, blocks = situation.proposals, situation.point.blocks
        columns, vectors = self._directions(blocks, proposals, state)
        if not vectors:
            return Choice(None, "no block has a direction")
        damping = state.shared.get("damping", self.damping)
        floors = [abs(proposals[column].damping) for column in columns]
        model = _Model.of(operator, columns, vectors, gradient, floors, damping)
        coefficients = model.minimizer()
        if coefficients is None:
            return self._rejected("the model along the directions is not finite", state)
        rates = coefficients.new_tensor([proposals[column].lr for column in columns])
        full = coefficients * rates
        if not bool(full.any()):
            zeros = [torch.zeros_like(proposal.direction) for proposal in proposals]
            return Choice(zeros, "nothing to take", loss=before)
        factors = full.tolist()
        direction = _combined(proposals, columns, vectors, factors)
        scale = 1.0
        for scale, update, after, is_finite in self._tried(loss_at, direction):
            change = model.change(scale * full)
            if math.isfinite(after) and after < before and is_finite:
                ratio = (after - before) / change if change < 0 else 0.0
                self._adapt(ratio if scale == 1 else 0.0, state)
                moved = {column for column, factor in zip(columns, factors, strict=True) if factor}
                self._remember(blocks, update, moved, state)
                return Choice(
                    update,
                    "best combination" if scale == 1 else f"best combination, shrunk to {scale:.3g}",
                    change=change,
                    loss=after,
                    coefficients=_firsts(len(proposals), columns, scale * full),
                    lengths=model.lengths(proposals, scale),
                    is_finite=True,
                )
        reason = f"no step down to {scale:.2g} of the best combination lowers the loss"
        return self._rejected(reason, state)

    def _tried(
        self, loss_at: LossAt, direction: Sequence[Tensor]
    ) -> Iterator[tuple[float, Sequence[Tensor], float, bool]]:
        """Ever shorter updates, with the loss there and whether they are finite.

        On a device the losses of all but the first are read together: another forward pass costs less there
        than to wait.
        """
        scales = [0.5**trial for trial in range(self.max_tries)]
        number = 1 if direction[0].device.type == "cpu" else max(self.max_tries - 1, 1)
        for start in (0, *range(1, self.max_tries, number)):
            own = scales[start : start + number] if start else scales[:1]
            asked = []
            for scale in own:
                update = [each * scale for each in direction]
                asked += [loss_at(update), *(each.isfinite().all() for each in update)]
            found = iter(read(asked))
            for scale in own:
                (after,), *finite = (next(found) for _ in range(1 + len(direction)))
                update = [each * scale for each in direction] if scale < 1 else list(direction)
                yield scale, update, after, all(fine for (fine,) in finite)

    def _directions(
        self, blocks: Sequence[Block], proposals: Sequence[Proposal], state: PolicyState
    ) -> tuple[list[int], list[Tensor]]:
        """Each block's direction, then each one's last update, then each one's trend, if there are any."""
        found = [(index, proposal.direction) for index, proposal in enumerate(proposals) if proposal.norm > 0]
        for kind in ("last", "trend") if self.momentum else ():
            for index, block in enumerate(blocks):
                past = state.of(block.name)
                own = past.get(kind)  # a trend is there from the second update on
                if own is not None and len(own) == block.size:
                    found.append((index, own.to(proposals[index].direction)))
        return [index for index, _ in found], [vector for _, vector in found]

    @staticmethod
    def _remember(
        blocks: Sequence[Block], update: Sequence[Tensor], moved: Collection[int], state: PolicyState
    ) -> None:
        """Keep the update and the trend of each block; those of blocks that did not move are forgotten."""
        trends = {name: own.get("trend", own.get("last")) for name, own in state.blocks.items()}
        state.blocks.clear()
        for index in sorted(moved):
            block, own = blocks[index], update[index]
            state.blocks[block.name] = {"last": own.clone()}
            past = trends.get(block.name)
            if past is not None and past.shape == own.shape:
                state.blocks[block.name]["trend"] = own.add(past.to(own), alpha=_TREND)

    def _adapt(self, ratio: float, state: PolicyState) -> None:
        damping = state.shared.get("damping", self.damping)
        if ratio > 0.75:
            damping = max(0.7 * damping, self.floor)
        elif ratio < 0.25:
            damping = min(damping / 0.7, 1e8)
        state.shared["damping"] = damping

    def _rejected(self, reason: str, state: PolicyState) -> Choice:
        self._adapt(0.0, state)
        return Choice(None, reason)


@dataclass(frozen=True, eq=False)
class _Model:
    """The quadratic model along some directions.

    Attributes:
        columns: The block of each direction.
        slopes: ``Dᵀ g``.
        curved: ``Dᵀ G D``.
        damped: The same with the damping.
    """

    columns: Sequence[int]
    slopes: Tensor
    curved: Tensor
    damped: Tensor

    @classmethod
    def of(
        cls,
        operator: BlockOperator,
        columns: Sequence[int],
        vectors: Sequence[Tensor],
        gradient: Sequence[Tensor],
        floors: Sequence[float],
        damping: float,
    ) -> _Model:
        """The model on the samples of ``operator`` and ``gradient``.

        Each direction is damped by ``damping`` times its own curvature, which no scale of loss or parameters
        changes, or where that is almost zero, times that which its block's ``floors`` leave it.
        """
        slopes = torch.stack([gradient[column] @ v for column, v in zip(columns, vectors, strict=True)])
        squares = torch.stack([v @ v for v in vectors])
        curved = operator.gram(columns, vectors)
        slopes, curved, squares = on_host(slopes, curved, squares)
        least = squares * squares.new_tensor(floors)
        return cls(
            columns, slopes, curved, curved + damping * torch.diag(curved.diagonal().abs().maximum(least))
        )

    def minimizer(self) -> Tensor | None:
        """The coefficients at which the damped model is least, if it is finite."""
        scale = self.damped.diagonal().clamp_min(1e-300).rsqrt()
        scaled = scale[:, None] * self.damped * scale + 1e-6 * torch.eye(
            len(scale), dtype=scale.dtype, device=scale.device
        )
        if not bool(scaled.isfinite().all() & self.slopes.isfinite().all()):
            return None
        # By eigenvalues, because the Hessian, or rounding, may leave some negative.
        values, vectors = torch.linalg.eigh((scaled + scaled.T) / 2)
        along = (vectors.T @ (-self.slopes * scale)) / values.abs().clamp_min(1e-6)
        coefficients: Tensor = (vectors @ along) * scale
        return coefficients

    def change(self, coefficients: Tensor) -> float:
        """What the undamped model foretells for them."""
        return float(self.slopes @ coefficients + 0.5 * coefficients @ self.curved @ coefficients)

    def lengths(self, proposals: Sequence[Proposal], scale: float) -> list[float | None]:
        """For each block what curvature alone would leave of its direction, times ``scale``."""
        curvatures = _firsts(len(proposals), self.columns, self.damped.diagonal())
        return [
            -scale * proposal.slope / curvature if proposal.norm > 0 and curvature else None
            for proposal, curvature in zip(proposals, curvatures, strict=True)
        ]


def _sums(values: Sequence[Tensor]) -> Tensor:
    """A number for each block that changes with its parameters, to know them again by."""
    return torch.stack([value.sum().float() for value in values])


def _combined(
    proposals: Sequence[Proposal], columns: Sequence[int], vectors: Sequence[Tensor], factors: Sequence[float]
) -> list[Tensor]:
    combined = [torch.zeros_like(proposal.direction) for proposal in proposals]
    for column, vector, factor in zip(columns, vectors, factors, strict=True):
        combined[column].add_(vector, alpha=factor)
    return combined


def _firsts(number: int, columns: Sequence[int], values: Tensor) -> list[float]:
    """For each block the first of its values, which is that of its direction, or zero."""
    firsts = [0.0] * number
    for column, value in reversed(list(zip(columns, values.tolist(), strict=True))):
        firsts[column] = value
    return firsts
