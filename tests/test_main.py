"""The command ``blockhf``: of the library alone, and handed over to the lab."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

import blockhf
from blockhf import __main__ as command


def run_main(monkeypatch: pytest.MonkeyPatch, *args: str, lab: str | None = None) -> int | str | None:
    """Run ``blockhf`` with no lab installed, or with one whose function is ``lab``; returns its exit code."""
    found = EntryPoints([] if lab is None else [EntryPoint("main", lab, "blockhf.commands")])
    monkeypatch.setattr(command, "entry_points", found.select)
    monkeypatch.setattr(sys, "argv", ["blockhf", *args])
    with pytest.raises(SystemExit) as raised:
        command.main()
    code: int | str | None = raised.value.code
    return code


@pytest.mark.parametrize("lab", [None, "sys:exit"])
def test_the_library_alone_has_a_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lab: str | None
) -> None:
    assert run_main(monkeypatch, "--version", lab=lab) == 0
    assert capsys.readouterr() == (f"blockhf {blockhf.__version__}\n", "")


@pytest.mark.parametrize("args", [[], ["--help"], ["demo", "--quick"], ["--version", "demo"]])
def test_without_the_lab_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert run_main(monkeypatch, *args) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("Error: The commands of blockhf are in the package blockhf-lab")
    assert shown.err.endswith("python -m pip install . ./lab\n")


def lab_that_exits() -> None:
    sys.exit(f"called with {sys.argv[1:]}")


@pytest.mark.parametrize("args", [[], ["--help"], ["demo", "--quick"]])
def test_the_lab_is_called_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, args: list[str]) -> None:
    assert run_main(monkeypatch, *args, lab=f"{__name__}:lab_that_exits") == f"called with {args}"
