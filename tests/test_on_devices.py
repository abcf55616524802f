"""Every policy on another device than the CPU: tests/devices, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "devices"


def test_every_policy_runs_on_a_device_that_is_not_the_cpu() -> None:
    """A device that torch has once been told of changes what other tests meet, and cannot be forgotten."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER)]
    ended = subprocess.run(
        command,
        cwd=FOLDER.parents[1],
        env={**os.environ, "BLOCKHF_TEST_DEVICES": "1"},  # conftest.py asks for it
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout
