"""The command line, called from tests."""

from __future__ import annotations

import sys

import pytest

from blockhf_lab import cli


def run_main(monkeypatch: pytest.MonkeyPatch, *args: str) -> int | str | None:
    """Run ``blockhf`` with these arguments; returns what it exits with."""
    monkeypatch.setattr(sys, "argv", ["blockhf", *args])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    code: int | str | None = raised.value.code
    return code
