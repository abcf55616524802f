"""Mistakes on the command line and in files that people edit: a plain sentence and exit code 2, at once."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_task
from blockhf_lab import comparison, runs, tasks
from blockhf_lab.comparison import Comparison
from command_line import run_main

Main = Callable[..., int | str | None]
ADAM = ("--optimizer", "adam:lr=0.01,batch=20", "--threads", "1")
RUN = ("train", "tiny", *ADAM, "--budget", "3updates", "--out", "run")
PLAN = ("plan", "--parameters", "1e9", "--flops", "1e15")


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Main:
    monkeypatch.setattr(tasks, "TASKS", {**tasks.TASKS, "tiny": tiny_task.task})
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.chdir(tmp_path)
    return lambda *args: run_main(monkeypatch, *args)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["race", "tiny", "--budget", "x"], "Cannot read the budget 'x'"),
        (["race", "tiny", "--search", "x"], "Cannot read the budget 'x'"),
        (["race", "tiny", "--seeds", "0,-1"], "seed is -1, but must be at least 0"),
        (["race", "tiny", "--budget", "1e999updates"], "Cannot read the budget '1e999updates'"),
        (["train", "tiny", "--budget", "1e999updates"], "Cannot read the budget '1e999updates'"),
        (["train", "tiny", "--ranks", "2", "--budget", "x"], "Cannot read the budget 'x'"),
        (["train", "tiny", "--seed", "-1"], "-1 is less than 0."),
        (["train", "tiny", "--seed", str(2**63)], "is too large; at most"),
        (["train", "tiny", "--threads", "-1"], "-1 is less than 0."),
        (["demo", "--seed", "-1"], "-1 is less than 0."),
        (["fuzz", "kills", "--number", "0"], "0 is less than 1."),
        (["train", "tiny", "--optimizer", "sparseadam"], "sparseadam is for sparse gradients"),
        (["train", "tiny", "--optimizer", "adam:lr=abc"], "lr of adam is abc, but must be a number."),
        (["train", "tiny", "--optimizer", "adam:lr=1e999"], "lr of adam is inf, but must be a number."),
        (["train", "tiny", "--optimizer", "adam:betas=0.9"], "must be 2 numbers with a slash between them."),
        (["train", "tiny", "--optimizer", "adam:betas=0.9/x"], "must be 2 numbers with a slash between"),
        (
            ["train", "tiny", "--optimizer", "adam:amsgrad=3"],
            "amsgrad of adam is 3, but must be true or false",
        ),
        (["train", "tiny", "--optimizer", "blockhf:lr=abc"], "blockhf:lr=abc does not work on tiny"),
        (["train", "tiny", "--optimizer", "lbfgs:line_search_fn=x"], "lbfgs:line_search_fn=x does not work"),
        (["train", "tiny", "--optimizer", "adam:differentiable=true"], "does not work on tiny"),
        (["plan", "--parameters", "inf", "--flops", "1e15"], "parameters is inf, but must be above 0"),
        (["plan", "--parameters", "nan", "--flops", "1e15"], "parameters is nan, but must be above 0"),
        (["plan", "--parameters", "1e308", "--flops", "1e15"], "parameters is 1e+308, but must be above 0"),
        (["plan", "--parameters", "1e9", "--flops", "inf"], "flops is inf, but must be above 0"),
        (
            [*PLAN, "--layers", "1000000000"],
            "layers is 1000000000, but must be at least 1 and at most 10000.",
        ),
        ([*PLAN, "--tokens", "1" + "0" * 400], "but must be at least 1 and below 1e+24."),
        ([*PLAN, "--bandwidth", "inf"], "bandwidth is inf, but must be above 0 and finite."),
        ([*PLAN, "--bandwidth", "nan"], "bandwidth is nan, but must be above 0 and finite."),
        ([*PLAN, "--latency", "1e999"], "latency is inf, but must be at least 0 and finite."),
        ([*PLAN, "--efficiency", "nan"], "efficiency is nan, but must be above 0"),
        ([*PLAN, "--ranks", "0"], "ranks is 0, but must be at least 1"),
    ],
)
def test_a_mistake_is_told_before_anything_is_done(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], what: str
) -> None:
    assert main(*arguments) == 2
    shown = capsys.readouterr().err
    assert what in " ".join(shown.replace("│", " ").split())
    assert not any(words in shown for words in ("Traceback", "not supported between", "<="))
    records = [path.read_text().count("\n") for path in tmp_path.rglob("records.jsonl")]
    assert sum(records) <= 1  # some optimizers fail at their first step, after the record of update 0


@pytest.mark.parametrize("command", [["demo"], ["train"], ["race"], ["plan"], ["bench", "step"]])
def test_the_help_has_no_formulas(main: Main, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert main(*command, "--help") == 0
    shown = capsys.readouterr().out
    assert "<=" not in shown
    assert ">=" not in shown


# Files


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    task = {**tasks.TASKS, "tiny": tiny_task.task}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "TASKS", task)
        config = runs.Config("tiny", "quick", "adam:lr=0.01,batch=20", budget="3updates", threads=1)
        with runs.Run(config, folder / "run", tiny_task.load(None)) as run:
            runs.train(run)
    (compared,) = comparison.collect([folder / "run"])
    (folder / "comparison.json").write_bytes(compared.to_json())
    return folder


@pytest.mark.parametrize(
    ("name", "content", "command", "what"),
    [
        ("run/config.json", "[]", RUN, "config.json is no config of a run: it is [], but must be an object"),
        ("run/config.json", '{"task": "tiny"}', RUN, "config.json is no config of a run: it has no preset"),
        ("run/config.json", "[" * 100_000, RUN, "config.json is no JSON"),
        ("run/config.json", "{}", ("figures", "run"), "config.json is no config of a run: it has no task"),
        ("run/environment.json", "3", ("figures", "run"), "it is 3, but must be a list"),
        ("run/environment.json", "[3]", ("figures", "run"), "it[0] is 3, but must be an object"),
        ("run/environment.json", "{}", (*RUN[:-3], "5updates", "--out", "run"), "is no list of environments"),
        ("run/result.json", "[]", ("figures", "run"), "result.json is no result of a run"),
        (
            "run/records.jsonl",
            '{"update": 0}\n',
            ("figures", "run"),
            "Line 1 of run/records.jsonl is no record",
        ),
        ("run/records.jsonl", '{"update": 0}\n', RUN, "records.jsonl is shorter than when"),
        ("comparison.json", "[]", ("figures", "comparison.json"), "comparison.json is no comparison"),
    ],
)
def test_an_edited_file_is_named_with_what_is_wrong(
    main: Main,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str,
    command: tuple[str, ...],
    what: str,
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(content)
    arguments = (*command, "--resume") if command[0] == "train" else command
    assert main(*arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Error: ")
    assert what in shown


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


def _edited(content: Any, chance: random.Random) -> Any:
    """Something removed, or replaced by something else, at a random place."""
    content = copy.deepcopy(content)
    *path, key = chance.choice(list(_places(content)))
    inside = content
    for step in path:
        inside = inside[step]
    if chance.random() < 0.3:
        del inside[key]
    else:
        others: list[Any] = [None, True, -1, 3.5, 10**400, "", "x", [], {}, [1], {"x": 1}, float("inf")]
        inside[key] = chance.choice(others)
    return content


@pytest.mark.parametrize("seed", range(3))
def test_random_edits_never_end_in_a_traceback(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Each edit is either harmless or refused with a ``ValueError``, which the command line tells."""
    monkeypatch.setattr(tasks, "TASKS", {**tasks.TASKS, "tiny": tiny_task.task})
    chance = random.Random(seed)
    num_refused = 0
    config = runs.Config("tiny", "quick", "adam:lr=0.01,batch=20", budget="3updates", threads=1)

    def resume(folder: Path) -> None:
        with runs.Run(config, folder / "run", tiny_task.load(None), resume=True):
            pass

    def show(compared: Comparison) -> None:
        comparison.summaries(compared)
        for spec, entries in compared.methods():
            comparison.curve(spec, entries, compared.test_key, "ge")

    for number in range(30):
        folder = tmp_path / str(number)
        shutil.copytree(finished, folder)
        name = chance.choice(
            ["run/config.json", "run/environment.json", "run/result.json", "comparison.json"]
        )
        if chance.random() < 0.3:
            path = folder / "run" / "records.jsonl"
            lines = path.read_text().splitlines()
            place = chance.randrange(len(lines))
            lines[place] = json.dumps(_edited(json.loads(lines[place]), chance))
            path.write_text("\n".join(lines) + "\n")
        else:
            path = folder / name
            path.write_text(json.dumps(_edited(json.loads(path.read_text()), chance)))
        actions: list[Callable[[], None]] = [
            lambda folder=folder: show(Comparison.read(folder / "comparison.json")),
            lambda folder=folder: show(comparison.collect([folder / "run"])[0]),
        ]
        if number % 5 == 0:  # it costs more
            actions.append(lambda folder=folder: resume(folder))
        for action in actions:
            with contextlib.suppress(ValueError):
                action()
                continue
            num_refused += 1
        shutil.rmtree(folder)
    assert num_refused >= 5


def test_an_optimizer_that_is_written_otherwise_is_the_same(finished: Path, tmp_path: Path) -> None:
    content = json.loads((finished / "comparison.json").read_text())
    content["entries"][0]["optimizer"] = "adam: lr=1e-2, batch=20"
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    ((spec, entries),) = Comparison.read(tmp_path / "comparison.json").methods()
    assert (str(spec), len(entries)) == ("adam:batch=20,lr=0.01", 1)
