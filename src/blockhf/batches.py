"""Batches: any nesting of tensors whose first dimension is that of the samples."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


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


def lengths(batch: Any) -> dict[Any, int]:
    """How many samples there are under each key, where a mapping has samples of several kinds.

    Empty where all members are equally long, as those of an ordinary batch are.

    >>> lengths({"interior": torch.zeros(900, 2), "boundary": torch.zeros(120, 2), "viscosity": 0.01})
    {'interior': 900, 'boundary': 120}
    """
    if not isinstance(batch, Mapping):
        return {}
    found = {}
    for key, value in batch.items():
        sizes = {len(member) for member in _sampled(value)}
        if len(sizes) > 1:
            return {}
        if sizes:
            found[key] = sizes.pop()
    return found if len(set(found.values())) > 1 else {}


def batch_size(batch: Any) -> int:
    """The common first dimension of the tensors of a batch; of samples of several kinds, how many there are.

    Raises:
        ValueError: There is none, or there are members of which nobody can say whether they have samples.

    >>> batch_size({"image": torch.zeros(5, 3), "label": torch.zeros(5)})
    5
    """
    _check_members(batch)
    if (kinds := lengths(batch)) and 0 not in kinds.values():
        return sum(kinds.values())
    sizes = sorted({len(member) for member in _sampled(batch)})
    if not sizes:
        raise ValueError(
            "The batch holds no tensor with a sample dimension. Pass tensors, or tuples, lists or dicts of "
            "them; or call step(objective) with an objective of no arguments."
        )
    if len(sizes) > 1:
        raise ValueError(
            f"The tensors of the batch have different first dimensions: {', '.join(map(str, sizes))}. "
            "Put the samples first in each of them. Samples of several kinds go into a dict, as in "
            'step(objective, {"interior": x, "boundary": y}).'
        )
    if sizes == [0]:
        raise ValueError("The batch is empty. Pass at least one sample, or skip the step.")
    return sizes[0]


def check_curvature_batch(batch: Any, curvature_batch: Any) -> None:
    """Raise where a curvature batch is nothing that the objective could take in place of the batch."""
    if curvature_batch is None:
        return
    if batch is None:
        raise ValueError("A curvature batch was given without a gradient batch. Give both.")
    kinds = [[(t.dtype, t.dim()) for t in tensors_of(given)] for given in (batch, curvature_batch)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            "The third argument of step is the curvature batch, and it does not look like the batch: "
            f"{_listed(kinds[1])} against {_listed(kinds[0])}. Pass inputs and targets together, as "
            "step(objective, (inputs, targets))."
        )


def proportions(batch: Any) -> list[int]:
    """Of samples of several kinds, how many of each are in the smallest part in which they are in proportion.

    Their means add up over such parts, and over no others.

    >>> proportions({"interior": torch.zeros(900, 2), "boundary": torch.zeros(120, 2)})
    [15, 2]
    """
    numbers = list(lengths(batch).values())
    return [number // math.gcd(*numbers) for number in numbers]


def check_kinds(batch: Any, micro_batch_size: int | None) -> None:
    """Raise where parts of samples of several kinds would be too small for their means to add up."""
    if micro_batch_size is not None and micro_batch_size < (least := sum(proportions(batch))):
        listed = ", ".join(f"{number} of {key!r}" for key, number in lengths(batch).items())
        raise ValueError(
            f"micro_batch_size is {micro_batch_size}, but the batch has samples of several kinds ({listed}), "
            f"whose means add up only over parts of {least} samples or a multiple. Pass as many, or numbers "
            "of samples with a larger common divisor."
        )


def _listed(kinds: Sequence[tuple[torch.dtype, int]]) -> str:
    return ", ".join(f"{dtype} of {dim} dimensions" for dtype, dim in kinds) or "no tensor"


def take(batch: Any, start: int, stop: int) -> Any:
    """The samples ``start`` to ``stop`` of a batch, in the same nesting.

    Lists of numbers or words, and arrays, that are as long as there are samples are cut too. Other numbers,
    ``None`` and whatever else has no samples is passed on as it is.

    >>> take({"x": torch.arange(4), "scale": 0.5, "name": ["a", "b", "c", "d"]}, 1, 3)
    {'x': tensor([1, 2]), 'scale': 0.5, 'name': ['b', 'c']}
    """
    if kinds := lengths(batch):
        total = sum(kinds.values())
        ends = {key: (start * n // total, stop * n // total) for key, n in kinds.items()}
        return {
            **batch,
            **{key: take(batch[key], first, max(last, first + 1)) for key, (first, last) in ends.items()},
        }
    return _cut(batch, lambda member: member[start:stop])


def select(batch: Any, places: Tensor) -> Any:
    """The samples at some places of a batch, in the same nesting.

    >>> select((torch.arange(4) * 10, ["a", "b", "c", "d"]), torch.tensor([0, 3]))
    (tensor([ 0, 30]), ['a', 'd'])
    """
    if kinds := lengths(batch):  # one kind after the other, and at least one of each
        chosen, before = dict(batch), 0
        for key, n in kinds.items():
            own = places[(places >= before) & (places < before + n)] - before
            chosen[key] = select(batch[key], own if len(own) else places[:1] % n)
            before += n
        return chosen

    def pick(member: Any) -> Any:
        if isinstance(member, Tensor):
            chosen = member.index_select(0, places.to(member.device)) if member.dim() > 0 else member
            return chosen.detach().requires_grad_() if member.requires_grad and member.is_leaf else chosen
        if isinstance(member, (list, tuple)):
            return type(member)(member[place] for place in places.tolist())
        return member[places.numpy()]

    return _cut(batch, pick)


def gather(batches: Iterable[Any], num_samples: int) -> Iterator[Any]:
    """Join the batches of a loader until there are so many samples together.

    For loaders whose batches are too small to hold samples out of. What is left at the end is passed on where
    it is at least half as many, or where there is nothing else.

    Args:
        batches: Nestings of tensors, each with the samples first.
        num_samples: The fewest samples to join; a few thousand do well.

    >>> [len(batch) for batch in gather(torch.arange(10).split(2), 4)]
    [4, 4, 2]
    """
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}, but must be at least 1.")
    parts: list[Any] = []
    number, is_first = 0, True
    for batch in batches:
        parts.append(batch)
        number += batch_size(batch)
        if number >= num_samples:
            yield _joined(parts)
            parts, number, is_first = [], 0, False
    if parts and (is_first or 2 * number >= num_samples):
        yield _joined(parts)


def _joined(parts: Sequence[Any]) -> Any:
    """One nesting out of several of the same form."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts)) if first.dim() > 0 else first
    if _is_array(first):
        return sys.modules["numpy"].concatenate(parts)
    if _is_plain(first) and not isinstance(first, tuple):
        return [value for part in parts for value in part]
    if isinstance(first, Mapping):
        joined = {key: _joined([part[key] for part in parts]) for key in first}
        return joined if not isinstance(first, dict) else type(first)(joined)
    if isinstance(first, (tuple, list)):
        own = [_joined(list(members)) for members in zip(*parts, strict=True)]
        return type(first)(*own) if _is_record(first) else type(first)(own)
    return first


