"""What the tests of products share."""

from __future__ import annotations

from typing import Any

import pytest

from blockhf.curvature import auto, traced
from blockhf.curvature.trace import Trace


@pytest.fixture
def num_traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the traces that are made."""
    counter = [0]
    init = Trace.__init__

    def counting(self: Trace, *args: Any) -> None:
        counter[0] += 1
        init(self, *args)

    monkeypatch.setattr(traced.Trace, "__init__", counting)
    return counter


@pytest.fixture
def nothing_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_NODE", 0)
