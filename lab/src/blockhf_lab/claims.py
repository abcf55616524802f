"""The paper's seven claims, judged from the records of its experiments by fixed rules.

A claim is a list of checks, each a row of numbers with a verdict of its own. It holds where all of its checks
do, holds partly where at least half of them hold or hold partly, and else does not hold here. All values are
medians over the seeds at updates that were evaluated; where runs end at different updates, they are compared
at the last one that they have in common.

There may be two sets of runs, short and long. A check is judged by the long ones where its lines have enough
seeds in common there, and else by the short ones.
"""

from __future__ import annotations

import enum
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blockhf_lab import comparison, files, tasks
from blockhf_lab.comparison import Comparison, Entry
from blockhf_lab.optimizers import Spec
from blockhf_lab.page import number

LEAST_SEEDS = 2
"""How many seeds the lines of a check must have in common in the long runs to be judged by them."""

FAR_FEWER, FEWER = 10.0, 3.0
"""From how many times fewer updates claims 1 and 3 hold, and hold partly."""

WHOLE_RUN, MOST_OF_IT = 0.95, 0.5
"""Claim 2: at which share of the common updates block HF is better where it holds, and holds partly."""

CLEARLY = {"loss": 0.01, "accuracy": 0.005}
"""Claim 4: by how much less block HF must lose; relative for losses, absolute for accuracies."""

COMPARABLE, NEARLY = 0.01, 0.03
"""Claim 5: how far below Adam's a test accuracy may be where it holds, and holds partly."""

MARGIN, MOST_ADAMS = 0.05, 10.0
"""Claim 6: how far over the paper's ratio ours may be, and how many updates of Adam an update may cost."""

OF_THE_LIMIT, FASTER = 0.9, 1.2
"""Claim 7: which part of the possible speed-up is enough, and from which speed-up it holds partly."""

PAPER_SECONDS: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "autoencoder": {3000: (22.8, 25.5), 1200: (12.8, 14.4), 600: (9.9, 10.7)},
    "residual": {512: (556, 631), 256: (305, 356), 128: (164, 195)},
}
"""The paper's seconds of an epoch of HF and of block HF, by curvature batch."""


class Verdict(enum.IntEnum):
    """How a claim or a check came out."""

    UNKNOWN = 0
    FAILS = 1
    PARTLY = 2
    HOLDS = 3

    def __str__(self) -> str:
        return ("not measured", "does not hold here", "holds partly", "holds")[self]


@dataclass(frozen=True)
class Check:
    """A row of a claim's table and what it says; with the runs that it was judged by, if it is about runs."""

    cells: Sequence[str]
    verdict: Verdict
    runs: Runs | None = None


@dataclass(frozen=True)
class Finding:
    """What the records say to a claim.

    Attributes:
        number: Of the claim.
        claim: In a few words.
        rule: When a check holds, and when partly.
        heads: Of the table, but for the verdicts.
        checks: Its rows; none where nothing was measured.
        takes_best: Whether one check that holds is enough, as for "up to".
    """

    number: int
    claim: str
    rule: str
    heads: Sequence[str]
    checks: Sequence[Check]
    takes_best: bool = False

    @property
    def verdict(self) -> Verdict:
        """All checks together. What was not measured does not count, but then the claim cannot hold whole."""
        found = [check.verdict for check in self.checks]
        known = [verdict for verdict in found if verdict is not Verdict.UNKNOWN]
        if self.takes_best or not known:
            return max(found, default=Verdict.UNKNOWN)
        if all(verdict is Verdict.HOLDS for verdict in found):
            return Verdict.HOLDS
        some = sum(verdict >= Verdict.PARTLY for verdict in known)
        return Verdict.PARTLY if 2 * some >= len(known) else Verdict.FAILS

    @property
    def count(self) -> str:
        """How many checks came out how."""
        found = [str(check.verdict) for check in self.checks]
        return ", ".join(
            f"{found.count(words)} × {words}" for words in map(str, reversed(Verdict)) if words in found
        )

    @property
    def judged_by(self) -> str:
        """How many checks were judged by which runs; empty where none is about runs."""
        found = [check.runs.name for check in self.checks if check.runs is not None]
        return ", ".join(f"{found.count(name)} {name}" for name in ("long", "short") if name in found)


