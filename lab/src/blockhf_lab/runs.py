"""One run: an optimizer on a task, within a budget, recorded in a folder, and resumed after anything.

A folder holds

- ``config.json``: what was asked for;
- ``environment.json``: where it ran, once for each time that it was started;
- ``records.jsonl``: a line for each update;
- ``checkpoint.pt``: tensors and numbers to go on from, replaced every now and then, with a checksum;
- ``checkpoint.previous.pt``: the one before, for the case that it is damaged;
- ``result.json``: how it ended, as soon as it has.

A killed run goes on from its checkpoint: the records after it are cut off and made again, the same to the
last bit but for the seconds. The order of the samples is a function of seed and epoch alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import blockhf
from blockhf.report import StepReport, Stopwatch
from blockhf_lab import checkpoints, costs, files, tasks
from blockhf_lab.optimizers import Spec
from blockhf_lab.ranks import ALONE, Ranks
from blockhf_lab.tasks import Samples, Task

try:
    import fcntl
except ImportError:  # where there is none, nobody holds two processes apart
    fcntl = None  # type: ignore[assignment]

Kind = Literal["updates", "epochs", "ge", "s"]
Status = Literal["finished", "worse", "reached", "diverged"]
Record = dict[str, Any]

STOPS = ("budget", "worse", "targets")
_FORMAT = 1
_DEVICE = torch.device("cpu")
_BUDGET = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(updates?|epochs?|ge|s|seconds?)", re.IGNORECASE)
_KINDS: dict[str, Kind] = {"u": "updates", "e": "epochs", "g": "ge", "s": "s"}


@dataclass(frozen=True)
class Budget:
    """How much a run may spend, in updates, epochs, GE or seconds of updates.

    >>> Budget.parse("200ge"), str(Budget.parse("1e3 updates"))
    (Budget(amount=200.0, kind='ge'), '1000updates')
    """

    amount: float
    kind: Kind

    @classmethod
    def parse(cls, text: str) -> Budget:
        match = _BUDGET.fullmatch(text.strip())
        if match is None or not 0 < float(match[1]) < math.inf:
            raise ValueError(f"Cannot read the budget {text!r}. Write 50updates, 20epochs, 200ge or 600s.")
        return cls(float(match[1]), _KINDS[match[2][0].lower()])

    def __str__(self) -> str:
        amount = int(self.amount) if self.amount == int(self.amount) else self.amount
        return f"{amount}{self.kind}"

    @property
    def words(self) -> str:
        """For people.

        >>> Budget.parse("4updates").words, Budget.parse("600s").words
        ('4 updates', '600 seconds')
        """
        unit = {"ge": "GE", "s": "seconds"}.get(self.kind, self.kind)
        return f"{self.amount:,g} {unit.removesuffix('s') if self.amount == 1 else unit}"

    def spent(self, progress: Progress, updates_per_epoch: int) -> float:
        """The share that is spent."""
        if self.kind == "updates":
            return progress.update / self.amount
        if self.kind == "epochs":
            return progress.update / (self.amount * updates_per_epoch)
        return (progress.ge if self.kind == "ge" else progress.seconds) / self.amount


@dataclass(frozen=True)
class Config:
    """What a run is to do.

    Attributes:
        task: The task.
        preset: Its size.
        optimizer: A spec (see ``optimizers``).
        seed: Of the weights and of the order of the samples.
        budget: Text for ``Budget``.
        stop: ``"budget"`` ends with the budget. ``"worse"`` ends also where the test metric has been worse
            than its best for five evaluations and half as many updates again; ``"targets"`` where the
            last of the task's targets is reached.
        threads: Threads of torch. They change the last bits, so a resumed run has the same.
        growth: By which factor updates grow until the next evaluation; zero for the task's own.
        mesh: That of the processes that share the work, ``BLOCKxDATA``, if there are several.
    """

    task: str
    preset: str
    optimizer: str
    seed: int = 0
    budget: str = ""
    stop: str = ""
    threads: int = 0
    growth: float = 0.0
    mesh: str | None = None

    def complete(self) -> Config:
        """With the task's own budget and stop, and torch's own threads, where none are named.

        Raises:
            ValueError: Something in it is not there.
        """
        task = tasks.get(self.task, self.preset)
        stop = self.stop or task.stop
        if stop not in STOPS:
            raise ValueError(f"stop is {stop!r}, but must be one of {', '.join(STOPS)}.")
        if self.growth and self.growth <= 1:
            raise ValueError(f"growth is {self.growth}, but must be above 1, or zero for the task's own.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}, but must be at least 0 and less than 2**63.")
        if self.threads < 0:
            raise ValueError(f"threads is {self.threads}, but must be at least 0.")
        return replace(
            self,
            optimizer=str(Spec.parse(self.optimizer)),
            budget=str(Budget.parse(self.budget or task.budget)),
            stop=stop,
            threads=self.threads or task.threads or torch.get_num_threads(),
            growth=self.growth or task.growth,
        )


@dataclass(frozen=True)
class Progress:
    """Where a run is: updates so far, their cost in GE, and the seconds that they took.

    The seconds of a run with one thread are the processor's, and not those in which it had to wait.

    ``peak_bytes`` is the most memory that an update had beyond what was in use before the model was made;
    none where the machine does not tell.
    """

    update: int = 0
    ge: float = 0.0
    seconds: float = 0.0
    peak_bytes: int | None = None


@dataclass(frozen=True)
class _Best:
    """The best value of the test metric, when it was, and the number of evaluations since."""

    value: float | None = None
    update: int = 0
    since: int = 0


class Run:
    """A run at work: ``advance`` makes an update, ``save`` a checkpoint. Use it in a ``with``.

    Args:
        config: What to do.
        folder: Where to record it; made if it is not there.
        data: Training and test samples, from the task's ``load``.
        resume: Whether to go on with what is in the folder. Without it, a folder with a run is an error.
        ranks: The processes that make the run together. They must see the same folder; the first writes.

    Attributes:
        notice: What was not in order in the folder and did no harm but for some lost time, in a sentence.

    Raises:
        ValueError: The folder holds another run, or none that can be gone on with; or the config is bad.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        data: tuple[Samples, Samples],
        *,
        resume: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.config = config = replace(config.complete(), mesh=ranks.shape)
        self.folder = folder
        self.task: Task = replace(tasks.get(config.task, config.preset), growth=config.growth)
        self.spec = Spec.parse(config.optimizer)
        self.budget = Budget.parse(config.budget)
        self.train, self.test = data
        self.batch_size = self.spec.batch_size(self.task)
        self.updates_per_epoch = updates_per_epoch(self.spec, self.task, self.train)
        self.progress = Progress()
        self.status: Status | None = None
        self.notice = ""
        self._best = _Best()
        self._order: tuple[int, Tensor] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._records = (folder / "records.jsonl" if ranks.leads else Path(os.devnull)).open("ab")
        try:
            if ranks.leads:
                self._lock()
                self._claim(resume)
            self._begin()
        except BaseException:
            self._records.close()
            raise

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._records.close()

    # What it starts from

    def _lock(self) -> None:
        if fcntl is not None:
            try:
                fcntl.flock(self._records, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"Another process is at work on {self.folder}. Wait for it.") from None

    def _claim(self, resume: bool) -> None:
        asked = {key: value for key, value in asdict(self.config).items() if key != "growth"}
        wanted = {"format": _FORMAT, **asked, "settings": self.task.settings()}  # which have the growth
        config = self.folder / "config.json"
        check_free(self.folder, resume=resume)
        if config.exists():
            found = read_config(self.folder)
            _same_run(self.folder, found, wanted, decays="schedule" in self.spec.options)
        for leftover in self.folder.glob(".*.*.*"):  # of a process that was killed while it wrote
            if leftover.suffixes[-2:-1] in ([".pt"], [".json"]):
                leftover.unlink(missing_ok=True)
        self._wanted = wanted

    def _begin(self) -> None:
        torch.set_num_threads(self.config.threads)
        torch.manual_seed(self.config.seed)
        self._bytes_before = _bytes_in_use()
        self.model: nn.Module = self.task.make_model()
        self.averaged: AveragedModel | None = None
        if self.task.averaging is not None:
            self.averaged = AveragedModel(self.model, multi_avg_fn=_average(self.task))
        self.unit = costs.unit(self.task, self.model, self.train)
        self.method = self.spec.start(
            self.task, self.model, self.unit, self.ranks, population=len(self.train)
        )
        if self.ranks.leads:
            files.write(self.folder / "config.json", files.to_json(self._wanted, indent=2))
        checkpoint = self.ranks.first(self._checkpoint() if self.ranks.leads else None)
        if checkpoint is not None:
            self._load(self.folder / checkpoint)
        else:
            self._cut(0)
        if self.status == "finished" and self.spent < 1 - 1e-9:
            self.status = None  # the budget has grown
            if self.ranks.leads:
                (self.folder / "result.json").unlink(missing_ok=True)
        if self.status is not None:
            if self.ranks.leads:
                self._write_result(read_records(self.folder)[-1])
            return
        if self.ranks.leads:
            self._note_environment()
        if checkpoint is None:
            self._write({**self._place(), **self._evaluate()})

    def _checkpoint(self) -> str | None:
        """The newest checkpoint that is whole and fits the records; none where there is no checkpoint.

        Raises:
            ValueError: There are checkpoints, but none is of use.
        """
        names = [name for name in (checkpoints.NEWEST, checkpoints.PREVIOUS) if (self.folder / name).exists()]
        faults = []
        for name in names:
            path = self.folder / name
            try:
                saved = checkpoints.read(path)
                self._check_records(path, saved)
            except checkpoints.Damaged as error:
                faults.append((path, f"{path} cannot be gone on from ({error})"))
            except ValueError as error:
                faults.append((path, str(error)))
            else:
                for damaged, fault in faults:
                    self.notice = f"{fault}. Going on from the checkpoint before it."
                    checkpoints.set_aside(damaged)
                return name
        if faults:
            raise ValueError(f"{faults[0][1]}. Delete the folder to start anew.")
        return None

    def _check_records(self, path: Path, saved: dict[str, Any]) -> None:
        """Raise where the records are not those of a checkpoint."""
        records, length = self.folder / "records.jsonl", saved.get("length", 0)
        content = records.read_bytes()[:length]
        if len(content) < length:
            raise ValueError(f"{records} is shorter than when {path.name} was saved")
        if saved.get("records") not in (None, hashlib.sha256(content).hexdigest()):
            raise ValueError(f"{records} has been changed since {path.name} was saved")

    def _load(self, path: Path) -> None:
        saved = checkpoints.read(path)
        try:
            self.model.load_state_dict(saved["model"])
            self.method.optimizer.load_state_dict(saved["optimizer"])
            if self.averaged is not None:
                self.averaged.load_state_dict(saved["averaged"])
            self.progress, self._best = Progress(**saved["progress"]), _Best(**saved["best"])
            self.status, length = saved["status"], int(saved["length"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            what = next(iter(str(error).splitlines()), type(error).__name__)
            raise ValueError(
                f"{path} cannot be gone on from ({what}). Delete the folder to start anew."
            ) from error
        self._cut(length)
        torch.set_rng_state(saved["rng"])

    def _cut(self, length: int) -> None:
        """Drop the records beyond ``length``; the file's position must follow."""
        if not self.ranks.leads:
            return
        self._records.truncate(length)
        self._records.seek(0, os.SEEK_END)
        self._sum = hashlib.sha256((self.folder / "records.jsonl").read_bytes())

    def _note_environment(self) -> None:
        path = self.folder / "environment.json"
        started = read_environments(self.folder) if path.exists() else []
        here = {**environment(), "threads": self.config.threads, "from_update": self.progress.update}
        if self.notice:
            here["notice"] = self.notice
        files.write(path, files.to_json([*started, here], indent=2))

    # What it does

    @property
    def _clock(self) -> Callable[[], float]:
        """Of the processor where one thread does all the work, so that what runs beside does not count."""
        alone = self.config.threads == 1 and self.ranks.number == 1
        return time.process_time if alone else time.perf_counter

    @property
    def spent(self) -> float:
        """The share of the budget that is spent."""
        return self.budget.spent(self.progress, self.updates_per_epoch)

    @property
    def epoch(self) -> float:
        return self.progress.update / self.updates_per_epoch

    def advance(self) -> Record:
        """Make an update and record it; ``status`` is set if it was the last."""
        batch = self.ranks.share(self._batch())
        watch = Stopwatch(_DEVICE, memory=True)
        with watch.phase("update"):
            before = self._clock()
            step = self.method.update(batch, self.spent)
            seconds = self._clock() - before
        spent = self.ranks.numbers([step.ge, seconds])
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)
        self.progress = Progress(
            self.progress.update + 1,
            self.progress.ge + sum(ge for ge, _ in spent),
            self.progress.seconds + max(seconds for _, seconds in spent),
            self._peak(watch.phases["update"].peak_bytes),
        )
        record = {**self._place(), "loss": step.loss}
        if step.report is not None:
            record["report"] = compact(step.report)
        if not math.isfinite(step.loss):
            self.status = "diverged"
        elif self.spent >= 1 - 1e-9:
            self.status = "finished"
        if self.status is not None or is_evaluated(self.progress.update, self.task.growth):
            record |= self._evaluate()
            self._judge(record["evaluation"])
        self._write(record)
        if self.status is not None:
            self.save()
            if self.ranks.leads:
                self._write_result(record)
        return record

    def _peak(self, now: int | None) -> int | None:
        """The most memory so far, after an update that had this much."""
        if now is None or self._bytes_before is None:
            return self.progress.peak_bytes
        return max(self.progress.peak_bytes or 0, now - self._bytes_before)

    def save(self) -> None:
        """Replace the checkpoint by one of this moment."""
        optimizer = self.method.optimizer.state_dict()  # for which the other processes are needed
        if not self.ranks.leads:
            return
        self._records.flush()
        os.fsync(self._records.fileno())
        checkpoints.save(
            self.folder,
            {
                "model": self.model.state_dict(),
                "optimizer": optimizer,
                "averaged": None if self.averaged is None else self.averaged.state_dict(),
                "rng": torch.get_rng_state(),
                "progress": asdict(self.progress),
                "best": asdict(self._best),
                "status": self.status,
                "length": self._records.tell(),
                "records": self._sum.hexdigest(),
            },
        )

    def _batch(self) -> tasks.Batch:
        if self.task.is_complete and self.batch_size == len(self.train):
            return self.train.take(slice(None))
        epoch, place = divmod(self.progress.update, self.updates_per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, order(len(self.train), self.config.seed, epoch)
        start = place * self.batch_size
        return self.train.take(self._order[1][start : start + self.batch_size])

    def _evaluate(self) -> Record:
        return self.ranks.first(self._evaluated() if self.ranks.leads else {})

    def _evaluated(self) -> Record:
        tested = self.model if self.averaged is None else self.averaged
        front = slice(0, self.task.num_evaluated)
        parts = {
            "train": self.task.train_metrics(self.model, Samples(*self.train.take(front))),
            "test": self.task.test_metrics(tested, self.test),
        }
        return {
            "evaluation": {
                f"{part}_{key}": value for part, found in parts.items() for key, value in found.items()
            },
            "peak_bytes": self.progress.peak_bytes,
            "state_bytes": self.method.state_bytes(),
        }

    def _judge(self, evaluation: dict[str, float]) -> None:
        value = evaluation[self.task.test_key]
        if not math.isfinite(evaluation["train_loss"]):
            self.status = "diverged"
            return
        best = self._best
        better = best.value is None or (value > best.value) == (self.task.metric == "accuracy")
        if better and value != best.value:
            self._best = _Best(value, self.progress.update)
        else:
            self._best = replace(best, since=best.since + 1)
        if self.status is not None:
            return
        if self.config.stop == "worse":
            if self._best.since >= 5 and self.progress.update >= 1.5 * self._best.update:
                self.status = "worse"
        elif self.config.stop == "targets" and self.task.reached(value, self.task.targets[-1]):
            self.status = "reached"

    def _place(self) -> Record:
        progress = self.progress
        return {
            "update": progress.update,
            "epoch": self.epoch,
            "ge": progress.ge,
            "seconds": progress.seconds,
        }

    def _write_result(self, last: Record) -> None:
        """How it ended. The checkpoint knows too, as a process may be killed between the two."""
        ended = {"status": self.status, **asdict(self.progress), **last["evaluation"]}
        files.write(self.folder / "result.json", files.to_json(ended, indent=2))

    def _write(self, record: Record) -> None:
        line = files.to_json(record)
        self._records.write(line)
        self._records.flush()
        if self.ranks.leads:
            self._sum.update(line)


def train(
    run: Run,
    *,
    watch: Callable[[Record], None] = lambda record: None,
    interrupted: Callable[[], bool] = lambda: False,
    checkpoint_seconds: float = 30.0,
) -> Status | None:
    """Let a run go to its end, with a checkpoint every now and then.

    Args:
        run: The run.
        watch: Called with each record.
        interrupted: Asked after each update whether to stop early; the run is saved then.
        checkpoint_seconds: Time between checkpoints. It changes nothing in the numbers.

    Returns:
        How it ended, or nothing if it was interrupted.
    """
    last = time.monotonic()
    while run.status is None:
        is_due = time.monotonic() - last >= checkpoint_seconds
        asked = run.ranks.numbers([interrupted(), is_due])
        if any(stop for stop, _ in asked):
            run.save()
            return None
        if asked[0][1]:
            run.save()
            last = time.monotonic()
        watch(run.advance())
    return run.status


def _bytes_in_use() -> int | None:
    """What the process has in memory, after what earlier runs in it have freed is given back."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
    watch = Stopwatch(_DEVICE, memory=True)
    with watch.phase("nothing"):
        pass
    return watch.phases["nothing"].peak_bytes


def check_free(folder: Path, *, resume: bool) -> None:
    """Raise where a folder has a run that is not to be gone on with."""
    if not resume and (folder / "config.json").exists():
        raise ValueError(f"{folder} already holds a run. Go on with --resume, or name another.")


def updates_per_epoch(spec: Spec, task: Task, samples: Samples) -> int:
    """How many batches there are in the samples; what does not fill a batch is left out of the epoch.

    Raises:
        ValueError: There is none.
    """
    size = spec.batch_size(task)
    if size > len(samples):
        raise ValueError(f"The batch of {spec} is {size}, but there are {len(samples)} samples.")
    return len(samples) // size


def _average(task: Task) -> Callable[[Any, Any, Any], None]:
    """How the averaged parameters follow the others."""

    def average(averaged: Any, current: Any, num_averaged: Any) -> None:
        assert task.averaging is not None
        decay = task.averaging
        if task.averaging_warm_up:
            decay = min(decay, float((1 + num_averaged) / (10 + num_averaged)))
        get_ema_multi_avg_fn(decay)(averaged, current, num_averaged)  # type: ignore[no-untyped-call]

    return average


def order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The order of the samples in an epoch: a function of seed and epoch alone."""
    mixed = (seed * 1_000_003 + epoch) % 2**63
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(mixed))


def is_evaluated(update: int, growth: float) -> bool:
    """Whether an update is among those that are evaluated, whose distances grow by a factor.

    >>> [update for update in range(30) if is_evaluated(update, 1.25)]
    [0, 1, 2, 3, 4, 5, 7, 9, 12, 15, 19, 24]
    """
    place = 0
    while place < update:
        place = max(place + 1, math.ceil(place * growth - 1e-9))
    return place == update


def compact(report: StepReport) -> Record:
    """What of a report is kept for each update."""
    return {
        "accepted": report.accepted,
        "reason": report.reason,
        "loss_after": report.loss_after,
        "ratio": report.ratio,
        **{key: report.work.get(key) for key in ("gradient_batch", "curvature_batch", "flops")},
        "cg": [block.num_steps for block in report.blocks],
        "products": [block.num_products for block in report.blocks],
        "status": [block.status for block in report.blocks],
        "damping": [block.damping for block in report.blocks],
        "coefficient": [block.coefficient for block in report.blocks],
    }


# Reading

_CONFIG: files.Shape = {
    **dict.fromkeys(("task", "preset", "optimizer", "budget"), str),
    "seed": int,
    "threads?": int,
    "settings": {"title": str, "large_batch": int, "metric": str, "targets": [float]},
}
_RECORD: files.Shape = {
    "update": int,
    **dict.fromkeys(("epoch", "ge", "seconds"), float),
    "evaluation?": {"train_loss": (float, None), ...: (float, None)},
    "report?": {"cg": [int]},
    **dict.fromkeys(("loss?", "peak_bytes?", "state_bytes?"), (float, None)),
}


def read_config(folder: Path) -> dict[str, Any]:
    """What a run was asked for.

    Raises:
        ValueError: The file is no config of a run.
    """
    found: dict[str, Any] = _read_checked(folder / "config.json", _CONFIG, "config of a run")
    return found


def read_environments(folder: Path) -> list[dict[str, Any]]:
    """Where a run was started, each time.

    Raises:
        ValueError: The file is something else.
    """
    path = folder / "environment.json"
    found: list[dict[str, Any]] = _read_checked(path, [dict], "list of environments")
    return found


def read_status(folder: Path) -> str:
    """How a run ended, or that it has not.

    Raises:
        ValueError: The file that says so is something else.
    """
    path = folder / "result.json"
    if not path.exists():
        return "unfinished"
    return str(_read_checked(path, {"status": str}, "result of a run")["status"])


def _read_checked(path: Path, shape: files.Shape, what: str) -> Any:
    found = files.read_json(path)
    try:
        files.expect(found, shape)
    except ValueError as error:
        raise ValueError(
            f"{path} is no {what}: {error}. Put back what it was, or delete the folder of the run."
        ) from error
    return found


def read_records(folder: Path) -> list[Record]:
    """The records of a run; a last line that a killed process left unfinished does not count.

    Raises:
        ValueError: Another line cannot be read.
    """
    path = folder / "records.jsonl"
    lines = path.read_bytes().split(b"\n")
    records: list[Record] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            files.expect(record, _RECORD)
            if record["update"] != len(records):
                raise ValueError(f"it is of update {record['update']} instead of {len(records)}")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"Line {number} of {path} is no record ({error}). "
                "Run again with --resume, or delete the folder."
            ) from error
        records.append(record)
    return records


