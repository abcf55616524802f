"""``blockhf race``: what is searched, who wins the search, and what the table says."""

from __future__ import annotations

import importlib.util
import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

import tiny_task
from blockhf_lab import comparison, race, runs, tasks
from blockhf_lab.comparison import Comparison, Entry
from blockhf_lab.optimizers import Spec
from command_line import run_main

Main = Callable[..., int | str | None]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Main:
    monkeypatch.setattr(tasks, "TASKS", {**tasks.TASKS, "tiny": tiny_task.task})
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.chdir(tmp_path)
    return lambda *args: run_main(monkeypatch, *args)


def entry(
    optimizer: str, *points: tuple[float, float | None], seed: int = 0, status: str = "finished"
) -> Entry:
    return Entry(
        optimizer,
        seed,
        status,
        [
            {
                "update": 10 * ge,
                "epoch": ge,
                "ge": ge,
                "seconds": 2 * ge,
                "train_loss": loss,
                "test_loss": loss,
            }
            for ge, loss in points
        ],
    )


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_family_but_ours_searches_eight_valid_settings(name: str) -> None:
    for family, specs in race.families(tasks.get(name, "cpu")).items():
        assert (
            len({str(Spec.parse(spec)) for spec in specs}) == len(specs) == (1 if family == "blockhf" else 8)
        )


def test_the_search_prefers_what_came_lowest_and_did_not_diverge() -> None:
    best = entry("adam:lr=0.1", (1, 30.0), (5, 9.0), (6, 9.5))
    early = entry("adam:lr=0.2", (1, 15.0), (6, 9.2))
    broken = entry("adam:lr=0.3", (1, 5.0), (2, None), status="diverged")
    assert sorted((broken, early, best), key=race._lowest) == [best, early, broken]


def test_the_table_has_medians_and_nothing_where_most_seeds_did_not_get_there() -> None:
    entries = [
        entry("adam:lr=0.1", (1, 30.0), (2, 15.0), (8, 9.0), seed=0),
        entry("adam:lr=0.1", (1, 30.0), (4, 15.0), seed=1),
        entry("adam:lr=0.1", (1, 30.0), (3, 15.0), seed=2),
    ]
    compared = Comparison("tiny", "quick", {"metric": "loss", "targets": []}, [], [], entries)
    found = race.table(compared, {"adam:lr=0.1": "Adam"}, (20.0, 10.0))
    unmeasured = {"peak_bytes": None, "state_bytes": None}
    assert found["Adam"]["20"] == {"reached": "3/3", "update": 30, "ge": 3, "seconds": 6, **unmeasured}
    assert found["Adam"]["10"] == {
        "reached": "1/3",
        "update": None,
        "ge": None,
        "seconds": None,
        **unmeasured,
    }


def test_a_race_searches_then_runs_the_winners_over_all_seeds(
    main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("race", "tiny", "--family", "blockhf", "--family", "Adam", "--seeds", "0,1")
    assert main(*arguments, "--search", "3updates", "--budget", "6updates") == 0
    folder = Path("runs/race-tiny-quick")
    result = json.loads((folder / "race.json").read_text())
    assert set(result["targets"]) == {"blockhf", "Adam"}
    assert result["settings"]["blockhf"] == "blockhf:batch=100"
    assert len(runs.find([folder / "search"])) == 8
    raced = comparison.collect([folder / "race"])[0]
    assert sorted((Spec.parse(each.optimizer).name, each.seed) for each in raced.entries) == [
        ("adam", 0),
        ("adam", 1),
        ("blockhf", 0),
        ("blockhf", 1),
    ]
    best = min(comparison.collect([folder / "search"])[0].entries, key=race._lowest)
    assert result["settings"]["Adam"] == best.optimizer
    assert (folder / "race" / "index.html").exists()
    assert "train ≤ 90" in capsys.readouterr().out
    assert all(each["state_bytes"] > 0 for each in result["memory"].values())
    for line in result["targets"].values():
        assert all(
            value is None or math.isfinite(value)
            for value in line["90"].values()
            if not isinstance(value, str)
        )


def test_families_that_are_not_installed_are_left_out_and_told(
    main: Main, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arguments = ("race", "tiny", "--family", "blockhf", "--family", "SOAP", "--seeds", "0")
    assert main(*arguments, "--budget", "2updates") == 0
    assert "Left out: SOAP, which pip install 'blockhf-lab[peers]' brings." in capsys.readouterr().out
    result = json.loads(Path("runs/race-tiny-quick/race.json").read_text())
    assert set(result["settings"]) == {"blockhf"}
    assert main("race", "tiny", "--family", "SOAP", "--out", "other") == 0
    assert not Path("other").exists()


def test_the_table_has_memory_in_mib() -> None:
    cost = {"update": 30, "ge": 3, "seconds": 6, "peak_bytes": 3 * 2**20}
    result = {
        "targets": {"Adam": {"20": cost, "10": {**cost, "update": None}}},
        "key": "train_loss",
        "ends": {"Adam": {"train_loss": 12.5, "best": 13.0}},
        "memory": {"Adam": {"peak_bytes": 5 * 2**20, "state_bytes": None}},
        "settings": {"Adam": "adam:lr=0.1"},
    }
    console = Console(file=io.StringIO(), width=200)
    race.show(result, console)
    line = console.file.getvalue().splitlines()[3]
    assert " ".join(line.split()) == "Adam 30 / 3.0 / 6 / 3 – 12.5 13 5 – adam:lr=0.1"


def test_an_unknown_family_is_told(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("race", "tiny", "--family", "Newton") == 2
    assert "There is no family Newton. There are blockhf, K-FAC, Adam" in capsys.readouterr().err
