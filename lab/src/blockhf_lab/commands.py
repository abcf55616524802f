"""What ``blockhf train``, ``compare``, ``figures`` and ``data fetch`` do and show."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from blockhf.blocks import Group
from blockhf_lab import comparison, costs, fetch, figures, files, page, ranks, runs, tables, tasks
from blockhf_lab.comparison import Comparison
from blockhf_lab.optimizers import Spec
from blockhf_lab.runs import Config, Record, Run


def train(
    config: Config,
    out: Path | None,
    console: Console,
    *,
    resume: bool = False,
    data: Path | None = None,
    tensorboard: bool = False,
) -> bool:
    """Make one run and show it.

    Returns:
        Whether it came to its end.
    """
    folder = run_folder(config) if out is None else out
    resume = resume or ranks.has_restarted()
    config = _as_before(config, folder, resume=resume).complete()
    together = _join(config)
    console.quiet = console.quiet or not together.leads
    samples = tasks.get(config.task, config.preset).load(data)
    with Interrupts() as interrupts, _progress(console) as progress:
        finished = _run(
            config,
            folder,
            samples,
            progress,
            interrupts,
            resume=resume,
            tensorboard=tensorboard,
            together=together,
        )
    if together.number > 1:
        ranks.leave()
    if not together.leads:
        return finished
    if not finished:
        console.print(f"Saved. Go on with --resume: {folder}", soft_wrap=True)
        return False
    _show(comparison.collect([folder]), console)
    console.print(f"Written: {folder}", soft_wrap=True)
    return True


def compare(
    configs: Sequence[Config],
    out: Path,
    console: Console,
    *,
    data: Path | None = None,
    tensorboard: bool = False,
) -> bool:
    """Make all runs that are not finished, then tables, figures and the page.

    Returns:
        Whether they all came to their ends.
    """

    def folder_of(config: Config) -> Path:
        return Spec.parse(config.optimizer).folder_in(out, config.seed)

    configs = [_as_before(config, folder_of(config), resume=True).complete() for config in configs]
    configs = list(dict.fromkeys(configs))
    samples = tasks.get(configs[0].task, configs[0].preset).load(data)
    _check(configs, samples)
    folders = [folder_of(config) for config in configs]
    finished = True
    with Interrupts() as interrupts, _progress(console) as progress:
        for config, folder in zip(configs, folders, strict=True):
            finished = _run(
                config, folder, samples, progress, interrupts, resume=True, tensorboard=tensorboard
            )
            if not finished:
                break
    started = [folder for folder in folders if (folder / "config.json").exists()]
    if not finished:
        console.print("Saved. The same command goes on; this is what there is so far.")
    compared = comparison.collect(started)
    _show(compared, console)
    draw(compared, out, console)
    return finished


def redraw(paths: Sequence[Path], out: Path | None, console: Console) -> None:
    """Tables, figures and pages of runs, or of comparisons that were written before."""
    written = [path for path in paths if path.is_file()]
    folders = [path for path in paths if not path.is_file()]
    for path in folders:
        if not path.is_dir():
            raise FileNotFoundError(f"There is no {path}. Name folders of runs, or files comparison.json.")
    compared = [Comparison.read(path) for path in written]
    compared += comparison.collect(folders) if folders else []
    compared = [each for each in compared if each.entries]
    if not compared:
        raise ValueError("These runs have no records yet.")
    _show(compared, console)
    draw(compared, out or (paths[0].parent if paths[0].is_file() else paths[0]), console)


def draw(compared: Sequence[Comparison], out: Path, console: Console) -> None:
    """Write ``comparison.json``, the figures and ``index.html``; several comparisons get a folder each."""
    for each in compared:
        if not each.entries:
            continue
        folder = out if len(compared) == 1 else out / f"{each.task}-{each.preset}"
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / "comparison.json", each.to_json())
        for axis, words in comparison.AXES.items():
            figure = figures.draw(each, axis)
            name = words.split(" ")[0]
            files.write(folder / f"{name}.png", figures.png(figure))
            files.write(folder / f"{name}.svg", figures.svg(figure))
        files.write(folder / "index.html", page.page(each))
        console.print(f"Written: {folder / 'index.html'} and the figures beside it", soft_wrap=True)


def fetch_data(names: Sequence[str], out: Path | None, console: Console) -> None:
    """Fetch data and show the progress."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn(), console=console
    ) as progress:
        for name in names:
            task: TaskID | None = None
            last = ""

            def watch(what: str, done: int, total: int | None) -> None:
                nonlocal task, last
                if task is None or what != last:
                    if task is not None:
                        progress.remove_task(task)
                    task, last = progress.add_task(what, total=total), what
                progress.update(task, completed=done, total=total)

            found = fetch.fetch(name, out, watch=watch)
            if task is not None:
                progress.remove_task(task)
            console.print(f"{name}: {found}, verified", soft_wrap=True)


