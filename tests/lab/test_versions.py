"""The tests on other versions: what a record holds, and the page that is made of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import blockhf
from blockhf_lab import versions
from children import PATIENCE, starts_processes

ROOT = Path(__file__).parents[2]


def test_the_core_is_there() -> None:
    assert [name for name in versions.CORE if not (ROOT / name).exists()] == []


@starts_processes
def test_a_record_tells_what_passed_failed_and_was_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_few.py").write_text(
        "import pytest\n"
        "def test_fine(): pass\n"
        "def test_wrong(): assert False\n"
        "def test_left_out(): pytest.skip('not here')\n"
    )
    record = versions.here([str(tmp_path / "test_few.py")])
    assert (record["passed"], len(record["failed"]), record["skipped"]) == (1, 1, {"not here": 1})
    assert record["failed"][0].endswith("::test_wrong")
    assert len(record["losses"]) == 5
    assert record["losses"][-1] < record["losses"][0] / 4
    assert record["blockhf"] == blockhf.__version__
    assert (
        versions.record_name({"torch": "2.13.0+cpu", "python": "3.11.7"}) == "torch-2.13.0-python-3.11.json"
    )


def test_the_page_is_what_the_records_make_it() -> None:
    text = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    assert text == versions.page(ROOT / "results" / "versions"), "Run python -m blockhf_lab.versions page."


def test_without_records_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no record"):
        versions.page(tmp_path)


@starts_processes
def test_without_uv_nothing_is_recorded(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "blockhf_lab.versions", "run", "--uv", "/nowhere/uv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert "/nowhere/uv" in done.stderr


def test_where_no_environment_can_be_made_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not versions.run([("2.6.0", "3.10"), ("newest", "3.13")], tmp_path, "false")
    assert capsys.readouterr().out.count("left out: no environment could be made") == 2
