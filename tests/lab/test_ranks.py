"""Runs by several processes, from the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blockhf_lab import ranks
from children import PATIENCE, starts_processes

pytestmark = starts_processes
SPEC = "paper:curvature=150,max_cg_steps=3"


def train(out: Path, *options: str, optimizer: str = SPEC) -> list[str]:
    return [
        *(sys.executable, "-m", "blockhf", "train", "autoencoder", "--preset", "quick", "--threads", "1"),
        *("--optimizer", optimizer, "--out", str(out), "--ranks", "2", *options),
    ]


def finished(out: Path, *options: str, optimizer: str = SPEC) -> str:
    done = subprocess.run(
        train(out, *options, optimizer=optimizer), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def records(out: Path) -> list[dict[str, Any]]:
    """Those of a run, without what differs from one hour to the next."""
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    measured = ("seconds", "peak_bytes")
    return [{key: value for key, value in line.items() if key not in measured} for line in lines]


def workers(launcher: int) -> Iterator[tuple[int, int]]:
    """The rank and the process number of the workers below a process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = dict(
                item.split("=", 1) for item in (folder / "environ").read_text().split("\0") if "=" in item
            )
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            grandparent = int(
                (Path("/proc") / str(parent) / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except (OSError, ValueError):
            continue
        if "LOCAL_RANK" in environment and launcher in (parent, grandparent):
            yield int(environment["LOCAL_RANK"]), int(folder.name)


def killed(out: Path, process: subprocess.Popen[bytes], after: int) -> None:
    """Kill a worker when the run has made some updates."""
    end = time.monotonic() + PATIENCE
    while (
        not (out / "records.jsonl").exists()
        or len((out / "records.jsonl").read_bytes().splitlines()) <= after
    ):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    (worker,) = (number for rank, number in workers(process.pid) if rank == 1)
    os.kill(worker, signal.SIGKILL)


def test_two_processes_make_one_run_and_one_of_them_writes(tmp_path: Path) -> None:
    printed = finished(tmp_path / "run", "--budget", "2updates")
    assert printed.count("Written:") == 1
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["mesh"] == "2x1"
    assert [record["update"] for record in records(tmp_path / "run")] == [0, 1, 2]
    assert records(tmp_path / "run")[-1]["report"]["gradient_batch"] == 1500
    assert records(tmp_path / "run")[-1]["report"]["curvature_batch"] == 150

    # It goes on, and is then what it would have been without a break.
    finished(tmp_path / "run", "--budget", "3updates", "--resume")
    finished(tmp_path / "whole", "--budget", "3updates")
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_adam_in_two_processes_is_adam(tmp_path: Path) -> None:
    finished(tmp_path / "two", "--budget", "3updates", optimizer="adam")
    subprocess.run(
        [
            word
            for word in train(tmp_path / "one", "--budget", "3updates", optimizer="adam")
            if word not in ("--ranks", "2")
        ],
        check=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    for two, one in zip(records(tmp_path / "two"), records(tmp_path / "one"), strict=True):
        assert two.get("loss", 0.0) == pytest.approx(one.get("loss", 0.0), rel=1e-5)
        assert two["ge"] == pytest.approx(one["ge"])


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the workers in /proc")
def test_a_killed_worker_takes_the_others_down(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            train(tmp_path / "run", "--budget", "10000updates"), stdout=log, stderr=log
        )
        killed(tmp_path / "run", process, after=2)
        start = time.monotonic()
        assert process.wait(PATIENCE) != 0
        assert time.monotonic() - start < 120  # the mesh itself would wait for 600
    assert "SIGKILL" in (tmp_path / "log").read_text()
    assert not list(workers(process.pid))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the workers in /proc")
def test_a_run_that_is_started_again_makes_the_same_curve(tmp_path: Path) -> None:
    finished(tmp_path / "whole", "--budget", "20updates")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            train(tmp_path / "run", "--budget", "20updates", "--restarts", "2"), stdout=log, stderr=log
        )
        killed(tmp_path / "run", process, after=1)
        assert process.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    started = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert len(started) == 2


def test_a_mesh_needs_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def none() -> None:
        pytest.fail("no blocks are needed")

    assert ranks.join(None, none) is ranks.ALONE
    with pytest.raises(ValueError, match="Start them with --ranks"):
        ranks.join("2x1", none)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=re.escape("Cannot read the mesh '2+1'")):
        ranks.join("2+1", none)


def test_alone_a_run_has_all_samples() -> None:
    batch = torch.arange(3.0), torch.arange(3)
    assert ranks.ALONE.share(batch) is batch
    assert ranks.ALONE.leads
    assert ranks.ALONE.numbers([1.0, 2.0]) == [[1.0, 2.0]]
    assert ranks.ALONE.first("value") == "value"
    loss = torch.tensor(1.0)
    assert ranks.ALONE.average([], loss, 3) is loss
