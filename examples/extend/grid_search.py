"""A search of one's own: try a few step lengths, take the best, and look around it in the next step.

    optimizer = BlockHF.martens(blocks.by_module(model), search=GridSearch())

A search derives from ``Search`` and says in ``choose`` how far to go. It gets a ``Situation``: the loss here,
a ``Proposal`` for each block, and the points where the loss can be asked for. What it learns goes into
``state.shared``, as it belongs to no block. On a mesh ``situation.point.loss_at`` is the loss on the samples
of all ranks, so that all ranks choose alike, and all of them must ask for it equally often.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from blockhf import Choice, PolicyState, Search, Situation


@dataclass(frozen=True)
class GridSearch(Search):
    """The best of some multiples of the directions, around the multiple that was best in the last step.

    Each multiple costs a forward pass over the gradient batch. Where none lowers the loss, the step is
    rejected and the next one tries shorter ones.

    >>> GridSearch(factor=2.0, num_lengths=3).lengths(1.0)
    [0.5, 1.0, 2.0]

    Args:
        factor: The ratio of neighboring multiples.
        num_lengths: How many are tried.
    """

    factor: float = 2.0
    num_lengths: int = 3

    def __post_init__(self) -> None:
        if self.factor <= 1:
            raise ValueError(f"factor is {self.factor}, but must be above 1.")
        if self.num_lengths < 1:
            raise ValueError(f"num_lengths is {self.num_lengths}, but must be at least 1.")

    def lengths(self, middle: float) -> list[float]:
        """The multiples around one of them."""
        return [middle * self.factor ** (k - self.num_lengths // 2) for k in range(self.num_lengths)]

    def choose(self, situation: Situation, state: PolicyState) -> Choice:
        middle = state.shared.get("length", 1.0)
        tried = [self._try(situation, length) for length in self.lengths(middle)]
        loss, length = min(tried)
        if not loss < situation.loss:
            state.shared["length"] = middle / self.factor
            return Choice(None, f"none of {self.num_lengths} lengths around {middle:.3g} lowers the loss")
        state.shared["length"] = length
        return Choice(
            update=[length * own.lr * own.direction for own in situation.proposals],
            reason=f"{length:.3g} of the direction is best",
            change=sum(own.change(length) for own in situation.proposals),
            loss=loss,
            coefficients=[length * own.lr for own in situation.proposals],
        )

    @staticmethod
    def _try(situation: Situation, length: float) -> tuple[float, float]:
        """The loss after a step of this length, and the length."""
        update = [length * own.lr * own.direction for own in situation.proposals]
        loss = float(situation.point.loss_at(update))
        return loss if math.isfinite(loss) else math.inf, length
