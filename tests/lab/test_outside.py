"""Tasks outside of the arena: ``benchmarks/outside.py``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from blockhf import blocks
from blockhf_lab.arena import families, records, tasks
from blockhf_lab.arena.training import Point

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "arena.md"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("outside", ROOT / "benchmarks" / "outside.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["outside"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


outside = script()


def record(optimizer: str, losses: list[float], **changes: Any) -> records.Record:
    """A run on batches of 64, and its evaluation number n after n seconds."""
    points = [Point(n, float(n), float(n), loss) for n, loss in enumerate(losses)]
    own = {"task": "perceptron-64", "stage": "final", "seed": 0, "budget": 10.0, "status": "finished"}
    family = families.family_of(optimizer)
    return records.Record(optimizer=optimizer, family=family, points=points, **{**own, **changes})


ADAM = record("adam:batch=64,lr=0.01", [9, 5, 4, 3, 2, 1, 1, 1, 1, 1, 0.5])
SOAP = record("soap:batch=64,lr=0.01", [9, 8, 8, 8, 8, 8, 8, 8, 8, 8, 2])
SEARCHES = [
    record(own, [9, loss], stage="search 0.2", budget=2.0)
    for own, loss in ((ADAM.optimizer, 4), ("adam:batch=64,lr=0.1", 5), (SOAP.optimizer, 4))
]


@pytest.mark.parametrize("name", outside.TASKS)
def test_every_task_has_its_own_name_its_blocks_and_eight_settings_of_each_peer(name: str) -> None:
    task = outside.get(name, 3.0)
    assert name not in tasks.TASKS
    assert task.seconds == 3.0
    model = task.model(0)
    blocks.check(model, task.groups(model))
    assert [len(set(families.settings(task, peer))) for peer in outside.PEERS] == [8, 8]


def test_samples_that_are_made_are_the_same_each_time() -> None:
    for load in (outside.smooth_function, outside.with_outliers, outside.few_samples):
        first, again = load(), load()
        assert all(map(torch.equal, (*first.train, *first.test), (*again.train, *again.test)))
    assert outside.few_samples().size == 300


def test_the_table_has_ratios_to_the_better_peer() -> None:
    own = record("blockhf", [9, 6, 6, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 0.5], budget=15.0)
    unchosen = record("adam:batch=64,lr=0.1", [9, 0.1])
    found = outside.Outside.of([*SEARCHES, ADAM, SOAP, unchosen, own])
    heads, (row,) = outside.table(found)
    assert heads[2:] == [
        *("batches of the default", "loss ≤"),
        *("blockhf", "Adam", "SOAP", "default over better peer"),
    ]
    assert row[0] == "perceptron-64"
    assert row[2:] == [
        *("64", "5.05 / 3.03 / 0.505"),
        *("3 / 3 / 12", "1 / 3 / 10", "10 / 10 / –", "3.00 / 1.00 / 1.20"),
    ]
    told = outside.part(found)
    assert "at most twice the CPU seconds of the better peer on 2, is the best on 1" in told
    assert "None of its runs diverged. Seed: 0." in told
    assert (
        "On batches of 64 the default takes 1.20 times Adam's CPU seconds to Adam's own loss plus 1 %" in told
    )


def test_a_loss_that_is_not_reached_and_a_run_that_diverges_are_told() -> None:
    own = record("blockhf", [9, 6, *[5.5] * 13, float("inf")], budget=15.0, status="diverged")
    told = outside.part(outside.Outside.of([*SEARCHES, ADAM, SOAP, own]))
    assert "| – / – / – | 1 / 3 / 10 |" in told
    assert "does not get there on 3. Its runs on perceptron-64 diverged or failed." in told
    assert "On batches of 64 the default takes more than 1.50 times Adam's CPU seconds" in told


def test_a_tiny_run_is_on_record_fills_the_page_and_is_not_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "arena.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    arguments = ["--task", "few-samples", "--seconds", "0.1", "--out", str(tmp_path / "records")]
    outside.main([*arguments, "--page", str(page)])
    assert "| few-samples | Perceptron 8-32-32-1 with tanh" in page.read_text(encoding="utf-8")
    found = records.read(tmp_path / "records")
    stages = [own.stage for own in found]
    assert [stages.count(stage) for stage in ("search 0.05", "search 0.2", "final")] == [16, 4, 3]
    assert all(len(own.points) <= 3 for own in found if own.stage != "final")
    assert {own.budget for own in found if own.family == families.DEFAULT} == {0.15}
    capsys.readouterr()
    outside.main(arguments)
    assert "final" not in capsys.readouterr().out
