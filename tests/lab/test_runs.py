"""Runs: budgets, records, ends, and resuming bit for bit after anything."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_task
from blockhf_lab import comparison, runs, tasks
from blockhf_lab.optimizers import Method, Step
from blockhf_lab.runs import Budget, Config, Progress, Record, Run
from children import PATIENCE, starts_processes

DATA = tiny_task.load(None)
CHILD = Path(tiny_task.__file__)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASKS", {"tiny": tiny_task.task, "random": tiny_task.random_task})


def config(optimizer: str = "adam:lr=0.01,batch=20", **options: Any) -> Config:
    return Config(**{"task": "tiny", "preset": "quick", "optimizer": optimizer, "threads": 1, **options})


def finished(folder: Path, settings: Config, **options: Any) -> list[Record]:
    with Run(settings, folder, DATA, resume=True) as run:
        runs.train(run, **options)
    return runs.read_records(folder)


def timeless(records: list[Record], *others: str) -> list[Record]:
    """Without what differs from one machine, and one hour, to the next."""
    measured = ("seconds", "peak_bytes", *others)
    return [{key: value for key, value in record.items() if key not in measured} for record in records]


def params(folder: Path) -> dict[str, torch.Tensor]:
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    return {**saved["model"], **{f"averaged {key}": value for key, value in saved["averaged"].items()}}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# Budgets


@pytest.mark.parametrize(
    ("text", "amount", "kind"),
    [
        ("50updates", 50, "updates"),
        ("1 update", 1, "updates"),
        ("20epochs", 20, "epochs"),
        ("0.5epoch", 0.5, "epochs"),
        ("200ge", 200, "ge"),
        ("2e2GE", 200, "ge"),
        ("600s", 600, "s"),
        ("12345678updates", 12345678, "updates"),
        ("0.00001ge", 1e-5, "ge"),
        ("1.5 seconds", 1.5, "s"),
    ],
)
def test_budgets_are_read(text: str, amount: float, kind: str) -> None:
    assert Budget.parse(text) == Budget(amount, kind)  # type: ignore[arg-type]
    assert Budget.parse(str(Budget.parse(text))) == Budget.parse(text)


@pytest.mark.parametrize("text", ["", "50", "updates", "0s", "-3s", "3 hours", "nan s", "infs", "5s5s"])
def test_other_budgets_are_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match=r"Cannot read the budget.*Write 50updates"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("budget", "updates"), [("7updates", 7), ("2epochs", 20), ("0.25epochs", 3), ("4ge", 12), ("3.9ge", 12)]
)
def test_a_run_ends_with_its_budget(tmp_path: Path, budget: str, updates: int) -> None:
    """200 samples are 10 updates of 20, each of which is a third of the large batch."""
    records = finished(tmp_path, config(budget=budget))
    assert [record["update"] for record in records] == list(range(updates + 1))
    assert records[-1]["ge"] == pytest.approx(updates / 3)
    assert records[-1]["epoch"] == pytest.approx(updates / 10)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "finished"
    assert result["update"] == updates
    assert result["test_loss"] == records[-1]["evaluation"]["test_loss"]


def test_seconds_are_those_of_updates_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    evaluate = tasks.evaluate

    def slow(*args: Any) -> dict[str, float]:
        nonlocal now
        now += 100.0
        return evaluate(*args)

    def tick() -> float:
        nonlocal now
        now += 0.5
        return now

    monkeypatch.setattr(runs.time, "process_time", tick)
    monkeypatch.setattr(tasks, "evaluate", slow)
    records = finished(tmp_path, config(budget="3s"))
    assert [record["seconds"] for record in records] == [0.5 * update for update in range(7)]


def test_memory_is_the_most_that_an_update_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Method.update
    sizes = iter([2**20, 2**26, 2**20, 2**20, 2**20])

    def large(*args: Any) -> Step:
        held = torch.ones(next(sizes))
        step = update(*args)
        del held
        return step

    monkeypatch.setattr(Method, "update", large)
    finished(tmp_path, config(budget="3updates"))
    records = finished(tmp_path, config(budget="5updates"))
    peaks = [record["peak_bytes"] for record in records if "evaluation" in record]
    if peaks[-1] is None:
        pytest.skip("this machine does not tell how much memory a process has")
    assert peaks[0] is None
    assert peaks[1] < 4 * 2**26 <= peaks[2] < 6 * 2**26
    assert peaks[2:] == [peaks[2]] * len(peaks[2:])
    assert json.loads((tmp_path / "result.json").read_text())["peak_bytes"] == peaks[-1]
    assert comparison.collect([tmp_path])[0].entries[0].points[-1]["peak_bytes"] == peaks[-1]


def test_evaluations_may_be_further_apart(tmp_path: Path) -> None:
    records = finished(tmp_path, config(budget="9updates", growth=3.0))
    assert [record["update"] for record in records if "evaluation" in record] == [0, 1, 3, 9]
    with pytest.raises(ValueError, match="its settings is"):
        finished(tmp_path, config(budget="9updates"))
    with pytest.raises(ValueError, match=r"growth is 0\.5, but must be above 1"):
        config(growth=0.5).complete()


def test_budgets_share_out_by_kind() -> None:
    progress = Progress(update=30, ge=6.0, seconds=1.5)
    shares = [Budget.parse(text).spent(progress, 10) for text in ("60updates", "6epochs", "12ge", "3s")]
    assert shares == [0.5] * 4


# Records


def test_evaluations_are_ever_farther_apart_and_the_last_update_is_one(tmp_path: Path) -> None:
    records = finished(tmp_path, config(budget="25updates"))
    measured = [record["update"] for record in records if "evaluation" in record]
    assert measured == [0, 1, 2, 3, 4, 6, 8, 11, 15, 20, 25]
    assert all(set(record["evaluation"]) == {"train_loss", "test_loss"} for record in records[:2])


def test_the_records_of_block_hf_have_its_report(tmp_path: Path) -> None:
    records = finished(tmp_path, config("paper:curvature=30", budget="4updates"))
    assert "report" not in records[0]
    assert [record["report"]["cg"] for record in records[1:]] == [[1, 1], [1, 1], [3, 3], [3, 3]]
    report = records[-1]["report"]
    assert report["accepted"] is True
    assert report["damping"] == [0.1, 0.1]
    assert (report["gradient_batch"], report["curvature_batch"]) == (60, 30)
    assert len(report["status"]) == len(report["products"]) == len(report["coefficient"]) == 2
    costs = [after["ge"] - before["ge"] for before, after in itertools.pairwise(records)]
    assert costs[0] < costs[-1] < 10


def test_the_same_seed_is_the_same_run_and_another_is_another(tmp_path: Path) -> None:
    one, again = (finished(tmp_path / name, config()) for name in ("one", "again"))
    other = finished(tmp_path / "other", config(seed=1))
    assert timeless(one) == timeless(again)
    assert one[0]["evaluation"] != other[0]["evaluation"]


def test_all_optimizers_start_from_the_same_weights_and_see_the_same_batches(tmp_path: Path) -> None:
    adam = finished(tmp_path / "adam", config("adam:lr=0"))
    sgd = finished(tmp_path / "sgd", config("sgd:lr=0"))
    assert timeless(adam, "state_bytes") == timeless(sgd, "state_bytes")


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    assert torch.equal(runs.order(50, 3, 7), runs.order(50, 3, 7))
    assert runs.order(50, 3, 7).sort().values.tolist() == list(range(50))
    orders = {tuple(runs.order(50, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    state = torch.get_rng_state()
    runs.order(50, 3, 8)
    assert torch.equal(state, torch.get_rng_state())


def test_the_environment_is_written_once_for_each_start(tmp_path: Path) -> None:
    finished(tmp_path, config(budget="2updates"))
    finished(tmp_path, config(budget="4updates"))
    first, second = json.loads((tmp_path / "environment.json").read_text())
    assert (first["from_update"], second["from_update"]) == (0, 2)
    assert first["torch"] == torch.__version__
    assert first["threads"] == 1
    assert first["cores"] == os.cpu_count()


# Ends


def test_a_diverging_run_is_recorded_as_such(tmp_path: Path) -> None:
    records = finished(tmp_path, config("sgd:lr=1e30"))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "diverged"
    assert result["update"] == records[-1]["update"] < 20
    assert records[-1]["evaluation"]["train_loss"] is None


def test_a_run_can_stop_where_the_test_gets_worse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([9.0, 5.0, 4.0, 3.0, *range(4, 40)])

    def evaluate(task: Any, model: Any, samples: tasks.Samples) -> dict[str, float]:
        return {"loss": 1.0 if len(samples) == 50 else next(losses)}

    monkeypatch.setattr(tasks, "evaluate", evaluate)
    records = finished(tmp_path, config(stop="worse", budget="900updates"))
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "worse"
    best = [record["update"] for record in records if record.get("evaluation", {}).get("test_loss") == 3.0]
    assert best == [3]
    assert records[-1]["update"] == 15  # the fifth evaluation after it


def test_a_run_can_stop_at_its_last_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASKS", {"tiny": lambda preset: tiny_task.task(preset, targets=(95.0, 60.0))})
    records = finished(tmp_path, config(stop="targets", budget="900updates"))
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "reached"
    tests = [record["evaluation"]["test_loss"] for record in records if "evaluation" in record]
    assert tests[-1] <= 60.0 < tests[-2]


def test_cosine_takes_the_learning_rate_to_zero_over_the_budget(tmp_path: Path) -> None:
    seen = []
    with Run(config("sgd:lr=0.5,schedule=cosine", budget="4updates"), tmp_path, DATA) as run:
        while run.status is None:
            run.advance()
            seen.append(run.method.optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([0.25 * (1 + math.cos(math.pi * share)) for share in (0, 0.25, 0.5, 0.75)])


# Resuming


@pytest.mark.parametrize(
    ("task", "optimizer"),
    [
        ("tiny", "adam:lr=0.01,batch=20"),
        ("tiny", "sgd:lr=0.001,momentum=0.9,schedule=cosine"),
        ("tiny", "paper:curvature=30"),
        ("tiny", "blockhf:curvature=30"),
        ("tiny", "lbfgs:max_iter=3"),
        ("random", "adam:lr=0.01,batch=20"),
        ("random", "hf:curvature=30"),
    ],
)
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path: Path, task: str, optimizer: str) -> None:
    settings = config(optimizer, task=task, budget="14updates")
    whole = finished(tmp_path / "whole", settings)
    folder = tmp_path / "parts"
    for updates in (5, 3, 4, 100):
        with Run(settings, folder, DATA, resume=True) as run:
            left = iter([False] * updates)
            runs.train(run, interrupted=lambda left=left: next(left, True))  # type: ignore[misc]
        torch.rand(7)  # what else goes on between must not matter
    assert timeless(runs.read_records(folder)) == timeless(whole)
    assert same(params(folder), params(tmp_path / "whole"))
    seconds = [record["seconds"] for record in runs.read_records(folder)]
    assert seconds == sorted(seconds)


def test_the_time_between_checkpoints_changes_nothing(tmp_path: Path) -> None:
    settings = config("paper:curvature=30")
    often = finished(tmp_path / "often", settings, checkpoint_seconds=0.0)
    never = finished(tmp_path / "never", settings, checkpoint_seconds=math.inf)
    assert timeless(often) == timeless(never)
    assert same(params(tmp_path / "often"), params(tmp_path / "never"))


def test_records_after_the_checkpoint_are_made_again(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole", config())
    folder = tmp_path / "killed"
    with Run(config(), folder, DATA) as run:
        for update in range(9):
            run.advance()
            if update == 4:
                run.save()
    with (folder / "records.jsonl").open("ab") as file:
        file.write(b'{"update": 10, "epo')  # as a killed process leaves it
    (folder / ".checkpoint.pt.4711").write_bytes(b"half")
    assert len(runs.read_records(folder)) == 10
    assert timeless(finished(folder, config())) == timeless(whole)
    assert not list(folder.glob(".*"))


def test_a_run_can_be_interrupted_right_after_it_was_resumed(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole", config())
    folder = tmp_path / "killed"
    with Run(config(), folder, DATA) as run:
        run.advance()
        run.save()
        run.advance()
    for _ in range(2):
        with Run(config(), folder, DATA, resume=True) as run:
            assert runs.train(run, interrupted=lambda: True) is None
    assert timeless(finished(folder, config())) == timeless(whole)


def test_a_finished_run_is_left_alone_and_a_larger_budget_goes_on(tmp_path: Path) -> None:
    finished(tmp_path, config(budget="6updates"))
    before = (tmp_path / "records.jsonl").read_bytes()
    finished(tmp_path, config(budget="6updates"))
    assert (tmp_path / "records.jsonl").read_bytes() == before
    more = finished(tmp_path, config(budget="10updates"))
    whole = finished(tmp_path / "whole", config(budget="10updates"))
    assert [record.get("loss") for record in more] == [record.get("loss") for record in whole]
    assert same(params(tmp_path), params(tmp_path / "whole"))


def test_a_run_killed_after_its_last_checkpoint_has_ended(tmp_path: Path) -> None:
    records = finished(tmp_path, config(budget="6updates"))
    result = (tmp_path / "result.json").read_bytes()
    (tmp_path / "result.json").unlink()
    assert finished(tmp_path, config(budget="6updates")) == records
    assert (tmp_path / "result.json").read_bytes() == result


def _start(folder: Path, optimizer: str, task: str) -> Any:
    # Long enough to be killed ten times.
    budget = "2000updates" if optimizer.startswith("adam") else "400updates"
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(CHILD), str(folder), task, optimizer, budget, "0.05"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def _end(child: Any) -> None:
    _, errors = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0, errors


def _kill_at_random(folder: Path, optimizer: str, task: str, times: int, seed: int) -> None:
    """Kill a run at random moments of its work, then let it end."""
    chance = random.Random(seed)
    records = folder / "records.jsonl"
    num_kills = 0
    for _ in range(times):
        child = _start(folder, optimizer, task)
        size = records.stat().st_size if records.exists() else 0
        deadline = time.monotonic() + PATIENCE
        while child.poll() is None and time.monotonic() < deadline:
            if records.exists() and records.stat().st_size != size:
                break
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.15))
        child.kill()
        child.communicate(timeout=PATIENCE)
        if child.returncode == 0:  # a fast machine
            break
        assert child.returncode == -9
        num_kills += 1
    assert num_kills >= 2
    _end(_start(folder, optimizer, task))


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@starts_processes
def test_a_run_killed_at_random_moments_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    _check_kills(tmp_path, "paper:curvature=30", "tiny", times=3, seed=0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize(
    ("task", "optimizer"),
    [
        ("tiny", "paper:curvature=30"),
        ("tiny", "adam:lr=0.01,batch=20"),
        ("random", "blockhf:curvature=30"),
    ],
)
@starts_processes
def test_a_run_killed_ten_times_ends_like_an_undisturbed_one(
    tmp_path: Path, task: str, optimizer: str
) -> None:
    _check_kills(tmp_path, optimizer, task, times=10, seed=1)


def _check_kills(tmp_path: Path, optimizer: str, task: str, times: int, seed: int) -> None:
    _end(_start(tmp_path / "whole", optimizer, task))
    _kill_at_random(tmp_path / "killed", optimizer, task, times, seed)
    assert same(params(tmp_path / "whole"), params(tmp_path / "killed"))
    records = [timeless(runs.read_records(tmp_path / name)) for name in ("whole", "killed")]
    assert records[0] == records[1]
    assert len(records[0]) in (401, 2001)


# Refusals


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    finished(tmp_path, config())
    with pytest.raises(ValueError, match=r"already holds a run\. Go on with --resume"):
        Run(config(), tmp_path, DATA)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"seed": 1}, "its seed is 0 and not 1"),
        ({"optimizer": "adam:lr=0.02,batch=20"}, "its optimizer is"),
        ({"task": "random"}, "its task is 'tiny' and not 'random'"),
        ({"threads": 2}, "its threads is 1 and not 2"),
    ],
)
def test_another_run_is_not_gone_on_with(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    finished(tmp_path, config())
    with pytest.raises(ValueError, match=what):
        Run(config(**changes), tmp_path, DATA, resume=True)


def test_a_schedule_that_follows_the_budget_keeps_the_budget(tmp_path: Path) -> None:
    finished(tmp_path, config("sgd:lr=0.001,schedule=cosine", budget="3updates"))
    with pytest.raises(ValueError, match="its budget is '3updates' and not '4updates'"):
        Run(config("sgd:lr=0.001,schedule=cosine", budget="4updates"), tmp_path, DATA, resume=True)


def test_changed_settings_of_the_task_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path, config())
    monkeypatch.setattr(tasks, "TASKS", {"tiny": lambda preset: tiny_task.task(preset, growth=2.0)})
    with pytest.raises(ValueError, match="its settings is"):
        Run(config(), tmp_path, DATA, resume=True)


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "pickle"])
def test_a_damaged_checkpoint_is_named_with_the_remedy(tmp_path: Path, damage: str) -> None:
    with Run(config(), tmp_path, DATA) as run:
        run.advance()
        run.save()
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()
    if damage == "other":
        torch.save({"model": {}}, path)
    else:
        path.write_bytes(
            {"cut": whole[:500], "empty": b"", "pickle": pickle.dumps(print, protocol=2)}[damage]
        )
    with pytest.raises(ValueError, match=r"checkpoint\.pt cannot be gone on from.*Delete the folder"):
        Run(config(), tmp_path, DATA, resume=True)


def test_records_that_were_cut_before_the_checkpoint_are_noticed(tmp_path: Path) -> None:
    with Run(config(), tmp_path, DATA) as run:
        run.advance()
        run.save()
    (tmp_path / "records.jsonl").write_bytes(b"{}\n")
    with pytest.raises(ValueError, match=r"records\.jsonl is shorter.*Delete the folder"):
        Run(config(), tmp_path, DATA, resume=True)


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"update": 7}', b'{"loss": 1}'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: bytes) -> None:
    finished(tmp_path, config(budget="3updates"))
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(ValueError, match=r"Line 5 of .*records\.jsonl is no record.*--resume"):
        runs.read_records(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_a_damaged_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json is no"):
        Run(config(), tmp_path, DATA, resume=True)


@pytest.mark.skipif(runs.fcntl is None, reason="no locks on this system")
def test_two_processes_do_not_work_on_one_run(tmp_path: Path) -> None:
    with Run(config(), tmp_path, DATA), pytest.raises(ValueError, match="Another process is at work"):
        Run(config(), tmp_path, DATA, resume=True)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"task": "nope"}, "There is no task 'nope'"),
        ({"preset": "huge"}, "There is no preset 'huge'"),
        ({"stop": "now"}, "stop is 'now'"),
        ({"seed": -1}, "seed is -1"),
        ({"budget": "x"}, "Cannot read the budget"),
        ({"optimizer": "adam:batch=201"}, "batch of adam:batch=201 is 201, but there are 200 samples"),
        ({"optimizer": "adam:lr=-1"}, "adam:lr=-1 does not work on tiny"),
    ],
)
def test_impossible_configs_are_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Run(config(**changes), tmp_path, DATA)


def test_runs_are_found_below_folders(tmp_path: Path) -> None:
    for name in ("b/seed-0", "a/seed-0"):
        finished(tmp_path / name, config(budget="1updates"))
    assert runs.find([tmp_path]) == [tmp_path / "a" / "seed-0", tmp_path / "b" / "seed-0"]
    assert runs.find([tmp_path / "a", tmp_path]) == runs.find([tmp_path])
    (tmp_path / "c").mkdir()
    with pytest.raises(ValueError, match="There is no run in"):
        runs.find([tmp_path / "c"])


def test_a_run_of_a_former_name_goes_on(tmp_path: Path) -> None:
    finished(tmp_path, config("paper:curvature=30", budget="2updates"))
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"paper:curvature=30"', '"block-hf:curvature=30"'))
    assert '"block-hf' in path.read_text()
    with runs.Run(config("block-hf:curvature=30", budget="3updates"), tmp_path, DATA, resume=True) as run:
        assert runs.train(run) == "finished"
    assert run.progress.update == 3
