"""Runs that are killed at random moments and resumed: ``blockhf fuzz kills``.

Each case is a run of a tiny task in a process of its own (a fork of this one, which has torch loaded). It is
ended one to three times, each time at a random moment and in one of the ways of ``WAYS``, and resumed. In
the end its records, parameters, averages, random state and the optimizer's state must equal those of a run
that nobody disturbed; after each end, the records must be a beginning of that run's, and no checkpoint may be
lost.

What is real: the processes, the signals, and the files that they leave. What is simulated: that the power
fails (the records after the last checkpoint are cut at a random byte, as a file system may leave them) and
that a disk errs (bytes of the newest checkpoint are changed).

A case depends on seed and number alone, but for moments that are chosen by time. ``cases.jsonl`` has a line
for each; what is in it is not done again, so an interrupted campaign goes on with the same command.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from rich.console import Console
from torch import nn

import blockhf
from blockhf import blocks
from blockhf_lab import autoencoder, checkpoints, commands, files, optimizers, runs, tasks
from blockhf_lab.runs import Config, Run
from blockhf_lab.tasks import Samples, Task

WAYS: Mapping[str, tuple[int, str]] = {
    "line": (30, "SIGKILL at a random line of the lab's and the library's code"),
    "aimed": (25, "SIGKILL at a random line of starting, evaluating, recording and saving"),
    "time": (20, "SIGKILL from outside after a random time"),
    "stop": (10, "SIGTERM at a random line: it ends after the update and saves"),
    "ctrl-c": (5, "KeyboardInterrupt at a random line, as a second Ctrl-C raises it"),
    "power": (5, "SIGKILL at a random line, and the records since the checkpoint cut at a random byte"),
    "disk": (5, "SIGKILL at a random line, and random bytes of the newest checkpoint changed"),
}
"""How runs are ended: how often in a hundred, and what it is."""

VARIANTS = (
    ("fuzz", "paper:curvature=16"),
    ("fuzz", "adam:lr=0.01,batch=8"),
    ("fuzz-dropout", "hf:curvature=16"),
    ("fuzz", "blockhf:curvature=16"),
    ("fuzz-dropout", "sgd:batch=8,lr=0.01,momentum=0.9,schedule=cosine"),
    ("fuzz", "lbfgs:max_iter=3"),
)
"""The task and the optimizer of the cases, in turn."""

UPDATES = 8
_CHECKPOINT_SECONDS = (0.0, 0.0, 0.02, 1e9)
_SECONDS = 120.0
_ENDED, _STOPPED, _REFUSED, _FAILED = 0, 3, 2, 1


def _task(preset: Any = "quick", *, dropout: bool = False) -> Task:
    return Task(
        name="fuzz-dropout" if dropout else "fuzz",
        preset=preset,
        title="A very small autoencoder",
        make_model=partial(_model, dropout=dropout),
        make_blocks=blocks.by_module,
        loss=autoencoder.reconstruction_error,
        load=_load,
        metric="loss",
        large_batch=32,
        race_batch=32,
        curvature_batches=(16,),
        adam_batches=(8, 32),
        recipe={"lr": 0.1, "damping": 0.1, "max_cg_steps": 3, "slow_start": (2, 1)},
        targets=(1.0,),
        budget=f"{UPDATES}updates",
        num_evaluated=32,
        growth=1.3,
        averaging=0.9,
        averaging_warm_up=True,
    )


def _model(*, dropout: bool) -> nn.Module:
    model = autoencoder.Autoencoder((16, 6, 3))
    return nn.Sequential(nn.Dropout(0.2), model) if dropout else model


def _load(folder: Path | None) -> tuple[Samples, Samples]:
    pictures = torch.rand(96, 16, generator=torch.Generator().manual_seed(0))
    return Samples(pictures[:64], pictures[:64]), Samples(pictures[64:], pictures[64:])


TASKS: Mapping[str, Callable[[Any], Task]] = {"fuzz": _task, "fuzz-dropout": partial(_task, dropout=True)}


# In the process of a run


@dataclass(frozen=True)
class Moment:
    """When a run is ended from inside: at a line, counted in all code or in that which is aimed at."""

    line: int
    aimed: bool
    way: str


_AIMED: tuple[CodeType, ...] = tuple(
    function.__code__
    for function in (
        *(Run._claim, Run._begin, Run._checkpoint, Run._check_records, Run._load, Run._cut),
        *(Run._note_environment, Run._evaluated, Run._judge, Run._write, Run._write_result, Run.save),
        *(checkpoints.save, checkpoints.read, checkpoints.sealed, checkpoints.set_aside, files.write),
    )
)
_PLACES: Mapping[CodeType, str] = {
    Run.save.__code__: "while a checkpoint is saved",
    Run._evaluate.__code__: "in an evaluation",
    Run._write.__code__: "while a record is written",
    Run._write_result.__code__: "while the result is written",
    Run._load.__code__: "while a checkpoint is loaded",
    Run._checkpoint.__code__: "while a checkpoint is loaded",
    Run._note_environment.__code__: "while it starts",
    optimizers.Method.update.__code__: "in an update",
}
_FOLDERS = tuple(str(Path(module.__file__ or "").parent) for module in (blockhf, runs))


class _Lines:
    """Counts lines, and ends the process at one of them."""

    def __init__(self, moment: Moment | None, aimed: bool, pipe: int) -> None:
        self.count, self._moment, self._aimed, self._pipe = 0, moment, aimed, pipe

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        wanted = code in _AIMED if self._aimed else code.co_filename.startswith(_FOLDERS)
        return self._line if wanted and code.co_filename != __file__ else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.count += 1
            if self._moment is not None and self.count == self._moment.line:
                sys.settrace(None)
                self._end(frame)
        return self._line

    def _end(self, frame: FrameType) -> None:
        assert self._moment is not None
        _tell(self._pipe, {"place": _place(frame)})
        if self._moment.way == "ctrl-c":
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGTERM if self._moment.way == "stop" else signal.SIGKILL)


def _place(frame: FrameType | None) -> str:
    is_starting = False
    while frame is not None:
        if frame.f_code in _PLACES:
            return _PLACES[frame.f_code]
        is_starting = is_starting or frame.f_code is Run.__init__.__code__
        frame = frame.f_back
    return "while it starts" if is_starting else "between updates"


def _tell(pipe: int, what: dict[str, Any]) -> None:
    os.write(pipe, (json.dumps(what) + "\n").encode())


def _name_modules(config: Config, folder: Path, seconds: float, pipe: int) -> int:
    """Make a run and write which modules it has loaded."""
    code = _work(config, folder, seconds, None, pipe)
    files.write(folder / "modules", "\n".join(sys.modules).encode())
    return code


def _work(config: Config, folder: Path, seconds: float, lines: _Lines | None, pipe: int) -> int:
    """Make or resume a run; returns the exit code of the process."""
    try:
        with commands.Interrupts() as interrupts:
            if lines is not None:
                sys.settrace(lines)
            with Run(config, folder, _load(None), resume=True) as run:
                ended = runs.train(run, interrupted=interrupts, checkpoint_seconds=seconds)
            sys.settrace(None)
    except KeyboardInterrupt:
        return _STOPPED
    except ValueError as error:
        sys.settrace(None)
        _tell(pipe, {"refused": str(error)})
        return _REFUSED
    if lines is not None:
        _tell(pipe, {"lines": lines.count})
    return _STOPPED if ended is None else _ENDED


# In the process of the campaign


@dataclass(frozen=True)
class End:
    """How a process ended, what it told, and how long it took."""

    code: int
    told: Mapping[str, Any]
    seconds: float

    @property
    def was_killed(self) -> bool:
        return self.code == -signal.SIGKILL


def _fork(
    config: Config,
    folder: Path,
    seconds: float,
    moment: Moment | None = None,
    *,
    kill_after: float | None = None,
    counted: bool | None = None,
    names_modules: bool = False,
) -> End:
    """Run in a process of its own; ``counted`` counts its lines, all of them or those that are aimed at."""
    receive, send = os.pipe()
    before = time.monotonic()
    child = os.fork()
    if child == 0:
        code = _FAILED
        try:
            os.close(receive)
            aimed = counted if moment is None else moment.aimed
            lines = None if aimed is None else _Lines(moment, aimed, send)
            if names_modules:
                code = _name_modules(config, folder, seconds, send)
            else:
                code = _work(config, folder, seconds, lines, send)
        except BaseException:
            _tell(send, {"error": traceback.format_exc()[-3000:]})
        finally:
            os._exit(code)
    os.close(send)
    deadline = before + _SECONDS
    kill_at = deadline if kill_after is None else before + kill_after
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() >= kill_at:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(min(0.002, max(kill_at - time.monotonic(), 0.0)))
    with os.fdopen(receive) as pipe:
        told = {key: value for line in pipe for key, value in json.loads(line).items()}
    code = os.waitstatus_to_exitcode(status)
    if kill_after is None and time.monotonic() >= deadline:
        told["error"] = f"It did not end within {_SECONDS:g} s."
    return End(code, told, time.monotonic() - before)


def _preload(configs: list[Config], folder: Path) -> None:
    """Load what runs load, so that each fork has it; they would take a second each to load it anew."""
    for number, config in enumerate(configs):
        place = folder / f"modules-{number}"
        shutil.rmtree(place, ignore_errors=True)
        end = _fork(config, place, 0.0, names_modules=True)
        if end.code != _ENDED:
            raise RuntimeError(f"An undisturbed run failed: {end}")
        for name in (place / "modules").read_text().splitlines():
            with contextlib.suppress(Exception):  # some are no modules that can be loaded by their names
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # forks need not look through all of it, which costs more than a run


@dataclass(frozen=True)
class Reference:
    """An undisturbed run: what it left, how long it took, and its lines: all, and those aimed at."""

    config: Config
    records: list[runs.Record]
    saved: dict[str, Any]
    seconds: float
    lines: Mapping[bool, int]


def reference(config: Config, folder: Path) -> Reference:
    """Make an undisturbed run, three times: it must be the same each time."""
    lines: dict[bool, int] = {}
    ends = []
    for name, counted in (("plain", None), ("all", False), ("aimed", True)):
        shutil.rmtree(folder / name, ignore_errors=True)
        ends.append(_fork(config, folder / name, 0.0, counted=counted))
        if ends[-1].code != _ENDED:
            raise RuntimeError(f"An undisturbed run failed: {ends[-1]}")
        if counted is not None:
            lines[counted] = ends[-1].told["lines"]
    found = Reference(config, _records(folder / "plain"), _saved(folder / "plain"), ends[0].seconds, lines)
    if fault := _difference(found, folder / "all") or _difference(found, folder / "aimed"):
        raise RuntimeError(f"Two undisturbed runs differ: {fault}")
    return found


def _records(folder: Path) -> list[runs.Record]:
    """Without what is measured, which differs from time to time."""
    measured = ("seconds", "peak_bytes")
    found = runs.read_records(folder) if (folder / "records.jsonl").exists() else []
    return [{key: value for key, value in record.items() if key not in measured} for record in found]


def _saved(folder: Path) -> dict[str, Any]:
    saved = checkpoints.read(folder / checkpoints.NEWEST)
    progress = {key: saved["progress"][key] for key in ("update", "ge")}
    kept = ("model", "averaged", "optimizer", "rng", "best", "status")
    return {**{key: saved[key] for key in kept}, "progress": progress}


def _difference(expected: Reference, folder: Path) -> str:
    """What of a finished run is not as in the undisturbed one; nothing where all is."""
    if _records(folder) != expected.records:
        return "the records differ"
    if path := _differs(expected.saved, _saved(folder)):
        return f"the state differs in {path}"
    if runs.read_status(folder) != expected.saved["status"]:
        return "the result differs"
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    return f"files are left over: {left}" if left else ""


def _differs(one: Any, other: Any, path: str = "it") -> str:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return "" if one.dtype == other.dtype and torch.equal(one, other) else path
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs: Iterator[tuple[Any, Any, Any]] = ((key, one[key], other[key]) for key in one)
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = ((place, *pair) for place, pair in enumerate(zip(one, other, strict=True)))
    else:
        return "" if type(one) is type(other) and one == other else path
    return next((found for key, a, b in pairs if (found := _differs(a, b, f"{path}.{key}"))), "")


@dataclass
class Case:
    """A case: its number, the run, how it was ended each time, and what was wrong, if anything was."""

    number: int
    task: str
    optimizer: str
    ends: list[dict[str, Any]] = field(default_factory=list)
    fault: str = ""


def run_case(number: int, seed: int, expected: Reference, folder: Path) -> Case:
    """End a run some times, resume it to its end, and compare it with an undisturbed one."""
    chance = random.Random(f"{seed} {number}")
    case = Case(number, expected.config.task, expected.config.optimizer)
    seconds = chance.choice(_CHECKPOINT_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    ways = chance.choices(list(WAYS), [share for share, _ in WAYS.values()], k=chance.choice((1, 1, 2, 3)))
    try:
        for way in ways:
            if not _end_once(case, way, chance, seconds, expected, folder):
                break
        if not case.fault:
            _resume(case, seconds, expected, folder)
    except (ValueError, OSError) as error:  # what is left of a run must be readable
        case.fault = f"{type(error).__name__}: {error}"
    if not case.fault:
        shutil.rmtree(folder)
    return case


def _end_once(
    case: Case, way: str, chance: random.Random, seconds: float, expected: Reference, folder: Path
) -> bool:
    """Start or resume a run and end it; whether it was ended and all is well."""
    before = _newest_update(folder)
    # A resumed run is shorter; moments beyond its end would be missed.
    share = chance.random() * (1.0 - 0.9 * max(before, 0) / UPDATES)
    if way == "time":
        end = _fork(expected.config, folder, seconds, kill_after=share * expected.seconds)
    else:
        aimed = way == "aimed"
        line = 1 + int(share * expected.lines[aimed])
        end = _fork(expected.config, folder, seconds, Moment(line, aimed, way))
    if end.code == _ENDED:
        return False  # before its moment came
    if not (end.was_killed or end.code == _STOPPED) or "error" in end.told:
        case.fault = f"{way}: exit code {end.code}, {dict(end.told)}"
        return False
    done = _records(folder)
    fault = ""
    if done != expected.records[: len(done)]:
        fault = "the records are no beginning of the undisturbed run's"
    if _newest_update(folder) < before:
        fault = f"the checkpoint of update {before} is lost"
    place = end.told.get("place", "at any place")
    case.ends.append({"way": way, "place": place, "records": len(done)})
    if way == "power":
        _fail_power(folder, chance)
    elif way == "disk":
        fault = fault or _err_on_disk(case, chance, expected, folder)
    case.fault = fault and f"{way}: {fault}"
    return not fault


def _resume(case: Case, seconds: float, expected: Reference, folder: Path) -> None:
    before = _newest_update(folder)
    end = _fork(expected.config, folder, seconds)
    if end.code != _ENDED:
        case.fault = f"resuming: exit code {end.code}, {dict(end.told)}"
        return
    started = runs.read_environments(folder)[-1]["from_update"]
    if before != UPDATES and started < before:
        case.fault = f"resuming: it went on from update {started}, but update {before} was saved"
    else:
        case.fault = _difference(expected, folder)


def _newest_update(folder: Path) -> int:
    """Of the newest checkpoint that is whole; -1 where there is none."""
    for name in (checkpoints.NEWEST, checkpoints.PREVIOUS):
        with contextlib.suppress(checkpoints.Damaged, FileNotFoundError):
            return int(checkpoints.read(folder / name)["progress"]["update"])
    return -1


def _fail_power(folder: Path, chance: random.Random) -> None:
    """Cut the records somewhere after what the checkpoint made sure of."""
    path = folder / "records.jsonl"
    if not path.exists():
        return
    sure = 0
    for name in (checkpoints.NEWEST, checkpoints.PREVIOUS):
        if (folder / name).exists():
            sure = int(checkpoints.read(folder / name)["length"])
            break
    os.truncate(path, chance.randint(sure, path.stat().st_size))


def _err_on_disk(case: Case, chance: random.Random, expected: Reference, folder: Path) -> str:
    """Change bytes of the newest checkpoint. It must be noticed; what is wrong, if anything is."""
    path = folder / checkpoints.NEWEST
    if not path.exists():
        return ""
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    damage = chance.choice(("bit", "zeros", "cut"))
    if damage == "bit":
        content[place] ^= 1 << chance.randrange(8)
    elif damage == "cut":
        del content[place:]
    else:
        size = min(chance.choice((16, 512, 4096)), len(content) - place)
        if not any(content[place : place + size]):
            return ""  # nothing was changed
        content[place : place + size] = bytes(size)
    case.ends[-1]["damage"] = damage
    path.write_bytes(content)
    try:
        checkpoints.read(path)
    except checkpoints.Damaged:
        pass
    else:
        return f"a damaged checkpoint was read ({damage} at byte {place} of {len(content)})"
    if (folder / checkpoints.PREVIOUS).exists():
        return ""
    end = _fork(expected.config, folder, 0.0)
    if end.code != _REFUSED or "is damaged" not in end.told.get("refused", ""):
        return f"the only checkpoint is damaged, and it said {dict(end.told)}"
    shutil.rmtree(folder)  # as the message says
    return ""


def kills(number: int, seed: int, out: Path, console: Console) -> bool:
    """Make cases until so many ends have been; write ``kills.json``.

    Returns:
        Whether all was well.
    """
    if not hasattr(os, "fork"):
        raise ValueError("There is no fork on this system, which blockhf fuzz kills needs.")
    tasks.TASKS = {**tasks.TASKS, **TASKS}
    out.mkdir(parents=True, exist_ok=True)
    log = out / "cases.jsonl"
    cases = _cases_so_far(log, seed)
    started = sum(len(case.ends) for case in cases)
    config = Config("", "quick", "", seed=3, budget=f"{UPDATES}updates", threads=1)
    configs = [replace(config, task=task, optimizer=optimizer) for task, optimizer in VARIANTS]
    references: dict[int, Reference] = {}
    if started < number:
        _preload(configs[:1], out / "work")
    done, last = started, time.monotonic()
    with log.open("a", encoding="utf-8") as file:
        while done < number:
            index = len(cases) % len(VARIANTS)
            if index not in references:
                references[index] = reference(configs[index], out / "work" / f"undisturbed-{index}")
            case = run_case(len(cases), seed, references[index], out / "work" / f"case-{len(cases)}")
            cases.append(case)
            done += len(case.ends)
            file.write(json.dumps({"seed": seed, **asdict(case)}) + "\n")
            file.flush()
            if case.fault:
                console.print(f"Case {case.number} ({case.optimizer}): {case.fault}", markup=False)
            if time.monotonic() - last > 20:
                console.print(f"{done} of {number}")
                last = time.monotonic()
    summary = summarize(cases, seed)
    files.write(out / "kills.json", files.to_json(summary, indent=2))
    shutil.rmtree(out / "work", ignore_errors=not summary["faults"])
    console.print(
        f"{summary['ends']} ends of {summary['cases']} runs, {len(summary['faults'])} at fault. "
        f"Written: {out / 'kills.json'}",
        soft_wrap=True,
    )
    return not summary["faults"]


def _cases_so_far(log: Path, seed: int) -> list[Case]:
    if not log.exists():
        return []
    # A last line that a killed campaign left unfinished is made again.
    lines = log.read_text(encoding="utf-8").rpartition("\n")[0]
    log.write_text(lines + "\n" * bool(lines), encoding="utf-8")
    found = [json.loads(line) for line in lines.splitlines()]
    if any(case.pop("seed") != seed for case in found):
        raise ValueError(f"{log} is of another seed. Name another folder, or delete it.")
    return [Case(**case) for case in found]


def summarize(cases: list[Case], seed: int) -> dict[str, Any]:
    """What a page is made from."""
    ends = [end for case in cases for end in case.ends]
    resumed = Counter(len(case.ends) for case in cases)
    return {
        "command": f"blockhf fuzz kills --number {len(ends)} --seed {seed}",
        "seed": seed,
        "environment": runs.environment(),
        "updates": UPDATES,
        "cases": len(cases),
        "ends": len(ends),
        "kills": sum(end["way"] not in ("stop", "ctrl-c") for end in ends),
        "ends_by_case": {str(key): resumed[key] for key in sorted(resumed)},
        "ways": {
            way: {"what": what, "ends": sum(end["way"] == way for end in ends)}
            for way, (_, what) in WAYS.items()
        },
        "places": dict(Counter(end["place"] for end in ends).most_common()),
        "by_records": {
            str(number): sum(end["records"] == number for end in ends) for number in range(UPDATES + 2)
        },
        "damages": dict(Counter(end["damage"] for end in ends if "damage" in end)),
        "optimizers": dict(Counter(case.optimizer for case in cases)),
        "faults": [asdict(case) for case in cases if case.fault],
    }
