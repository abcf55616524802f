"""What the arena makes of records: settings, targets, profiles and the page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from blockhf_lab.arena import page, records, runner, scores, tuned
from blockhf_lab.arena.records import Record
from blockhf_lab.arena.scores import Pair
from blockhf_lab.arena.training import Point

DOCS = Path(__file__).parents[2] / "docs" / "arena.md"


def record(optimizer: str, losses: list[float], **changes: Any) -> Record:
    """A run on Friedman's function whose evaluation number n came after n seconds, 2 n updates and 3 n GE."""
    points = [Point(2 * n, 3.0 * n, float(n), loss) for n, loss in enumerate(losses)]
    own = {"task": "friedman", "stage": "final", "seed": 0, "budget": 10.0, "status": "finished", **changes}
    family = records.family_of(optimizer)
    return Record(optimizer=optimizer, family=family, points=points, **own)


def line(of: Record) -> dict[str, Any]:
    points = [[point.update, point.ge, point.seconds, point.loss] for point in of.points]
    own = {key: getattr(of, key) for key in ("task", "optimizer", "stage", "seed", "budget", "status")}
    return {**own, "points": points}


def test_records_are_read_as_they_were_written_and_the_last_of_a_run_counts(tmp_path: Path) -> None:
    first, again = record("adam:lr=0.1", [2.0, 1.0]), record("adam:lr=0.1", [2.0, 0.5])
    other = record("blockhf", [2.0, math.nan], seed=1)
    for each in (first, other, again):
        records.append(tmp_path, line(each))
    found = records.read(tmp_path)
    assert found[0] == again
    assert found[1].points[1].loss == math.inf  # JSON has no number for it
    assert len(found) == 2


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    records.append(tmp_path, line(record("adam:lr=0.1", [2.0])))
    path = tmp_path / "friedman.jsonl"
    path.write_text(path.read_text() + '{"task": "fried')
    with pytest.raises(ValueError, match=r"friedman.jsonl, line 2, is no record of the arena"):
        records.read(tmp_path)


def test_costs_are_medians_of_the_first_evaluations_at_or_below_the_target() -> None:
    runs = [record("adam:lr=0.1", losses) for losses in ([3, 2, 1], [3, 1, 2], [3, 3, 3])]
    assert scores.cost(runs, 1.0, "seconds") == 2.0
    assert scores.cost(runs, 1.0, "update") == 4.0
    assert scores.cost(runs, 1.0, "ge") == 6.0
    assert scores.cost(runs, 0.5, "seconds") == math.inf


def test_profiles_count_pairs_within_multiples_of_the_best() -> None:
    found = [
        Pair("a", 1.0, {"blockhf": 1.0, "Adam": 4.0, "K-FAC": 0.9}),
        Pair("a", 0.5, {"blockhf": 6.0, "Adam": 2.0, "K-FAC": math.inf}),
        Pair("b", 1.0, {"blockhf": math.inf, "Adam": math.inf}),
    ]
    assert scores.profile(found, "Adam", [1, 2, 5]) == pytest.approx([1 / 3, 1 / 3, 2 / 3])
    assert scores.profile(found, "blockhf", [1, 2, 5]) == pytest.approx([0, 1 / 3, 2 / 3])
    assert scores.bars(found) == scores.Bars(3, 1, 0, 1)
    assert scores.score([found[1]], "Adam") == 1.0
    assert scores.score([found[1]], "blockhf", most=9.0) == pytest.approx(0.5)


def test_the_search_takes_the_lowest_loss_of_its_last_round_and_none_that_diverged() -> None:
    found = [
        record("adamw:lr=0.1", [2, 0.1], stage="search 0.05", budget=1.0),
        record("adamw:lr=0.2", [2, 0.4], stage="search 0.2", budget=2.0),
        record("adamw:lr=0.3", [2, 0.2], stage="search 0.2", budget=2.0),
        record("adamw:lr=0.4", [2, 0.1, math.inf], stage="search 0.2", budget=2.0, status="diverged"),
    ]
    assert tuned.choose(found, "search 0.2") == {"friedman": {"AdamW": "adamw:lr=0.3", "Adam": "adam:lr=0.3"}}


def test_targets_are_the_best_peers_losses_after_shares_of_its_budget() -> None:
    losses = [8.0, 4.0, 3.0, 2.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 1.0]
    found = [
        record("adamw:lr=0.1", [2, 1], stage="search 0.2"),
        record("adamw:lr=0.1", losses),
        record("muon:lr=0.1", [8.0, 1.5]),
        record("blockhf", [8.0, 0.1]),
    ]
    derived = tuned.derive(found, "search 0.2")["friedman"]
    assert derived["targets"] == [4.04, 2.02, 1.01]
    assert derived["from"] == "adamw:lr=0.1"
    flat = tuned.derive([*found[:1], record("adamw:lr=0.1", [8.0, 2.0])], "search 0.2")["friedman"]
    assert flat["targets"] == [2.227, 2.121, 2.02]  # a run that is at its end at once
    flat = tuned.derive([*found[:1], record("adamw:lr=0.1", [8.0] * 11)], "search 0.2")["friedman"]
    assert flat["targets"][-1] == 7.6  # one that goes nowhere
    kept = tuned.merge({"friedman": {"targets": [3.0]}}, {"friedman": derived})["friedman"]
    assert (kept["targets"], kept["settings"]) == ([3.0], derived["settings"])


def test_a_plan_searches_runs_and_goes_on_where_it_was(tmp_path: Path) -> None:
    plan = runner.Plan(["friedman"], ["AdamW", "Adam"], [0], tmp_path, searches=True, share=0.02)
    runner.run(plan, lambda _: None)
    found = records.read(tmp_path)
    stages = [each.stage for each in found]
    assert {stage: stages.count(stage) for stage in stages} == {
        "search 0.05": 8,
        "search 0.2": 2,
        "final": 2,
    }
    assert {each.family for each in found if each.stage == "final"} == {"AdamW", "Adam"}
    told: list[str] = []
    runner.run(plan, told.append)
    assert told == []


def test_the_page_has_every_part_of_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = {"friedman": {"targets": [2.0, 0.5], "settings": {"AdamW": "adamw:lr=0.1"}}}
    monkeypatch.setattr(tuned, "read", lambda: fixed)
    for each in (
        record("adamw:lr=0.1", [3, 1, 0.4]),
        record("adamw:lr=0.2", [3, 0.1]),
        record("blockhf", [3, 1]),
    ):
        records.append(tmp_path, line(each))
    docs = tmp_path / "docs" / "arena.md"
    docs.parent.mkdir()
    docs.write_text(DOCS.read_text())
    page.write(tmp_path, docs)
    text = docs.read_text()
    assert "the default needs at most twice the best peer's on 1, is the best of all on 1" in text
    assert "| friedman | 0.5 | – | 2/6/4 | – |" in text  # the run of another setting does not count
    assert (docs.parent / "images" / "arena-profiles.png").exists()
    assert "2/6/4" in (tmp_path / "index.html").read_text()