@dataclass(frozen=True)
class Records:
    """What there is to judge from; whatever is missing was not measured.

    Attributes:
        comparisons: By task, of runs that came to their end: the short ones.
        step: Of ``blockhf bench step --all``.
        parallel: Seconds of the CG phase on one rank and on two, by partition.
        long: By task, of long runs that came to their end.
    """

    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    step: Mapping[str, Any] | None = None
    parallel: Mapping[str, Any] | None = None
    long: Mapping[str, Comparison] = field(default_factory=dict)

    def any_of(self, task: str) -> Comparison | None:
        """Runs of a task, for its sizes and metrics: the short ones if there are any."""
        return self.comparisons.get(task) or self.long.get(task)

    @classmethod
    def read(cls, folder: Path, long: Path | None = None) -> Records:
        """The records of a folder, and those of long runs in another.

        Raises:
            FileNotFoundError: There are none.
            ValueError: One is something else.
        """
        comparisons = _comparisons(folder)
        step = _read(folder / "step.json", lambda found: found["results"], "Make it with blockhf bench step.")
        parallel = _read(
            folder / "parallel.json",
            lambda found: [
                seconds["one"] / seconds["two"] * seconds["machine"] for seconds in found["blocks"].values()
            ],
            'Write {"blocks": {NAME: {"one": seconds, "two": seconds, "machine": ratio}}}.',
        )
        names = ", ".join(f"{name}/comparison.json" for name in tasks.TASKS)
        if not comparisons and step is None and parallel is None:
            raise FileNotFoundError(
                f"{folder} has no records of finished runs. It should hold {names}, step.json or "
                "parallel.json; blockhf compare and blockhf bench step make them."
            )
        longer = _comparisons(long) if long else {}
        if long and not longer:
            raise FileNotFoundError(
                f"{long} has no records of finished runs. It should hold {names}; blockhf compare makes them."
            )
        return cls(comparisons, step, parallel, longer)


def _comparisons(folder: Path) -> dict[str, Comparison]:
    """The comparisons of a folder by task, without runs that have not come to their end."""
    found = {}
    for name in tasks.TASKS:
        if (path := folder / name / "comparison.json").exists():
            compared = Comparison.read(path)
            ended = [entry for entry in compared.entries if entry.status != "unfinished"]
            if ended:
                found[name] = replace(compared, entries=ended)
    return found


def _read(path: Path, check: Callable[[Any], Any], remedy: str) -> Any:
    """The content of a JSON file that has what ``check`` takes from it; ``None`` if there is no such file."""
    if not path.exists():
        return None
    found = files.read_json(path)
    try:
        check(found)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no such record ({error!r}). {remedy}") from error
    return found


# Curves


@dataclass(frozen=True)
class Metric:
    """What is compared: a key of the records, its words, and which way is better."""

    words: str
    key: str
    is_accuracy: bool

    def better(self, one: float, other: float) -> bool:
        return one > other if self.is_accuracy else one < other

    def best(self, curve: Series) -> float:
        return max(curve.values()) if self.is_accuracy else min(curve.values())

    def worse(self, one: float, other: float) -> float:
        return other if self.better(one, other) else one


Line = tuple[Spec, list[Entry]]
"""An optimizer and its runs over the seeds."""

Series = Mapping[int, float]
"""Medians over the seeds, by update."""


def metrics(compared: Comparison) -> tuple[Metric, Metric]:
    """The train and the test metric of a task."""
    is_accuracy = compared.settings["metric"] == "accuracy"
    words = ("train loss", "test accuracy") if is_accuracy else ("train error", "test error")
    return Metric(words[0], "train_loss", False), Metric(words[1], compared.test_key, is_accuracy)


def lines(compared: Comparison, optimizer: str) -> dict[int, Line]:
    """The paper's runs of an optimizer by curvature batch, or batch; others are passed over."""
    task = tasks.get(compared.task, compared.preset)
    found = {}
    for spec, entries in compared.methods():
        for text in task.figure():
            if spec.name == optimizer and str(spec) == str(Spec.parse(text)):
                found[int(spec.options["batch" if optimizer == "adam" else "curvature"])] = spec, entries
    return found


