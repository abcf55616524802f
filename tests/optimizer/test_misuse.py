"""Misuses, each with what comes of it: what is refused in which words, and what goes on all the same."""

from __future__ import annotations

import re
import warnings

import misused_steps
import misuses
import pytest
from misuses import Misuse

TABLE: dict[str, Misuse] = {**misuses.TABLE, **misused_steps.TABLE}


@pytest.mark.parametrize("misuse", TABLE.values(), ids=TABLE.keys())
def test_a_misuse_is_told_in_words_that_help(misuse: Misuse) -> None:
    if issubclass(misuse.kind, Warning):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            misuse.act()
        (warning,) = caught
        assert issubclass(warning.category, misuse.kind)
        message = str(warning.message)
    else:
        with pytest.raises(misuse.kind) as raised:
            misuse.act()
        message = str(raised.value)
    assert re.search(misuse.message, message), message


def test_the_table_is_as_long_as_was_promised() -> None:
    assert len(TABLE) >= 60