def rebuild(batch: Any, tensors: Iterable[Tensor]) -> Any:
    """The same nesting with other tensors, given in the order of ``tensors_of``."""
    others = iter(tensors)
    return _mapped(batch, lambda member: next(others) if isinstance(member, Tensor) else member)


def has_samples_elsewhere(batch: Any) -> bool:
    """Whether there are samples in lists or arrays too, and not in tensors alone.

    >>> has_samples_elsewhere((torch.zeros(2, 3), ["a", "b"]))
    True
    """
    found: list[Any] = []

    def note(member: Any) -> Any:
        found.append(member)
        return member

    _cut(batch, note)
    return not all(isinstance(member, Tensor) for member in found)


def _cut(batch: Any, cut: Callable[[Any], Any]) -> Any:
    size = next((len(member) for member in _sampled(batch)), None)

    def part(member: Any) -> Any:
        if isinstance(member, Tensor):
            return cut(member) if member.dim() > 0 else member
        return cut(member) if _is_array(member) or len(member) == size else member

    return _mapped(batch, part)


def _sampled(batch: Any) -> Iterator[Any]:
    """The members that have a sample dimension for certain: tensors and arrays."""
    if isinstance(batch, Tensor):
        if batch.dim() > 0:
            yield batch
    elif _is_array(batch):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _sampled(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from _sampled(value)


def _mapped(nest: Any, function: Callable[[Any], Any]) -> Any:
    """The same nesting with ``function`` of each tensor, array, and list of plain values."""
    if isinstance(nest, Tensor) or _is_array(nest) or _is_plain(nest):
        return function(nest)
    if isinstance(nest, Mapping):
        values = {key: _mapped(value, function) for key, value in nest.items()}
        if not isinstance(nest, dict) and not hasattr(nest, "__copy__"):
            return values  # a shallow copy might share its items with the original
        part: Any = copy.copy(nest)  # keeps the class, e.g. that of a tokenizer's output
        for key, value in values.items():
            part[key] = value
        return part
    if _is_record(nest):
        return type(nest)(*(_mapped(value, function) for value in nest))
    if isinstance(nest, (tuple, list)):
        return type(nest)(_mapped(value, function) for value in nest)
    return nest


def _is_array(member: Any) -> bool:
    """Whether it is an array of numpy with a first dimension; numpy is asked only where it is in use."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(member, numpy.ndarray) and member.ndim > 0


def _is_record(nest: Any) -> bool:
    """Whether it is a tuple whose members have names."""
    return isinstance(nest, tuple) and hasattr(nest, "_fields")


def _is_plain(member: Any) -> bool:
    """Whether it is a list or tuple of numbers and words."""
    return (
        type(member) in (list, tuple)
        and len(member) > 0
        and all(isinstance(value, (int, float, complex, str, bytes, type(None))) for value in member)
    )


def _check_members(batch: Any) -> None:
    if isinstance(batch, PackedSequence):
        raise ValueError(
            "The batch holds a PackedSequence, whose samples are interleaved. Pass the padded tensor and the "
            "lengths, and pack them in the objective with pack_padded_sequence(..., batch_first=True)."
        )
    if isinstance(batch, Tensor):
        if batch.layout is not torch.strided or batch.is_nested:
            raise ValueError(
                f"The batch holds a tensor of layout {batch.layout}, of which samples cannot be taken. Pass "
                "a dense one, and convert it in the objective."
            )
    elif isinstance(batch, Mapping):
        for value in batch.values():
            _check_members(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            _check_members(value)


_HASHED = 2**26
"""The most numbers of a batch that are looked at to know it again."""


def fingerprint(batch: Any) -> int | None:
    """A number that batches of the same samples share, in whatever order these come.

    It is made of the bits themselves, exactly. ``None`` where there are too many of them, or where samples
    are kept in something else than tensors of real numbers.

    >>> one, other = torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [1.0]])
    >>> fingerprint(one) == fingerprint(other), fingerprint(one) == fingerprint(-one)
    (True, False)
    """
    tensors = [own.detach() for own in tensors_of(batch) if own.dim() > 0]
    if not tensors or sum(own.numel() for own in tensors) > _HASHED or has_samples_elsewhere(batch):
        return None
    if any(own.is_complex() or own.is_quantized for own in tensors):
        return None
    total: Tensor | None = None
    for number, size in enumerate(sorted({len(own) for own in tensors})):
        rows = torch.full((size,), number, device=tensors[0].device)
        for own in tensors:
            if len(own) == size:
                bits = _bits(own.reshape(size, -1))
                odd = 2 * torch.arange(1, bits.shape[1] + 1, device=bits.device) * 0x9E3779B1 + 1
                rows = (rows ^ (rows >> 31)) * 0x5851F42D4C957F2D + (bits * odd).sum(1).to(rows.device)
        mixed = ((rows ^ (rows >> 29)) * 0x2545F4914F6CDD1D).sum()
        total = mixed if total is None else total * 31 + mixed
    assert total is not None
    return int(total)


NUM_MARKED = 64
"""Samples by which a large batch is known again."""


def marks(batch: Any, most: int) -> list[int]:
    """A fingerprint in two halves that can be added up over processes, after whether there is one.

    Of more than ``most`` samples it is that of some, at places that are always the same.
    """
    size = batch_size(batch)
    if size > most:
        places = torch.arange(NUM_MARKED, device="cpu") * (size // NUM_MARKED)
        batch = None if lengths(batch) else select(batch, places)
    number = None if batch is None else fingerprint(batch)
    return [0, 0, 0] if number is None else [1, number & (2**32 - 1), (number >> 32) & (2**32 - 1)]


def joint_fingerprint(found: Sequence[Sequence[int]]) -> int | None:
    """That of the samples of all processes, from the marks of each.

    >>> whole = torch.arange(6.0)
    >>> joint_fingerprint([marks(whole[:2], 9), marks(whole[2:], 9)]) == fingerprint(whole)
    True
    """
    if not all(own[0] for own in found):
        return None
    number = sum(low + (high << 32) for _, low, high in found) % 2**64
    return number - 2**64 if number >= 2**63 else number


def _bits(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.long()
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()]).long()


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


def stratified(number: int, total: int, generator: torch.Generator) -> Tensor:
    """Random places, in order: one out of each of ``number`` equal stretches of ``total``.

    Every place is as likely as any other, and samples that come in an order are all represented. Where the
    samples are shared out evenly over processes, each has as many of the places.

    >>> places = stratified(4, 100, torch.Generator().manual_seed(0))
    >>> [int(place) // 25 for place in places]
    [0, 1, 2, 3]
    """
    if number == 0:
        return torch.empty(0, dtype=torch.long, device="cpu")
    # Stretches of different lengths would not treat all places alike, so they begin at a random place, within
    # the shortest period of places that has a whole number of them: ranks of one size keep equal counts.
    num_periods = math.gcd(number, total)
    own, period = number // num_periods, total // num_periods
    kind: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    shifts = torch.rand(num_periods, 1, generator=generator, **kind)
    starts = ((torch.arange(own, **kind) + shifts) * (period / own)).long()
    widths = torch.cat([starts[:, 1:], starts[:, :1] + period], dim=1) - starts
    draws = torch.rand(num_periods, own, generator=generator, **kind)
    places = (starts + torch.minimum((draws * widths).long(), widths - 1)) % period
    return (places.sort(dim=1)[0] + period * torch.arange(num_periods, device="cpu")[:, None]).flatten()


def without(places: Tensor, total: int) -> Tensor:
    """All other places, in order.

    >>> without(torch.tensor([1, 2]), 4)
    tensor([0, 3])
    """
    mask = torch.ones(total, dtype=torch.bool, device="cpu")
    mask[places] = False
    return mask.nonzero()[:, 0]