def series(line: Line, metric: Metric) -> Series:
    """The median curve along those updates, the start left out, that all seeds have.

    At an update that some seeds lack, a median over the others would be another seed's and no change.
    """
    _, entries = line
    return {
        int(update): statistics.median(value for _, value in own)
        for update, own in comparison.by_update(entries, metric.key).items()
        if update > 0 and len(own) == len(entries)
    }


@dataclass(frozen=True)
class Runs:
    """What a check is judged by.

    Attributes:
        name: ``"long"`` or ``"short"``.
        task: The task.
        lines: As they were wanted; all have the same seeds, so that seeds are not taken for optimizers.
    """

    name: str
    task: str
    lines: Sequence[Line]

    @property
    def seeds(self) -> list[int]:
        return sorted({entry.seed for _, entries in self.lines for entry in entries})

    @property
    def words(self) -> str:
        """Which runs, of how many seeds, and how many updates all of them have."""
        updates = min(entry.points[-1]["update"] or 0 for _, entries in self.lines for entry in entries)
        seeds = len(self.seeds)
        return f"{self.name}: {seeds} seed{'s' if seeds > 1 else ''}, {updates:,.0f} updates"


def choose(records: Records, task: str, *wanted: tuple[str, int]) -> Runs | None:
    """The runs of the wanted lines, named by optimizer and size; none where some were not measured.

    They are the long ones where these have ``LEAST_SEEDS`` seeds in common, and else the short ones.
    """
    for name, found, least in (("long", records.long, LEAST_SEEDS), ("short", records.comparisons, 1)):
        if (compared := found.get(task)) is None:
            continue
        known = [lines(compared, optimizer).get(size) for optimizer, size in wanted]
        own = [line for line in known if line is not None]
        shared = set.intersection(*({entry.seed for entry in entries} for _, entries in own)) if own else ()
        if len(own) == len(wanted) and len(shared) >= least:
            alike = [(spec, [each for each in entries if each.seed in shared]) for spec, entries in own]
            return Runs(name, task, alike)
    return None


def common(*curves: Series) -> list[int]:
    """The evaluated updates that all have, in order."""
    return sorted(set.intersection(*map(set, curves)))


def reaches(curve: Series, metric: Metric, level: float) -> int | None:
    """The first update as good as a level."""
    return next((update for update in sorted(curve) if not metric.better(level, curve[update])), None)


def graded(value: float, holds: float, partly: float) -> Verdict:
    """By how large a value is."""
    return Verdict.HOLDS if value >= holds else Verdict.PARTLY if value >= partly else Verdict.FAILS


def missing(heads: Sequence[str], *cells: str) -> Check:
    """A row without numbers."""
    return Check([*cells, *["–"] * (len(heads) - len(cells))], Verdict.UNKNOWN)


# The claims


def claim_1(records: Records) -> Finding:
    """Block HF and Adam on the autoencoder, to the error of small-batch Adam."""
    return _beside_adam(
        records,
        "autoencoder",
        1,
        "Block HF reaches small-batch Adam's error with a tenth of the updates (autoencoder)",
        "reaches the best value of small-batch Adam",
        lambda metric, own, adams: not metric.better(adams[min(adams)], own),
    )


def claim_3(records: Records) -> Finding:
    """Block HF and Adam on the LSTM, which block HF should also surpass."""
    return _beside_adam(
        records,
        "lstm",
        3,
        "Block HF needs far fewer updates than Adam and gets further (LSTM)",
        "has a better best value than Adam at every batch",
        lambda metric, own, adams: all(metric.better(own, value) for value in adams.values()),
    )


