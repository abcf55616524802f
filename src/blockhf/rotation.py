"""Coordinates in which the gradients of a block's matrices are uncorrelated, one side at a time.

Adam divides each entry of a gradient by its own root mean square. Where entries are correlated, that is
better done along the eigenvectors of the correlations: of the rows of a matrix, of its columns, or of both
(Shampoo, Gupta et al., 2018; SOAP, Vyas et al., 2024). Each such side costs products with a matrix of its
size, so only those are turned whose price is small beside that of the gradient itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockhf.blocks import Block
from blockhf.policy import State

MEMORY = 0.95
"""Weight of the past in the second moments of the gradients."""

RIDGE = 1e-3
"""How much of the identity is added to the second moments of one gradient, in their mean diagonal."""

REFRESH = 10
"""Small steps from one refresh of the eigenvectors to the next; the first ones are powers of two."""

EARLY = 20
"""After so many small steps only every second gradient counts, and refreshes are half as often."""


@dataclass(frozen=True)
class Side:
    """The rows or the columns of a matrix in the flat vector of a block.

    Attributes:
        place: Of its first entry.
        rows: Of the matrix.
        columns: Of the matrix; a kernel's are all but its first dimension.
        axis: 0 for the rows, 1 for the columns.
    """

    place: int
    rows: int
    columns: int
    axis: int

    @property
    def size(self) -> int:
        return self.columns if self.axis else self.rows

    @property
    def turn_flops(self) -> int:
        """Of a small step, there and back."""
        return 4 * self.rows * self.columns * self.size

    @property
    def moment_flops(self) -> int:
        """Of taking in a gradient."""
        return 2 * self.rows * self.columns * self.size

    @property
    def refresh_flops(self) -> int:
        return 4 * self.size**3

    @property
    def price(self) -> float:
        """Of an early small step, with its part of a refresh."""
        return self.turn_flops + self.moment_flops + self.refresh_flops / REFRESH

    def of(self, vector: Tensor) -> Tensor:
        """The matrix, as a view."""
        return vector[self.place : self.place + self.rows * self.columns].view(self.rows, self.columns)


def affordable_sides(blocks: Sequence[Block], budget: float) -> list[list[Side]]:
    """For each block the sides that are turned: the smallest first, as long as all together are in budget.

    >>> from torch import nn
    >>> layer = nn.Linear(100, 3)
    >>> affordable_sides([Block("layer", tuple(layer.parameters()))], budget=1e4)
    [[Side(place=0, rows=3, columns=100, axis=0)]]
    """
    found: list[list[Side]] = [[] for _ in blocks]
    sides = [(index, side) for index, block in enumerate(blocks) for side in _sides(block)]
    for index, side in sorted(sides, key=lambda pair: pair[1].size):
        if side.price <= budget:
            budget -= side.price
            found[index].append(side)
    return found


def _sides(block: Block) -> Iterator[Side]:
    place = 0
    for param in block.params:
        if param.dim() > 1 and param.numel():
            rows = param.shape[0]
            columns = param.numel() // rows
            both = (Side(place, rows, columns, axis) for axis in (0, 1))
            yield from (side for side in both if side.size > 1)
        place += param.numel()


class Rotation:
    """The coordinates of one block, which follow its gradients.

    Args:
        sides: Which sides of its matrices are turned.
        state: What was kept of an earlier rotation of these sides, if anything was.
        like: A flat vector of the block.
    """

    def __init__(self, sides: Sequence[Side], state: State, like: Tensor) -> None:
        self._sides = sides
        kept = state.get("moments", ()), state.get("bases", ())
        known = all(len(own) == len(sides) for own in kept)
        sizes = [side.size for side in sides]
        self._moments, self._bases = (
            [own.to(like).clone() for own in kept[0]] if known else [like.new_zeros(n, n) for n in sizes],
            [own.to(like) for own in kept[1]] if known else [torch.eye(n).to(like) for n in sizes],
        )
        matrices: dict[int, dict[int, int]] = {}
        for index, side in enumerate(sides):
            matrices.setdefault(side.place, {})[side.axis] = index
        self._matrices = list(matrices.values())

    def state(self) -> State:
        """What to keep; plain data."""
        return {"moments": self._moments, "bases": self._bases}

    def learn(self, gradient: Tensor, mean: Tensor, square: Tensor, count: int) -> None:
        """See a gradient, the ``count``-th.

        Where the coordinates change, ``mean`` is turned along, and ``square``, which cannot be turned, goes
        into their new order.
        """
        if not self._sides:
            return
        if counts(count):
            share = 1 - MEMORY ** (1 if count <= EARLY else 2) if count > 1 else 1.0
            for side, moments in zip(self._sides, self._moments, strict=True):
                matrix = side.of(gradient).T if side.axis else side.of(gradient)
                moments.addmm_(matrix, matrix.T, beta=1 - share, alpha=share)
        if is_refreshed(count):
            old = self.back_(mean.clone())
            found = [
                _nearer(moments.nan_to_num_(0.0, 0.0, 0.0), basis, RIDGE / count)
                for moments, basis in zip(self._moments, self._bases, strict=True)
            ]
            self._bases = [basis for basis, _ in found]
            mean.copy_(self.there_(old))
            for side, (_, order) in zip(self._sides, found, strict=True):
                matrix = side.of(square)
                matrix.copy_(matrix.index_select(side.axis, order))

    def there_(self, vector: Tensor) -> Tensor:
        """Bring a flat vector into these coordinates, in place.

        What is but rounding there becomes zero, as Adam would make it as large as all else.
        """
        for matrix, rows, columns in self._turns(vector):
            turned = matrix if rows is None else rows.T @ matrix
            turned = turned if columns is None else turned @ columns
            limit = 10 * torch.finfo(turned.dtype).eps * torch.linalg.vector_norm(turned)
            matrix.copy_(turned.masked_fill_(turned.abs() < limit, 0.0))
        return vector

    def back_(self, vector: Tensor) -> Tensor:
        """Bring a flat vector of these coordinates back into those of the block, in place."""
        for matrix, rows, columns in self._turns(vector):
            turned = matrix if rows is None else rows @ matrix
            matrix.copy_(turned if columns is None else turned @ columns.T)
        return vector

    def _turns(self, vector: Tensor) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
        """The matrices of which a side is turned, with the bases of rows and of columns."""
        for own in self._matrices:
            rows, columns = (self._bases[own[axis]] if axis in own else None for axis in (0, 1))
            yield self._sides[next(iter(own.values()))].of(vector), rows, columns


def _nearer(moments: Tensor, basis: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """A basis that is nearer to the eigenvectors, and which old vector each of its vectors comes from.

    One step of power iteration, all vectors together, the largest first: each then keeps to its eigenvector,
    where in another order they would slowly trade places. A little of the identity decides about directions
    in which there was no gradient yet.
    """
    share = ridge * moments.diagonal().mean()
    product = moments @ basis
    order = (product * basis).sum(dim=0).argsort(descending=True, stable=True)
    turned = product.add_(basis * share).index_select(1, order)
    found: Tensor = torch.linalg.qr(turned)[0]
    return found, order


def counts(count: int) -> bool:
    """Whether the second moments take in the gradient of this small step."""
    return count <= EARLY or count % 2 == 0


def is_refreshed(count: int) -> bool:
    """Whether the eigenvectors are taken anew at this small step."""
    period = REFRESH if count <= EARLY else 2 * REFRESH
    return count % period == 0 or (count < REFRESH and count & (count - 1) == 0)


def rotation_flops(sides: Sequence[Side], first: int, last: int) -> int:
    """Of the small steps with these numbers."""
    steps = range(first, last + 1)
    num_counted, num_refreshed = sum(map(counts, steps)), sum(map(is_refreshed, steps))
    return sum(
        len(steps) * side.turn_flops + num_counted * side.moment_flops + num_refreshed * side.refresh_flops
        for side in sides
    )
