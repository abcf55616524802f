"""``blockhf train``, ``compare``, ``figures`` and ``data fetch`` from end to end, on a tiny task."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_task
from blockhf_lab import commands, fetch, runs, tasks
from children import PATIENCE, starts_processes
from command_line import run_main

Main = Callable[..., int | str | None]
PAIR = ("--optimizer", "paper:curvature=30", "--optimizer", "adam:lr=0.01,batch=20")


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Main:
    monkeypatch.setattr(tasks, "TASKS", {**tasks.TASKS, "tiny": tiny_task.task})
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setenv("BLOCKHF_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return lambda *args: run_main(monkeypatch, *args)


def losses(folder: Path) -> list[float | None]:
    return [record.get("loss") for record in runs.read_records(folder)]


# train


def test_train_writes_a_run(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("train", "tiny", "--optimizer", "adam:lr=0.01,batch=20", "--budget", "5updates") == 0
    folder = Path("runs/tiny-quick/adam_batch=20,lr=0.01/seed-0")
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint.pt",
        "config.json",
        "environment.json",
        "records.jsonl",
        "result.json",
    ]
    shown = capsys.readouterr()
    assert "Adam, batch 20, lr 0.01" in shown.out
    assert "finished after 5 updates" in shown.out
    assert shown.err == ""
    assert main("train", "tiny", "--optimizer", "adam:batch=20,lr=0.01") == 2  # the same run
    assert "already holds a run. Go on with --resume" in capsys.readouterr().err
    assert main("train", "tiny", "--optimizer", "adam:batch=20,lr=0.01", "--resume") == 0
    assert len(losses(folder)) == 21


def test_a_resumed_run_has_the_threads_that_it_had(main: Main, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        arguments = ("train", "tiny", "--out", str(tmp_path / "run"))
        assert main(*arguments, "--budget", "2updates", "--threads", "2") == 0
        assert main(*arguments, "--budget", "4updates", "--resume") == 0
        assert json.loads((tmp_path / "run" / "config.json").read_text())["threads"] == 2
    finally:
        torch.set_num_threads(threads)


def _child(*args: str, cwd: Path) -> Any:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(Path(tiny_task.__file__)), "blockhf", *args],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


@pytest.mark.skipif(sys.platform == "win32", reason="signals are others there")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@starts_processes
def test_ctrl_c_saves_and_the_run_goes_on_as_if_nothing_had_been(
    main: Main, tmp_path: Path, number: signal.Signals
) -> None:
    arguments = ("train", "tiny", "--optimizer", "paper:curvature=30", "--threads", "1")
    child = _child(*arguments, "--budget", "1000000updates", "--out", "stopped", cwd=tmp_path)
    records = tmp_path / "stopped" / "records.jsonl"
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not (records.exists() and records.read_bytes().count(b"\n") > 4):
        time.sleep(0.02)
        assert child.poll() is None, child.communicate()
    child.send_signal(number)
    shown, errors = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130, errors
    assert errors.strip() == "Stopping after this update, and saving. Press Ctrl-C again to end at once."
    assert "Saved. Go on with --resume" in shown
    done = len(losses(tmp_path / "stopped")) - 1
    saved = torch.load(tmp_path / "stopped" / "checkpoint.pt", weights_only=True)
    assert saved["progress"]["update"] == done
    budget = f"{done + 3}updates"
    assert main(*arguments, "--budget", budget, "--out", "stopped", "--resume") == 0
    assert main(*arguments, "--budget", budget, "--out", "whole") == 0
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_a_second_ctrl_c_ends_at_once(
    main: Main, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)  # handled before the next, unlike a signal from outside

    monkeypatch.setattr(runs, "train", interrupted)
    # Python's own handler, which a process that was started in the background does not have.
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main("train", "tiny") == 130
        assert "the last checkpoint stands" in capsys.readouterr().err
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, outside)


def test_tensorboard_on_request(main: Main, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    assert main("train", "tiny", "--budget", "3updates", "--out", "run", "--tensorboard") == 0
    assert [path.name[:6] for path in (tmp_path / "run" / "tensorboard").iterdir()] == ["events"]


def test_the_lack_of_tensorboard_is_told(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert "pip install 'blockhf-lab[tensorboard]'" in str(main("train", "tiny", "--tensorboard"))


# compare and figures


def test_compare_writes_records_tables_figures_and_the_page(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("compare", "tiny", *PAIR, "--seeds", "0,1", "--budget", "6updates")
    threads = torch.get_num_threads()
    assert main(*command) == 0
    out = tmp_path / "runs" / "tiny-quick"
    names = ("comparison.json", "index.html", "updates.png", "updates.svg", "seconds.png")
    for name in (*names, "gradient-equivalents.svg"):
        assert (out / name).stat().st_size > 1000
    shown = capsys.readouterr().out
    assert "test error ≤ 90" in shown
    assert "paper, curvature 30" in shown
    compared = json.loads((out / "comparison.json").read_text())
    assert len(compared["entries"]) == 4

    # What is finished is kept, whatever the threads are now; what is missing is made.
    torch.set_num_threads(torch.get_num_threads() + 1)
    records = {path: path.read_bytes() for path in out.rglob("records.jsonl")}
    assert len(records) == 4
    assert main(*command[:-3], "0,1,2", "--budget", "6updates") == 0
    torch.set_num_threads(threads)
    assert len(list(out.rglob("records.jsonl"))) == 6
    assert all(path.read_bytes() == content for path, content in records.items())

    # The figures can be drawn again, from the runs and from the small file alone.
    capsys.readouterr()
    assert main("figures", str(out), "--out", "again") == 0
    assert (tmp_path / "again" / "updates.svg").read_bytes() == (out / "updates.svg").read_bytes()
    table = capsys.readouterr().out.partition("Written")[0]
    assert main("figures", str(tmp_path / "again" / "comparison.json"), "--out", "third") == 0
    assert (tmp_path / "third" / "index.html").read_bytes() == (
        tmp_path / "again" / "index.html"
    ).read_bytes()
    assert capsys.readouterr().out.partition("Written")[0] == table


def test_an_interrupted_comparison_shows_what_there_is_and_goes_on(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, number = runs.train, 0

    def interrupted(run: runs.Run, **options: Any) -> Any:
        nonlocal number
        number += 1
        if number == 2:
            left = iter([False] * 3)
            options["interrupted"] = lambda: next(left, True)
        return train(run, **options)

    monkeypatch.setattr(runs, "train", interrupted)
    command = ("compare", "tiny", *PAIR, "--budget", "6updates", "--out", "out")
    assert main(*command) == 130
    assert "The same command goes on" in capsys.readouterr().out
    entries = json.loads((tmp_path / "out" / "comparison.json").read_text())["entries"]
    assert sorted(entry["status"] for entry in entries) == ["finished", "unfinished"]
    assert main(*command) == 0
    entries = json.loads((tmp_path / "out" / "comparison.json").read_text())["entries"]
    assert [entry["status"] for entry in entries] == ["finished"] * 2


def test_the_optimizers_of_the_figure_are_compared_if_none_is_named(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "draw", lambda *args: None)
    assert main("compare", "tiny", "--budget", "1updates", "--out", "out") == 0
    optimizers = {json.loads(path.read_text())["optimizer"] for path in tmp_path.rglob("config.json")}
    assert optimizers == {
        "blockhf:batch=100",
        "paper:curvature=30",
        "paper:curvature=20",
        "hf:curvature=30",
        "hf:curvature=20",
        "adam:batch=20,lr=0.001",
        "adam:batch=60,lr=0.001",
    }


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["train", "nope"], "There is no task 'nope'. There are autoencoder, lstm, cnn"),
        (["train", "tiny", "--preset", "huge"], "There is no preset 'huge'"),
        (["train", "tiny", "--optimizer", "nope"], "There is no optimizer 'nope'"),
        (["train", "tiny", "--optimizer", "adam:lr=-1"], "adam:lr=-1 does not work on tiny"),
        (["train", "tiny", "--budget", "9"], "Cannot read the budget '9'"),
        (["train", "tiny", "--stop", "never"], "stop is 'never'"),
        (["train", "lstm", "--preset", "cpu"], "Run: blockhf data fetch mnist"),
        (["train", "cnn", "--preset", "cpu", "--data", "."], "leave out --data and run: blockhf data fetch"),
        (["train", "tiny", "--out", "file/x"], "file"),
        (["compare", "nope"], "There is no task 'nope'"),
        (["compare", "tiny", "--seeds", "a"], "Cannot read the seeds 'a'. Write 0,1,2."),
        (["compare", "tiny", "--seeds", ","], "There is no seed"),
        (["compare", "tiny", *PAIR, "--optimizer", "sgd:lr=-1"], "sgd:lr=-1 does not work on tiny"),
        (["compare", "tiny", "--optimizer", "adam:batch=201"], "is 201, but there are 200 samples"),
        (["figures", "nowhere"], "There is no nowhere"),
        (["figures", "empty"], "There is no run in empty"),
        (["figures", "file"], "file is no JSON"),
        (["data", "fetch", "imagenet"], "There is no data 'imagenet'"),
    ],
)
def test_errors_are_told_without_a_traceback(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], what: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    assert main(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("Error: ")
    assert what in shown.err
    # Nothing ran before the error.
    assert not list(tmp_path.rglob("records.jsonl")) or "sgd:lr=-1" not in what


def test_the_example_of_the_docs_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = Path(__file__).parents[2] / "docs" / "experiments.md"
    code = docs.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(code.replace("20ge", "3ge"), {})
    assert "paper, curvature 150" in capsys.readouterr().out


# data fetch


def test_data_fetch_shows_where_it_put_the_data(
    main: Main, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def put(name: str, out: Path | None, *, watch: fetch.Watch) -> Path:
        for what, done in (("a", 5), ("a", 10), ("b", 10)):
            watch(what, done, 10)
        return tmp_path / name

    monkeypatch.setattr(fetch, "fetch", put)
    assert main("data", "fetch", "mnist", "cifar10") == 0
    shown = capsys.readouterr().out
    assert f"mnist: {tmp_path / 'mnist'}, verified" in shown
    assert f"cifar10: {tmp_path / 'cifar10'}, verified" in shown


def test_an_interrupted_fetch_says_so(
    main: Main, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "fetch", interrupted)
    assert main("data", "fetch", "mnist") == 130
    assert "nothing was kept" in capsys.readouterr().err
