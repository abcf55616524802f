"""Checkpoints: damage is noticed, the one before takes over, and runs that were stopped early go on."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_task
from blockhf_lab import checkpoints, files, runs, tasks
from blockhf_lab.runs import Config, Run

DATA = tiny_task.load(None)
CONFIG = Config("tiny", "quick", "adam:lr=0.01,batch=20", budget="6updates", threads=1)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASKS", {"tiny": tiny_task.task})


def losses(folder: Path) -> list[float | None]:
    return [record.get("loss") for record in runs.read_records(folder)]


def finish(folder: Path) -> Run:
    with Run(CONFIG, folder, DATA, resume=True) as run:
        runs.train(run)
    return run


def interrupted(folder: Path, *saved: int) -> None:
    """A run that was saved after these updates, and made one more."""
    with Run(CONFIG, folder, DATA) as run:
        while run.progress.update <= max(saved):
            if run.progress.update in saved:
                run.save()
            run.advance()


def last_start(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "environment.json").read_text())[-1]
    return found


def test_a_run_that_is_interrupted_before_its_first_update_goes_on(tmp_path: Path) -> None:
    for _ in range(2):
        with Run(CONFIG, tmp_path / "run", DATA, resume=True) as run:
            assert runs.train(run, interrupted=lambda: True) is None
    finish(tmp_path / "run")
    finish(tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "run")) == 7


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_of_a_checkpoint_never_loads(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    checkpoints.save(tmp_path, {"model": {"weight": torch.ones(5000)}, "numbers": list(range(50))})
    path = tmp_path / checkpoints.NEWEST
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    if seed % 4 == 0:
        del content[place:]
    elif seed % 4 == 1:
        content[place : place + 100] = chance.randbytes(100)
    else:
        content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    with pytest.raises(checkpoints.Damaged, match="it is damaged"):
        checkpoints.read(path)


def test_torch_loads_a_checkpoint_as_it_is(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, {"weight": torch.arange(3)})
    found = torch.load(tmp_path / checkpoints.NEWEST, weights_only=True)
    assert found["weight"].tolist() == [0, 1, 2]


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", 3)
    path = tmp_path / "run" / checkpoints.NEWEST
    saved = checkpoints.read(path)
    torch.save({key: value for key, value in saved.items() if key not in ("format", "records")}, path)
    finish(tmp_path / "run")
    finish(tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    torch.save(saved, path)  # a new one without its sum
    with pytest.raises(checkpoints.Damaged, match="its checksum is missing"):
        checkpoints.read(path)


def test_a_damaged_checkpoint_costs_the_updates_since_the_one_before(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(folder, 2, 4)
    path = folder / checkpoints.NEWEST
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    run = finish(folder)
    assert "its checksum does not match" in run.notice
    assert "Going on from the checkpoint before it" in run.notice
    assert last_start(folder)["from_update"] == 2
    assert last_start(folder)["notice"] == run.notice
    assert (folder / "checkpoint.damaged.pt").read_bytes() == content
    finish(tmp_path / "whole")
    assert losses(folder) == losses(tmp_path / "whole")


def test_where_both_are_damaged_it_says_what_to_do(tmp_path: Path) -> None:
    interrupted(tmp_path, 2, 4)
    for name in (checkpoints.NEWEST, checkpoints.PREVIOUS):
        os.truncate(tmp_path / name, 400)
    with pytest.raises(
        ValueError, match=r"checkpoint\.pt cannot be gone on from.*damaged.*Delete the folder"
    ):
        Run(CONFIG, tmp_path, DATA, resume=True)


def test_a_process_that_dies_between_two_renames_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    interrupted(folder, 2)

    def dying(source: Path, target: Path) -> None:
        if Path(target).name == checkpoints.NEWEST:
            raise KeyboardInterrupt
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr(files.os, "replace", dying)
    with Run(CONFIG, folder, DATA, resume=True) as run:
        run.advance()
        with pytest.raises(KeyboardInterrupt):
            run.save()
    monkeypatch.undo()
    monkeypatch.setattr(tasks, "TASKS", {"tiny": tiny_task.task})
    assert not (folder / checkpoints.NEWEST).exists()
    finish(folder)
    assert last_start(folder)["from_update"] == 2
    assert len(losses(folder)) == 7


def test_records_that_were_changed_are_noticed(tmp_path: Path) -> None:
    interrupted(tmp_path, 4)
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"loss": ', b'"loss":  ', 1))
    with pytest.raises(ValueError, match=r"records\.jsonl has been changed since.*Delete the folder"):
        Run(CONFIG, tmp_path, DATA, resume=True)


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    interrupted(tmp_path, 2)
    for name in (".checkpoint.pt.4711", ".environment.json.4711", ".result.json.4711"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / ".keep.this.file").touch()
    finish(tmp_path)
    assert [path.name for path in tmp_path.glob(".*")] == [".keep.this.file"]