def _beside_adam(
    records: Records,
    name: str,
    claim: int,
    words: str,
    goal: str,
    is_there: Callable[[Metric, float, Mapping[int, float]], bool],
) -> Finding:
    rule = (
        "The level is the best value of block HF or that of small-batch Adam, whichever is worse; updates "
        f"are those to the level. A check holds where block HF {goal}, and takes at least {FAR_FEWER:g} "
        f"times fewer updates than Adam at any batch; partly where it takes {FEWER:g} times fewer, or gets "
        "there with any fewer."
    )
    if (compared := records.any_of(name)) is None:
        return Finding(claim, words, rule, [], [])
    task = tasks.get(compared.task, compared.preset)
    batches = sorted(task.adam_batches)
    heads = [
        *("curvature batch", "metric", "level", "updates of block HF"),
        *(f"of Adam, batch {batch:,}" for batch in batches),
        *("least ratio", "best of block HF"),
        *(f"best of Adam, batch {batch:,}" for batch in batches),
        "runs",
    ]
    checks = []
    for size, metric in itertools.product(task.curvature_batches, metrics(compared)):
        runs = choose(records, name, ("paper", size), *(("adam", batch) for batch in batches))
        own, *rest = (series(line, metric) for line in runs.lines) if runs else [{}]
        if runs is None or not own or not all(rest):
            checks.append(missing(heads, f"{size:,}", metric.words))
            continue
        others = dict(zip(batches, rest, strict=True))
        best, bests = metric.best(own), {batch: metric.best(other) for batch, other in others.items()}
        level = metric.worse(best, bests[batches[0]])
        update = reaches(own, metric, level) or max(own)
        theirs = {batch: reaches(other, metric, level) for batch, other in others.items()}
        # One that does not get there takes longer than its run; the ratio is at least that.
        ratio, is_bound = min(
            ((theirs[batch] or max(other)) / update, theirs[batch] is None) for batch, other in others.items()
        )
        there = is_there(metric, best, bests)
        if there and ratio >= FAR_FEWER:
            verdict = Verdict.HOLDS
        else:
            verdict = Verdict.PARTLY if ratio >= FEWER or (there and ratio > 1) else Verdict.FAILS
        shown = [f"> {max(others[batch]):,}" if at is None else f"{at:,}" for batch, at in theirs.items()]
        cells = [
            f"{size:,}",
            metric.words,
            number(level),
            f"{update:,}",
            *shown,
            f"{'≥ ' * is_bound}{ratio:.1f}",
        ]
        cells += [*map(number, (best, *bests.values())), runs.words]
        checks.append(Check(cells, verdict, runs))
    return Finding(claim, words, rule, heads, checks)


def claim_2(records: Records) -> Finding:
    """Block HF and HF on the autoencoder, update by update."""
    words = "Block HF is better than HF over the whole run, train and test (autoencoder)"
    rule = (
        f"A check holds where block HF is better at {WHOLE_RUN:.0%} or more of the evaluated updates that "
        f"both have, partly from {MOST_OF_IT:.0%}."
    )
    heads = [
        *("curvature batch", "metric", "common evaluations", "block HF better at"),
        *("last common update", "block HF there", "HF there", "runs"),
    ]
    compared = records.any_of("autoencoder")
    checks: list[Check] = []
    if compared is None:
        return Finding(2, words, rule, heads, checks)
    sizes = tasks.get(compared.task, compared.preset).curvature_batches
    for size, metric in itertools.product(sizes, metrics(compared)):
        runs = choose(records, "autoencoder", ("paper", size), ("hf", size))
        ours, theirs = (series(line, metric) for line in runs.lines) if runs else ({}, {})
        updates = common(ours, theirs)
        if runs is None or not updates:
            checks.append(missing(heads, f"{size:,}", metric.words))
            continue
        share = statistics.mean(metric.better(ours[update], theirs[update]) for update in updates)
        last = updates[-1]
        cells = [f"{size:,}", metric.words, f"{len(updates)}", f"{share:.0%}", f"{last:,}"]
        verdict = graded(share, WHOLE_RUN, MOST_OF_IT)
        cells += [number(ours[last]), number(theirs[last]), runs.words]
        checks.append(Check(cells, verdict, runs))
    return Finding(2, words, rule, heads, checks)


