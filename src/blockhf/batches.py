"""Batches: any nesting of tensors whose first dimension is that of the samples."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


def tensors_of(nest: Any) -> Iterator[Tensor]:
    """The tensors of any nesting of tuples, lists and mappings, in order."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from tensors_of(value)
    elif isinstance(nest, (tuple, list)):
        for value in nest:
            yield from tensors_of(value)


def batch_size(batch: Any) -> int:
    """The common first dimension of the tensors of a batch.

    >>> import torch
    >>> batch_size({"image": torch.zeros(5, 3), "label": torch.zeros(5)})
    5
    """
    sizes = sorted({tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim() > 0})
    if not sizes:
        raise ValueError(
            "The batch holds no tensor with a sample dimension. Pass tensors, or tuples, lists or dicts of "
            "them; or call step(objective) with an objective of no arguments."
        )
    if len(sizes) > 1:
        raise ValueError(
            f"The tensors of the batch have different first dimensions: {', '.join(map(str, sizes))}. "
            "Put the samples first in each of them."
        )
    if sizes == [0]:
        raise ValueError("The batch is empty.")
    return sizes[0]


def take(batch: Any, start: int, stop: int) -> Any:
    """The samples ``start`` to ``stop`` of a batch, in the same nesting.

    Numbers, ``None`` and whatever else is no tensor with a sample dimension are passed on as they are.

    >>> import torch
    >>> take({"x": torch.arange(4), "scale": 0.5}, 1, 3)
    {'x': tensor([1, 2]), 'scale': 0.5}
    """
    return _mapped(batch, lambda tensor: tensor[start:stop] if tensor.dim() > 0 else tensor)


def rebuild(batch: Any, tensors: Iterable[Tensor]) -> Any:
    """The same nesting with other tensors, given in the order of ``tensors_of``."""
    others = iter(tensors)
    return _mapped(batch, lambda _: next(others))


def _mapped(nest: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, Mapping):
        values = {key: _mapped(value, function) for key, value in nest.items()}
        if not isinstance(nest, dict) and not hasattr(nest, "__copy__"):
            return values  # a shallow copy might share its items with the original
        part: Any = copy.copy(nest)  # keeps the class, e.g. that of a tokenizer's output
        for key, value in values.items():
            part[key] = value
        return part
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(_mapped(value, function) for value in nest))
    if isinstance(nest, (tuple, list)):
        return type(nest)(_mapped(value, function) for value in nest)
    return nest


@dataclass(frozen=True)
class Share:
    """What part of a set of samples is here, where several processes have them between them.

    Attributes:
        own: How many are here.
        total: How many there are.
        before: How many have a place before those that are here.
    """

    own: int
    total: int
    before: int = 0

    @classmethod
    def of(cls, counts: Sequence[int], place: int) -> Share:
        """The share of one of several processes, from how many samples each has.

        >>> Share.of([3, 5, 2], 1)
        Share(own=5, total=10, before=3)
        """
        return cls(counts[place], sum(counts), sum(counts[:place]))

    @property
    def weight(self) -> float:
        return self.own / self.total if self.total else 0.0


def share_out(number: int, sizes: Sequence[int]) -> list[int]:
    """Take a number of samples from shards in proportion to their sizes.

    >>> share_out(10, [100, 100, 50])
    [4, 4, 2]
    >>> share_out(3, [1, 1, 1, 1])
    [1, 1, 1, 0]
    """
    total = sum(sizes)
    number = min(number, total)
    exact = [number * size / total if total else 0.0 for size in sizes]
    shares = [int(share) for share in exact]
    by_rest = sorted(range(len(sizes)), key=lambda rank: (shares[rank] - exact[rank], rank))
    for rank in itertools.islice(itertools.cycle(by_rest), 2 * len(sizes)):
        if sum(shares) == number:
            break
        if shares[rank] < sizes[rank]:
            shares[rank] += 1
    return shares
