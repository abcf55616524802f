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
from blockhf_lab.page import number
from blockhf_lab.runs import Budget

FIGURES: Mapping[int, Sequence[tuple[str, str]]] = {
    1: (("autoencoder", "Adam"),),
    2: (("autoencoder", "paper (HF)"),),
    3: (("lstm", "Adam"),),
    4: (("lstm", "paper (HF)"), ("cnn", "paper (HF)")),
    5: (("cnn", "Adam"), ("cnn", "paper (HF)")),
}
"""What a claim's figure shows along updates: task, and what block HF is beside."""


def run(folder: Path, out: Path | None, console: Console) -> None:
    """Show each claim with its numbers and verdict; make the generated parts and figures of a page anew."""
    records = Records.read(folder)
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
    for claim, columns in panels(records).items():
        files.write(images / f"claim-{claim}.png", figures.png(draw(columns)))
    files.write(out, text.encode())
    console.print(f"Written: {out} and its figures in {images}", soft_wrap=True)


# Figures

Column = list[tuple[figures.Panel, dict[str, tuple[str, figures.Dashes]]]]


def panels(records: Records) -> dict[int, list[Column]]:
    """The panels by claim, train above test; claims without records for them have none."""
    found: dict[int, list[Column]] = {}
    for claim, sides in FIGURES.items():
        for task, other in sides:
            if (compared := records.comparisons.get(task)) is None:
                continue
            looks = figures.looks(compared)
            for column in zip(*figures.panels(compared, "update"), strict=True):
                kinds = column[0].title.split(" and ")
                if "paper" in kinds and other in kinds:
                    own = [replace(panel, title=f"{task}: {panel.title}") for panel in column]
                    found.setdefault(claim, []).append([(panel, looks) for panel in own])
    return found


def draw(columns: Sequence[Column]) -> Figure:
    """Two panels side by side, or more of them in columns."""
    return figures.grid(columns if len(columns) == 1 else list(zip(*columns, strict=True)))


# The page


def parts(records: Records) -> dict[str, str]:
    """What the page holds between its markers, by the markers' names."""
    found = claims.findings(records)
    verdicts = [[str(each.number), each.claim, f"**{each.verdict}**"] for each in found]
    drawn = panels(records)
    made = {
        "verdicts": _table(["", "claim", "verdict"], verdicts),
        "settings": _settings(records),
        "runs": _runs(records),
    }
    for each in found:
        pieces = [f"**Verdict: {each.verdict}.**"]
        if each.number in drawn:
            pieces.append(f"![Claim {each.number}: {each.claim}](images/claim-{each.number}.png)")
        if each.verdict is not Verdict.UNKNOWN:
            pieces[0] += f" Checks: {each.count}."
            pieces.append(_table([*each.heads, "check"], _rows(each)))
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


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def _settings(records: Records) -> str:
    """How the runs differ from the paper's."""
    rows = []
    for name, compared in records.comparisons.items():
        paper, own = tasks.get(name, "paper"), compared.settings
        seeds = ", ".join(map(str, sorted({entry.seed for entry in compared.entries})))
        evaluated = f"{paper.num_evaluated:,}", f"{own['num_evaluated']:,}"
        rows.append([name, "paper", paper.title, Budget.parse(paper.budget).words, evaluated[0], ""])
        budgets = ", ".join(Budget.parse(text).words for text in compared.budgets)
        rows.append(["", f"here, `{compared.preset}`", own["title"], budgets, evaluated[1], seeds])
    heads = ["task", "", "network and data", "budget of a run", "training samples evaluated", "seeds"]
    return _table(heads, rows) if rows else "Not measured."


def _runs(records: Records) -> str:
    """How far each optimizer came."""
    found = []
    for compared in records.comparisons.values():
        train, test = claims.metrics(compared)
        heads = [
            "optimizer",
            "seeds",
            "updates",
            "GE",
            f"{train.words} at the end",
            f"best {test.words}",
            "end",
        ]
        rows = []
        for line in comparison.summaries(compared):
            numbers = (line.total.update, line.total.ge, line.train, line.best)
            rows.append([line.spec.label, str(line.seeds), *map(number, numbers), ", ".join(line.statuses)])
        found.append(f"{compared.settings['title']}:\n\n{_table(heads, rows)}")
    return "\n\n".join(found) if found else "Not measured."