def run_folder(config: Config) -> Path:
    """Where a run goes if nothing else is said."""
    spec = Spec.parse(config.optimizer)
    return spec.folder_in(Path("runs") / f"{config.task}-{config.preset}", config.seed)


_STOPPING = b"\nStopping after this update, and saving. Press Ctrl-C again to end at once.\n"


class Interrupts:
    """Makes Ctrl-C and SIGTERM end a run after its update; a second Ctrl-C ends it at once."""

    def __init__(self) -> None:
        self.is_set = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def __call__(self) -> bool:
        return self.is_set

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
        # Not by the console, which may be in the midst of a line.
        with contextlib.suppress(OSError):
            os.write(2, _STOPPING)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _join(config: Config) -> ranks.Ranks:
    """Meet the other processes, if there are any."""
    task = tasks.get(config.task, config.preset)
    partition = Spec.parse(config.optimizer).partition(task)

    def groups() -> list[Group] | None:
        with torch.random.fork_rng():
            return None if partition is None else partition(task.make_model())

    return ranks.join(config.mesh, groups)


def _as_before(config: Config, folder: Path, *, resume: bool) -> Config:
    """A resumed run has the threads that it had, as they change the last bits."""
    if resume and not config.threads and (folder / "config.json").exists():
        return replace(config, threads=runs.read_config(folder).get("threads", 0))
    return config


def _check(configs: Sequence[Config], samples: tuple[tasks.Samples, tasks.Samples]) -> None:
    """Fail before the first run and not after hours."""
    with torch.random.fork_rng():
        for text in dict.fromkeys(config.optimizer for config in configs):
            task, spec = tasks.get(configs[0].task, configs[0].preset), Spec.parse(text)
            model = task.make_model()
            runs.updates_per_epoch(spec, task, samples[0])
            unit = costs.unit(task, model, samples[0])
            spec.start(task, model, unit, population=len(samples[0]))


def _run(
    config: Config,
    folder: Path,
    samples: tuple[tasks.Samples, tasks.Samples],
    progress: Progress,
    interrupts: Interrupts,
    *,
    resume: bool,
    tensorboard: bool,
    together: ranks.Ranks = ranks.ALONE,
) -> bool:
    label = f"{Spec.parse(config.optimizer).label}, seed {config.seed}"
    with (
        Run(config, folder, samples, resume=resume, ranks=together) as run,
        _logger(run, tensorboard and together.leads) as log,
    ):
        if run.notice:
            progress.console.print(run.notice, soft_wrap=True, markup=False)
        bar = progress.add_task(label, total=1.0, status="")
        progress.update(bar, completed=min(run.spent, 1.0))

        def watch(record: Record) -> None:
            log(record)
            progress.update(bar, completed=min(run.spent, 1.0), status=_status(record))

        ended = runs.train(run, watch=watch, interrupted=interrupts)
        if ended is not None:
            progress.update(bar, completed=1.0, status=f"{ended} after {run.progress.update} updates")
    return ended is not None


@contextlib.contextmanager
def _logger(run: Run, tensorboard: bool) -> Iterator[Callable[[Record], None]]:
    """Where records go besides the file: nowhere, or to TensorBoard."""
    if not tensorboard:
        yield lambda record: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(run.folder / "tensorboard", purge_step=run.progress.update + 1) as writer:

        def log(record: Record) -> None:
            values = {"batch_loss": record.get("loss"), "ge": record["ge"], **record.get("evaluation", {})}
            if "report" in record:
                values["cg"] = sum(record["report"]["cg"])
            for key, value in values.items():
                if value is not None:
                    writer.add_scalar(key, value, record["update"])

        yield log


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[status]}"),
        console=console,
    )


def _status(record: Record) -> str:
    cg = f", {sum(record['report']['cg'])} CG iterations" if "report" in record else ""
    return f"update {record['update']}, {record['ge']:.0f} GE, loss {page.number(record['loss'])}{cg}"


def _show(compared: Sequence[Comparison], console: Console) -> None:
    for each in compared:
        heads = page.headings(each)
        rows = [page.cells(line) for line in comparison.summaries(each)]
        first = len(heads) - 1 - len(each.settings["targets"])
        ends = [len(heads) - 1] if any(row[-1] != "finished" for row in rows) else []
        totals, reached = [*range(first), *ends], [0, *range(first, len(heads) - 1)]
        title = f"{each.settings['title']}, {each.preset}"
        _table(heads, rows, totals, console, title=title)
        caption = (
            "Medians over the seeds. Under a target: updates / GE / seconds until the test first was that "
            f"good, – where it was not. One GE is a gradient on {each.settings['large_batch']:,} samples; "
            "seconds are those of updates alone."
        )
        _table(heads, rows, reached, console, caption=caption)


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int], console: Console, **words: str
) -> None:
    """Some of the columns."""
    tables.show(console, [heads[i] for i in kept], [[row[i] for i in kept] for row in rows], **words)
