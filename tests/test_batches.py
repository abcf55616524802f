"""Batches: their samples, their parts, and what several processes have of them."""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockhf.batches import Share, batch_size, gather, rebuild, select, stratified, take, tensors_of, without

X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)


class Pair(NamedTuple):
    inputs: Tensor
    targets: Any


class Encoding(UserDict[str, Any]):
    """Like the batch of a tokenizer: a mapping with attributes beside its items."""

    def __init__(self, data: dict[str, Any], encodings: str = "kept") -> None:
        super().__init__(data)
        self.encodings = encodings


class Output(OrderedDict[str, Any]):
    """Like the outputs of the transformers library, which refuse ``update``."""

    def update(self, *_: Any) -> None:  # type: ignore[override]
        raise RuntimeError("no update")


class Foreign(MutableMapping[str, Any]):
    """A mapping whose shallow copy shares its items."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


def defaulting(items: dict[str, Any]) -> Any:
    made: defaultdict[str, Any] = defaultdict(list)
    made.update(items)
    return made


Loose = namedtuple("Loose", ["a", "b"])

BATCHES: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "tensor": lambda cut: cut(X),
    "tuple": lambda cut: (cut(X), cut(Y)),
    "list": lambda cut: [cut(X), cut(Y)],
    "named tuple": lambda cut: Pair(cut(X), cut(Y)),
    "untyped named tuple": lambda cut: Loose(cut(X), None),
    "dict": lambda cut: {"x": cut(X), "y": cut(Y)},
    "ordered dict": lambda cut: Output(x=cut(X), y=cut(Y)),
    "default dict": lambda cut: defaulting({"x": cut(X)}),
    "tokenizer's batch": lambda cut: Encoding({"ids": cut(X), "mask": None}, encodings="other"),
    "nesting": lambda cut: ({"x": [cut(X), Pair(cut(Y), (cut(X),))]}, {}, (), cut(Y)),
    "None, numbers and strings inside": lambda cut: (cut(X), None, 0.5, 7, "text", torch.tensor(2.0)),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if hasattr(a, "keys"):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a) and vars_of(a) == vars_of(b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def vars_of(mapping: Any) -> Any:
    return getattr(mapping, "encodings", None)


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
def test_a_part_of_a_batch_has_the_same_nesting_with_fewer_samples(make: Callable[..., Any]) -> None:
    batch = make(lambda tensor: tensor)
    assert batch_size(batch) == 6
    assert same(take(batch, 1, 4), make(lambda tensor: tensor[1:4]))
    assert same(batch, make(lambda tensor: tensor))  # the batch itself stays whole


@pytest.mark.parametrize("wrap", [Foreign, MappingProxyType])
def test_a_mapping_that_cannot_be_copied_is_parted_into_a_dict(wrap: Callable[..., Any]) -> None:
    batch = wrap({"x": X, "scale": 0.5})
    part = take(batch, 0, 2)
    assert same(part, {"x": X[:2], "scale": 0.5})
    assert torch.equal(batch["x"], X)


def test_tensors_of_a_nest_come_in_order() -> None:
    nest = {"a": (X, None, [Y]), "b": Encoding({"c": X}), "d": 3}
    assert [id(tensor) for tensor in tensors_of(nest)] == [id(X), id(Y), id(X)]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        pytest.param({}, "The batch holds no tensor with a sample dimension. Pass tensors", id="empty dict"),
        pytest.param((None, 3), "The batch holds no tensor with a sample dimension.", id="no tensor"),
        pytest.param(torch.tensor(1.0), "The batch holds no tensor with a sample dimension.", id="a number"),
        pytest.param(
            (X, Y[:4]),
            "The tensors of the batch have different first dimensions: 4, 6. Put the samples first",
            id="different sizes",
        ),
        pytest.param((X[:0], Y[:0]), "The batch is empty.", id="no samples"),
    ],
)
def test_a_batch_without_a_sample_dimension_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^" + re.escape(message)):
        batch_size(batch)


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
def test_a_batch_is_rebuilt_from_its_tensors(make: Callable[..., Any]) -> None:
    batch = make(lambda tensor: tensor)
    others = [tensor + 1 for tensor in tensors_of(batch)]
    rebuilt = rebuild(batch, others)
    assert all(a is b for a, b in zip(tensors_of(rebuilt), others, strict=True))
    assert same(rebuild(rebuilt, tensors_of(batch)), batch)


# --- shares ------------------------------------------------------------------------------------------

COUNTS = st.lists(st.integers(0, 50), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(counts=COUNTS)
def test_the_shares_of_all_processes_are_the_whole_in_order(counts: list[int]) -> None:
    shares = [Share.of(counts, place) for place in range(len(counts))]
    assert [share.own for share in shares] == counts
    assert {share.total for share in shares} == {sum(counts)}
    assert shares[0].before == 0
    for one, next_one in itertools.pairwise(shares):
        assert next_one.before == one.before + one.own
    assert sum(share.weight for share in shares) == pytest.approx(1.0 if sum(counts) else 0.0)


# --- draws -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
def test_selected_samples_have_the_same_nesting(make: Callable[..., Any]) -> None:
    batch, places = make(lambda tensor: tensor), torch.tensor([0, 2, 5])
    assert same(select(batch, places), make(lambda tensor: tensor[places]))


def test_lists_and_arrays_with_an_entry_for_each_sample_are_cut_along() -> None:
    numpy = pytest.importorskip("numpy")
    batch = (X, list("abcdef"), numpy.arange(6), [1, 2])
    part = take(batch, 1, 3)
    assert (part[1], part[2].tolist(), part[3]) == (["b", "c"], [1, 2], [1, 2])
    chosen = select(batch, torch.tensor([0, 5]))
    assert (chosen[1], chosen[2].tolist(), chosen[3]) == (["a", "f"], [0, 5], [1, 2])


NUMBERS = st.integers(1, 60).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total)))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(numbers=NUMBERS, seed=st.integers(0, 2**40))
def test_drawn_places_are_in_order_and_spread_over_all(numbers: tuple[int, int], seed: int) -> None:
    number, total = numbers
    places = stratified(number, total, torch.Generator().manual_seed(seed))
    assert len(places) == number
    assert bool((places.diff() > 0).all())
    assert set(places.tolist()) <= set(range(total))
    for stop in range(total):  # of any stretch from the front about as many as its share
        assert abs(int((places < stop).sum()) - number * stop / total) < 2
    rest = without(places, total)
    assert sorted([*places.tolist(), *rest.tolist()]) == list(range(total))


@pytest.mark.parametrize(("number", "total"), [(1, 5), (2, 8), (3, 7), (4, 10), (5, 7), (6, 9), (7, 7)])
def test_every_place_is_as_likely_as_any_other(number: int, total: int) -> None:
    generator, num_draws = torch.Generator().manual_seed(0), 4000
    counts = torch.zeros(total)
    for _ in range(num_draws):
        counts[stratified(number, total, generator)] += 1
    chance = number / total
    deviation = (num_draws * chance * (1 - chance)) ** 0.5
    assert float((counts - num_draws * chance).abs().max()) <= 4 * deviation


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(own=st.integers(1, 20), rest=st.integers(0, 20), num_ranks=st.integers(1, 5), seed=st.integers(0, 99))
def test_equal_stretches_have_as_many_places_where_that_can_be(
    own: int, rest: int, num_ranks: int, seed: int
) -> None:
    size = own + rest
    places = stratified(own * num_ranks, size * num_ranks, torch.Generator().manual_seed(seed))
    assert torch.bincount(places // size, minlength=num_ranks).tolist() == [own] * num_ranks


def test_batches_are_gathered_until_there_are_enough_samples() -> None:
    inputs, number = torch.randn(10, 2), torch.arange(10)
    loader = [
        {"inputs": inputs[start : start + 2], "rest": (number[start : start + 2], list("ab")), "scale": 0.5}
        for start in range(0, 10, 2)
    ]
    first, second, third = gather(loader, 3)
    assert torch.equal(torch.cat([first["inputs"], second["inputs"], third["inputs"]]), inputs)
    assert first["rest"][0].tolist() == [0, 1, 2, 3]
    assert first["rest"][1] == ["a", "b", "a", "b"]
    assert first["scale"] == 0.5
    assert len(third["inputs"]) == 2, "what is left, as it is at least half as many"


@pytest.mark.parametrize(("num_samples", "expected"), [(4, [4, 4, 2]), (8, [8]), (1, [2] * 5), (99, [10])])
def test_what_is_left_over_is_passed_on_where_it_is_no_less_than_half(
    num_samples: int, expected: list[int]
) -> None:
    assert [len(batch) for batch in gather(torch.arange(10).split(2), num_samples)] == expected


def test_no_samples_cannot_be_gathered() -> None:
    with pytest.raises(ValueError, match=r"^num_samples is 0, but must be at least 1\."):
        next(gather([torch.ones(2)], 0))