def find(folders: list[Path]) -> list[Path]:
    """The folders of runs among and below these.

    Raises:
        ValueError: There is none below one of them.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        below = [path.parent for path in sorted(folder.rglob("config.json"))]
        if not below:
            raise ValueError(f"There is no run in {folder}: no config.json in it or below.")
        found.update(dict.fromkeys(below))
    return list(found)


def environment() -> dict[str, Any]:
    """Versions, machine and commit."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "blockhf": blockhf.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of the library's sources, if they are in git, with a mark if they or the lab's changed."""
    library, lab = Path(blockhf.__file__).parent, Path(__file__).parent

    def git(*arguments: str, folder: Path = library) -> str:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        # A package installed into a project's .venv is in that project's folder, and not in its git.
        if git("ls-files", "--error-unmatch", "__init__.py") and (commit := git("rev-parse", "HEAD")):
            changed = any(git("status", "--porcelain", "--", ".", folder=folder) for folder in (library, lab))
            return commit + ("+changes" if changed else "")
    return None


def _same_run(folder: Path, found: dict[str, Any], wanted: dict[str, Any], *, decays: bool) -> None:
    """Raise if a folder's config is another; the budget may differ unless the learning rate follows it."""
    wanted = json.loads(files.to_json(wanted))
    found = {**found, "optimizer": str(Spec.parse(found["optimizer"]))}  # which may have had another name
    free = set() if decays else {"budget"}
    keys = [key for key in wanted | found if key not in free and wanted.get(key) != found.get(key)]
    if keys:
        key = keys[0]
        raise ValueError(
            f"{folder} holds another run: its {key} is {found.get(key)!r} and not {wanted.get(key)!r}. "
            "Name another folder, or delete this one."
        )
