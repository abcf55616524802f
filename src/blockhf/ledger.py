"""The one cost model: operations are counted once for each kind of work, and choices ask here.

Costs are counted operations, never seconds, so the same run makes the same choices again, and a resumed run
continues bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass

from blockhf.flops import Counter

PRODUCT = 4 / 3
"""What a product with a Gauss-Newton matrix takes by counting multiplications, in gradients."""

GRADIENT = 3
"""What a gradient takes, in forward passes."""


@dataclass
class Work:
    """What a step has asked of the objective, in passes and in samples."""

    gradient_samples: int = 0
    evaluated_samples: int = 0
    linearized_samples: int = 0
    num_gradients: int = 0
    num_evaluations: int = 0
    num_linearizations: int = 0


class Shapes(tuple[tuple[int, ...], ...]):
    """Of the tensors of a batch, each with the samples first."""


class Ledger:
    """Adds up the operations of a step. Each kind of work is counted the first time it is done.

    ``setup`` has seconds, for the report alone: of what this step did and later ones need not do again.

    What is known is remembered by the kind of work, the key that its caller gives, and the scope: all
    else that a count depends on (the objective, modes of modules, which parameters are trained).

    >>> import torch
    >>> ledger = Ledger()
    >>> for _ in range(3):
    ...     with ledger.counting("product"):
    ...         _ = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> ledger.total
    144
    """

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.work = Work()
        self.setup: dict[str, float] = {}
        self._scope = 0
        self._scopes: dict[Hashable, int] = {}
        self._known: dict[Hashable, int] = {}
        self._lines: dict[Hashable, _Line] = {}
        self._inside = False
        self._num_once = 0

    def begin(self, scope: Hashable) -> None:
        """Start a step."""
        self.totals.clear()
        self.work, self.setup = Work(), {}
        self.enter(scope)
        self._inside = False

    def enter(self, scope: Hashable) -> None:
        """Go on in another scope."""
        self._scope = self._scopes.setdefault(scope, len(self._scopes))  # a number, as it is often looked up

    @property
    def total(self) -> int:
        """Operations of all kinds of work in this step."""
        return sum(self.totals.values())

    @property
    def repeated(self) -> int:
        """Those that a step like this one takes again: without checks."""
        return self.total - self.totals.get("checks", 0)

    def add(self, kind: str, flops: int) -> None:
        self.totals[kind] = self.totals.get(kind, 0) + flops

    def summary(self) -> dict[str, int]:
        """For the report: passes, samples and operations; those of checks are not in the total."""
        return {
            **asdict(self.work),
            "flops": self.repeated,
            **{f"{kind}_flops": flops for kind, flops in self.totals.items()},
        }

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """Put what is counted inside under ``"checks"``.

        Such work is done once for an objective, and again by a run that is resumed, so that no decision may
        go by it.
        """
        before, work = dict(self.totals), asdict(self.work)
        self._num_once += 1
        try:
            yield
        finally:
            self._num_once -= 1
            vars(self.work).update(work)
            spent = self.total - sum(before.values())
            self.totals.clear()
            self.totals.update(before)
            self.add("checks", spent)

    @property
    def is_once(self) -> bool:
        """Whether what is done now is done once, so that no decision may go by it."""
        return self._num_once > 0

    @contextlib.contextmanager
    def counting(self, kind: str, *key: Hashable) -> Iterator[None]:
        """Count what happens inside, which must be the same amount of work for the same kind and key.

        Inside of another count it does nothing: the work is a part of the other's.
        """
        if self._inside:
            yield
            return
        place = (kind, key, self._scope)
        flops = self._known.get(place)
        line, size = self._line(kind, key) if flops is None else (None, 0)
        if line is not None:
            flops = line.at(size)
        self._inside = True
        try:
            if flops is not None:
                yield
            else:
                with Counter() as counter:
                    yield
                flops = counter.flops
                if line is not None:
                    line.note(size, flops)
        finally:
            self._inside = False
        self._known[place] = flops
        self.add(kind, flops)

    def _line(self, kind: str, key: tuple[Hashable, ...]) -> tuple[_Line | None, int]:
        """How the cost of a kind of work grows with the samples, if its key has shapes with samples first."""
        sizes = {size for shape in _shapes(key) for size in shape[:1]}
        if len(sizes) != 1:
            return None, 0
        place = (kind, _without_sizes(key), self._scope)
        return self._lines.setdefault(place, _Line()), sizes.pop()

    def known(self, kind: str, *key: Hashable) -> int | None:
        """The operations of a kind of work, if it was done before."""
        return self._known.get((kind, key, self._scope))


class _Line:
    """How a cost grows with the number of samples, once counts have shown that it is along a line.

    Numbers of samples change from step to step, and counting is dear. Three counts on a line are enough to go
    by it; where they are on none, each new number is counted. So what is found does not depend on which
    numbers came first, and a resumed run finds the same.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def note(self, size: int, flops: int) -> None:
        if len(self._counts) < 3:
            self._counts[size] = flops

    def at(self, size: int) -> int | None:
        """The cost for so many samples, if it is known to be on a line."""
        if len(self._counts) < 3:
            return None
        (n, a), (m, b), (k, c) = self._counts.items()
        if (b - a) * (k - n) != (c - a) * (m - n):
            return None
        return a + (b - a) * (size - n) // (m - n)


def _shapes(key: Hashable) -> Iterator[tuple[int, ...]]:
    """The shapes of a batch's tensors in a key, wherever they are."""
    if isinstance(key, Shapes):
        yield from key
    elif isinstance(key, tuple):
        for own in key:
            yield from _shapes(own)


def _without_sizes(key: Hashable) -> Hashable:
    if isinstance(key, Shapes):
        return tuple(shape[1:] for shape in key)
    return tuple(map(_without_sizes, key)) if isinstance(key, tuple) else key
