"""``blockhf claims``: the verdicts, and the generated parts and figures of ``docs/claims.md``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from blockhf_lab import claims, comparison, figures, files, tables, tasks
from blockhf_lab.claims import Finding, Records, Verdict
from blockhf_lab.comparison import Comparison
from blockhf_lab.optimizers import Spec
from blockhf_lab.page import number
from blockhf_lab.runs import Budget
from blockhf_lab.tables import markdown

FIGURES: Mapping[int, Sequence[tuple[str, str]]] = {
    1: (("autoencoder", "Adam"),),
    2: (("autoencoder", "paper (HF)"),),
    3: (("lstm", "Adam"),),
    4: (("lstm", "paper (HF)"), ("cnn", "paper (HF)")),
    5: (("cnn", "Adam"), ("cnn", "paper (HF)")),
}
"""What a claim's figure shows along updates: task, and what block HF is beside."""


def run(folder: Path, long: Path | None, out: Path | None, console: Console) -> None:
    """Show each claim with its numbers and verdict; make the generated parts and figures of a page anew."""
    records = Records.read(folder, long)
    found = claims.findings(records)
    for each in found:
        console.print(f"{each.number}. {each.claim}: {each.verdict}", style="bold", highlight=False)
        if each.verdict is not Verdict.UNKNOWN:
            tables.show(console, [*each.heads, "check"], _rows(each))
            console.print(f"Checks: {each.count}. {each.rule}\n", highlight=False)
    if out is None:
        return
    text = fill(out.read_text(encoding="utf-8"), parts(records))
    images = out.parent / "images"
    images.mkdir(exist_ok=True)
    for claim, rows in panels(records).items():
        files.write(images / f"claim-{claim}.png", figures.png(figures.grid(rows)))
    for task, compared in records.long.items():
        files.write(images / f"long-{task}.png", figures.png(draw_long(compared)))
    files.write(out, text.encode())
    console.print(f"Written: {out} and its figures in {images}", soft_wrap=True)


# Figures

Row = list[tuple[figures.Panel, dict[str, tuple[str, figures.Dashes]]]]


def panels(records: Records) -> dict[int, list[Row]]:
    """The panels by claim, train beside test; claims without records for them have none.

    Long runs come first wherever there are any. Short ones follow if a check is judged by them.
    """
    found: dict[int, list[Row]] = {}
    for finding in claims.findings(records):
        judging = [check.runs for check in finding.checks if check.runs is not None]
        used = {(runs.name, runs.task, spec.kind) for runs in judging for spec, _ in runs.lines}
        for task, other in FIGURES.get(finding.number, ()):
            for name, comparisons in (("long", records.long), ("short", records.comparisons)):
                compared = comparisons.get(task)
                if compared is None or (name == "short" and (name, task, other) not in used):
                    continue
                looks = figures.looks(compared)
                for row in _sides(compared):
                    kinds = row[0].title.split(" and ")
                    if "paper" in kinds and other in kinds:
                        own = [replace(panel, title=f"{task}, {name}: {panel.title}") for panel in row]
                        found.setdefault(finding.number, []).append([(panel, looks) for panel in own])
    return found


def draw_long(compared: Comparison) -> Figure:
    """The paper's four panels: block HF beside Adam above, beside HF below, train on the left."""
    looks = figures.looks(compared)
    rows = [[(panel, looks) for panel in row] for row in _sides(compared)]
    return figures.grid(rows, compared.settings["title"])


def _sides(compared: Comparison) -> list[tuple[figures.Panel, ...]]:
    """The panels along updates, train and test of one side after the other."""
    return list(zip(*figures.panels(compared, "update"), strict=True))


# The page


def parts(records: Records) -> dict[str, str]:
    """What the page holds between its markers, by the markers' names."""
    found = claims.findings(records)
    verdicts = [
        [str(each.number), each.claim, f"**{each.verdict}**", each.judged_by or "–"] for each in found
    ]
    drawn = panels(records)
    made = {
        "verdicts": markdown(["", "claim", "verdict", "checks by runs"], verdicts),
        "settings": _settings(records),
        "runs": "\n\n".join(map(_runs, records.comparisons.values())) or "Not measured.",
        "long": "\n\n".join(map(_long, records.long.values())) or "Not measured.",
    }
    for each in found:
        pieces = [f"**Verdict: {each.verdict}.**"]
        if each.number in drawn:
            pieces.append(f"![Claim {each.number}: {each.claim}](images/claim-{each.number}.png)")
        if each.verdict is not Verdict.UNKNOWN:
            pieces[0] += f" Checks: {each.count}."
            pieces.append(markdown([*each.heads, "check"], _rows(each)))
        made[f"claim {each.number}"] = "\n\n".join([*pieces, f"*The rule.* {each.rule}"])
    return made


def fill(text: str, made: Mapping[str, str]) -> str:
    r"""The page with its generated parts made anew.

    >>> fill("<!-- a -->old<!-- end --> b", {"a": "new"})
    '<!-- a -->\n\nnew\n\n<!-- end --> b'
    """
    for name, content in made.items():
        found = re.findall(rf"<!-- {re.escape(name)} -->.*?<!-- end -->", text, re.DOTALL)
        if len(found) != 1:
            raise ValueError(
                f"The page has {len(found)} parts <!-- {name} --> … <!-- end -->, but must have one."
            )
        text = text.replace(found[0], f"<!-- {name} -->\n\n{content}\n\n<!-- end -->")
    return text


def _rows(found: Finding) -> list[list[str]]:
    return [[*check.cells, str(check.verdict)] for check in found.checks]


def _settings(records: Records) -> str:
    """How the runs differ from the paper's."""
    rows = []
    for name in tasks.TASKS:
        own = [found[name] for found in (records.long, records.comparisons) if name in found]
        if own:
            paper = tasks.get(name, "paper")
            budget = Budget.parse(paper.budget).words
            rows.append([name, "paper", paper.title, budget, f"{paper.num_evaluated:,}", ""])
        for compared in own:
            budgets = [Budget.parse(text) for text in set(compared.budgets)]
            budgets.sort(key=lambda each: (each.kind, each.amount))
            words = ", ".join(each.words for each in budgets)
            evaluated = f"{compared.settings['num_evaluated']:,}"
            seeds = ", ".join(map(str, sorted({entry.seed for entry in compared.entries})))
            title = compared.settings["title"]
            rows.append(["", f"here, `{compared.preset}`", title, words, evaluated, seeds])
    heads = ["task", "", "network and data", "budget of a run", "training samples evaluated", "seeds"]
    return markdown(heads, rows) if rows else "Not measured."


def _runs(compared: Comparison) -> str:
    """How far each optimizer came."""
    train, test = claims.metrics(compared)
    heads = ["optimizer", "seeds", "updates", "GE", f"{train.words} at the end", f"best {test.words}", "end"]
    rows = []
    for line in comparison.summaries(compared):
        numbers = (line.total.update, line.total.ge, line.train, line.best)
        rows.append([line.spec.label, str(line.seeds), *map(number, numbers), ", ".join(line.statuses)])
    return f"{compared.settings['title']}:\n\n{markdown(heads, rows)}"


def _long(compared: Comparison) -> str:
    """The long runs of a task: their figure, how far they came, and which of the paper's are missing."""
    title = compared.settings["title"]
    figure = f"![{title}: long runs](images/long-{compared.task}.png)"
    return "\n\n".join([_runs(compared), figure, _missing(compared)])


def _missing(compared: Comparison) -> str:
    """The lines of the paper's figure by how many seeds they lack."""
    seeds = {str(spec): len({entry.seed for entry in entries}) for spec, entries in compared.methods()}
    found: dict[int, list[str]] = {}
    for text in tasks.get(compared.task, compared.preset).figure():
        spec = Spec.parse(text)
        if spec.name != "blockhf":
            found.setdefault(min(seeds.get(str(spec), 0), 3), []).append(spec.label)
    words = ("Not run", "With one seed, so in no verdict", "With two seeds", "With three seeds or more")
    return "\n".join(f"- {words[number]}: {'; '.join(found[number])}." for number in sorted(found))