def claim_4(records: Records) -> Finding:
    """What HF and block HF lose from each larger curvature batch to the smallest."""
    words = "Block HF loses less than HF as the curvature batch shrinks (LSTM, CNN)"
    rule = (
        "At the last update that the four runs have in common. A check holds where block HF loses less than "
        f"HF by more than {CLEARLY['loss']:.0%} of the loss, or {100 * CLEARLY['accuracy']:g} points of "
        "accuracy."
    )
    heads = ["task, curvature batches", "metric", "update", "block HF", "it loses", "HF", "it loses", "runs"]
    checks = []
    for task in ("lstm", "cnn"):
        compared = records.any_of(task)
        if compared is None:
            checks.append(missing(heads, task))
            continue
        *larger, smallest = sorted(tasks.get(compared.task, compared.preset).curvature_batches, reverse=True)
        for size, metric in itertools.product(larger, metrics(compared)):
            name = f"{task}, {size:,} to {smallest:,}"
            four = itertools.product(("paper", "hf"), (size, smallest))
            runs = choose(records, task, *four)
            curves = [series(line, metric) for line in runs.lines] if runs else [{}]
            updates = common(*curves)
            if runs is None or not updates:
                checks.append(missing(heads, name, metric.words))
                continue
            at = updates[-1]
            cells, lost = [name, metric.words, f"{at:,}"], []
            for large, small in (curves[:2], curves[2:]):
                cells.append(f"{number(large[at])} to {number(small[at])}")
                if metric.is_accuracy:
                    lost.append(large[at] - small[at])
                    cells.append(f"{100 * lost[-1]:+.2f} points")
                else:
                    lost.append(small[at] / large[at] - 1)
                    cells.append(f"{lost[-1]:+.2%}")
            enough = CLEARLY["accuracy" if metric.is_accuracy else "loss"]
            verdict = Verdict.HOLDS if lost[1] - lost[0] > enough else Verdict.FAILS
            checks.append(Check([*cells, runs.words], verdict, runs))
    return Finding(4, words, rule, heads, checks)


def claim_5(records: Records) -> Finding:
    """Block HF on the CNN beside small-batch Adam and HF."""
    words = "Block HF tests like small-batch Adam, and trains better and more steadily than HF (CNN)"
    rule = (
        f"Beside Adam a check holds where the best accuracy of block HF is at most {100 * COMPARABLE:g} "
        f"points below Adam's, partly at most {100 * NEARLY:g}. Beside HF it holds where block HF is better "
        "at the last update that both have. Steadiness is by how much the train loss rose between "
        "evaluations, all rises added up; partly where there is no difference."
    )
    heads = ["curvature batch", "what, beside", "update", "block HF", "the other", "runs"]
    compared = records.any_of("cnn")
    checks: list[Check] = []
    if compared is None:
        return Finding(5, words, rule, heads, checks)
    task = tasks.get(compared.task, compared.preset)
    train, test = metrics(compared)
    small = min(task.adam_batches)
    for size in task.curvature_batches:
        what = f"best {test.words}, Adam with batch {small:,}"
        runs = choose(records, "cnn", ("paper", size), ("adam", small))
        own, other = (series(line, test) for line in runs.lines) if runs else ({}, {})
        if runs and own and other:
            best, goal = test.best(own), test.best(other)
            verdict = graded(best, goal - COMPARABLE, goal - NEARLY)
            cells = [f"{size:,}", what, "any", number(best), number(goal), runs.words]
            checks.append(Check(cells, verdict, runs))
        else:
            checks.append(missing(heads, f"{size:,}", what))
        checks += _beside_hf(records, size, (train, test), heads)
    return Finding(5, words, rule, heads, checks)


def _beside_hf(
    records: Records, size: int, both: tuple[Metric, Metric], heads: Sequence[str]
) -> Sequence[Check]:
    """Claim 5's checks of block HF and HF at one curvature batch."""
    runs = choose(records, "cnn", ("paper", size), ("hf", size))
    curves = {metric: [series(line, metric) for line in runs.lines] for metric in both} if runs else {}
    updates = common(*itertools.chain.from_iterable(curves.values())) if curves else []
    if runs is None or not updates:
        return [missing(heads, f"{size:,}", "HF")]
    at = updates[-1]
    checks = []
    for metric, (block, alone) in curves.items():
        ours, theirs = block[at], alone[at]
        cells = [f"{size:,}", f"{metric.words}, HF", f"{at:,}", number(ours), number(theirs), runs.words]
        verdict = Verdict.HOLDS if metric.better(ours, theirs) else Verdict.FAILS
        checks.append(Check(cells, verdict, runs))
    ours, theirs = (_rises(entries, at) for _, entries in runs.lines)
    cells = [f"{size:,}", f"rises of the {both[0].words}, HF", f"to {at:,}", number(ours), number(theirs)]
    verdict = Verdict.PARTLY if ours == theirs else Verdict.HOLDS if ours < theirs else Verdict.FAILS
    return [*checks, Check([*cells, runs.words], verdict, runs)]


