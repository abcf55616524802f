"""A short campaign of kills; ``blockhf fuzz kills`` is the long one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from children import PATIENCE, starts_processes


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@starts_processes
def test_killed_runs_end_like_undisturbed_ones_and_the_campaign_goes_on(tmp_path: Path) -> None:
    def campaign(number: int) -> dict[str, object]:
        subprocess.run(
            [sys.executable, "-m", "blockhf", "fuzz", "kills", "--number", str(number), "--out", "."],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=PATIENCE,
            check=True,
            capture_output=True,
        )
        found: dict[str, object] = json.loads((tmp_path / "kills.json").read_text())
        return found

    assert campaign(6)["faults"] == []
    before = (tmp_path / "cases.jsonl").read_text()
    with (tmp_path / "cases.jsonl").open("a") as file:
        file.write('{"seed": 0, "num')  # as a killed campaign leaves it
    found = campaign(6)
    assert (tmp_path / "cases.jsonl").read_text() == before
    assert found["faults"] == []
    assert isinstance(found["ends"], int)
    assert found["ends"] >= 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cases.jsonl", "kills.json"]
