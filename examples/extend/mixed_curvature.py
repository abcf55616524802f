"""A curvature of one's own: the Gauss-Newton matrix plus a multiple of the empirical Fisher matrix.

    optimizer = BlockHF.martens(blocks.by_module(model), curvature=Mixed(fisher=0.1))

A curvature derives from ``Curvature`` and returns in ``at`` a ``BlockOperator``: the matrix at the point and
on the samples of an ``Evaluation``, which has the outputs and the loss with their graph. The operator has to
know its sizes and its products; whatever else may be asked of it has a default. Parts of the batch, their
weights and the ranks of a mesh are not its business: the library adds them up.

``products=DoubleBackward()`` takes any curvature. ``products=Traced()`` records the products once. There a
vector is not one tensor; it may be handed to other operators, to ``block.unflatten`` and ``block.flatten``,
and be added and multiplied by numbers. ``products=Formed()`` knows the Gauss-Newton matrix alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from blockhf import Block, BlockOperator, Curvature, EmpiricalFisher, Evaluation, GaussNewton


@dataclass(frozen=True)
class Mixed(Curvature):
    r""":math:`J^\top H J + c\, \frac1N \sum_i g_i g_i^\top`.

    The second term damps the directions in which the samples' gradients :math:`g_i` disagree, where a step
    is least to be trusted.

    >>> Mixed(fisher=0.5)
    Mixed(fisher=0.5)

    Args:
        fisher: The multiple :math:`c`.
    """

    fisher: float = 0.1

    def __post_init__(self) -> None:
        if self.fisher < 0:
            raise ValueError(f"fisher is {self.fisher}, but must not be negative.")

    def at(self, evaluation: Evaluation, blocks: Sequence[Block]) -> BlockOperator:
        return Sum(
            GaussNewton().at(evaluation, blocks), EmpiricalFisher().at(evaluation, blocks), self.fisher
        )


class Sum(BlockOperator):
    """A matrix plus ``weight`` times another."""

    def __init__(self, first: BlockOperator, second: BlockOperator, weight: float) -> None:
        self.first, self.second, self.weight = first, second, weight

    @property
    def sizes(self) -> Sequence[int]:
        return self.first.sizes

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        other = self.second.product(row, column, vector)
        return self.first.product(row, column, vector) + self.weight * other

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        return self.first.gram(columns, vectors) + self.weight * self.second.gram(columns, vectors)