def _rises(entries: Sequence[Entry], until: int) -> float:
    """By how much the train loss rose in all from one evaluation to the next: the median over the seeds."""
    found = []
    for entry in entries:
        points = [point for point in entry.points if (point["update"] or 0) <= until]
        losses = [loss for point in points if (loss := point["train_loss"]) is not None]
        found.append(sum(max(0.0, after - before) for before, after in itertools.pairwise(losses)))
    return statistics.median(found)


def claim_6(records: Records) -> Finding:
    """What updates of HF and block HF take, beside each other and Adam."""
    words = "Block HF costs little more time than HF, and either a few updates of Adam (autoencoder, CNN)"
    rule = (
        "An epoch has as many updates of the one as of the other, so the ratio of updates is that of epochs. "
        f"A check holds where that ratio is at most {MARGIN:g} over the paper's, and an update of either "
        f"costs at most {MOST_ADAMS:g} of Adam's on the same batch; partly where one of the two is so."
    )
    heads = [
        *("network, curvature batch", "update of HF", "of block HF", "ratio", "the paper's"),
        *("HF in updates of Adam", "block HF in updates of Adam"),
    ]
    checks: list[Check] = []
    if records.step is None:
        return Finding(6, words, rule, heads, checks)
    for network, published in PAPER_SECONDS.items():
        rows = [row for row in records.step["results"] if row["network"] == network]
        seconds = {row["optimizer"]: row["seconds"] for row in rows}
        adam = next((value for name, value in seconds.items() if name.startswith("Adam")), None)
        for size, (paper_hf, paper_block) in published.items():
            alone, block = (seconds.get(f"{kind}, curvature {size}") for kind in ("HF", "block HF"))
            if adam is None or alone is None or block is None:
                checks.append(missing(heads, f"{network}, {size:,}"))
                continue
            ratio, theirs = block / alone, paper_block / paper_hf
            good = (ratio <= theirs + MARGIN) + (max(alone, block) <= MOST_ADAMS * adam)
            cells = [f"{network}, {size:,}", f"{alone:.2f} s", f"{block:.2f} s"]
            cells += [f"{value:.2f}" for value in (ratio, theirs)]
            cells += [f"{value / adam:.1f}" for value in (alone, block)]
            checks.append(Check(cells, (Verdict.FAILS, Verdict.PARTLY, Verdict.HOLDS)[good]))
    return Finding(6, words, rule, heads, checks)


def claim_7(records: Records) -> Finding:
    """The speed-up by solving two blocks on two ranks."""
    rule = (
        "The CG phase of two blocks on one rank and on two; the machine's limit is the speed-up of work that "
        f"shares nothing. A check holds from {OF_THE_LIMIT:g} of that limit, or of two if that is less; "
        f"partly from a speed-up of {FASTER:g}. The claim says up to, so the best check counts."
    )
    heads = ["blocks", "one rank", "two ranks", "speed-up", "the machine's limit"]
    checks = []
    for name, seconds in (records.parallel or {}).get("blocks", {}).items():
        faster, limit = seconds["one"] / seconds["two"], seconds["machine"]
        cells = [name, f"{seconds['one']:.2f} s", f"{seconds['two']:.2f} s", f"{faster:.2f}", f"{limit:.2f}"]
        checks.append(Check(cells, graded(faster, OF_THE_LIMIT * min(2.0, limit), FASTER)))
    words = "Blocks are independent: up to B times faster on B machines"
    return Finding(7, words, rule, heads, checks, takes_best=True)


CLAIMS = (claim_1, claim_2, claim_3, claim_4, claim_5, claim_6, claim_7)


def findings(records: Records) -> list[Finding]:
    """All seven, in order."""
    return [claim(records) for claim in CLAIMS]
