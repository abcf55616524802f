"""Records as tables and figures: an HTML page that needs nothing else, and the parts of ``docs/arena.md``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from blockhf_lab import figures, files, page
from blockhf_lab.arena import families, records, scores, tasks, tuned
from blockhf_lab.arena.records import Record
from blockhf_lab.arena.scores import AXES, Axis, Pair
from blockhf_lab.claims_page import fill
from blockhf_lab.tables import markdown

_RATIOS = [2 ** (step / 16) for step in range(16 * 5 + 1)]
_COLORS = dict(zip(families.NAMES, ("#000000", *figures.PALETTE), strict=False))


@dataclass(frozen=True)
class Arena:
    """Records with the targets and settings that judge them."""

    runs: Sequence[Record]
    targets: Mapping[str, Sequence[float]]
    settings: Mapping[str, Mapping[str, str]]

    @classmethod
    def read(cls, folder: Path) -> Arena:
        """The final runs of a folder.

        Raises:
            ValueError: There are none.
        """
        fixed = tuned.read()
        settings = {name: own.get("settings", {}) for name, own in fixed.items()}
        targets = {name: own["targets"] for name, own in fixed.items() if "targets" in own}
        runs = scores.finals(records.read(folder), settings)
        if not runs:
            raise ValueError(f"{folder} has no final runs of the arena. Make some with blockhf arena --out.")
        return cls(runs, targets, settings)

    @property
    def families(self) -> list[str]:
        present = {record.family for record in self.runs}
        return [name for name in families.NAMES if name in present]

    def pairs(self, axis: Axis) -> list[Pair]:
        return scores.pairs(self.runs, self.targets, axis)

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({record.seed for record in self.runs})


def write(folder: Path, docs: Path | None) -> list[Path]:
    """Write ``index.html`` into the folder of the records and, if named, the parts and figures of a page."""
    arena = Arena.read(folder)
    written = [folder / "index.html"]
    files.write(written[0], html(arena))
    if docs is not None:
        images = docs.parent / "images"
        images.mkdir(exist_ok=True)
        files.write(images / "arena-profiles.png", figures.png(profiles(arena)))
        files.write(images / "arena-curves.png", figures.png(curves(arena)))
        files.write(docs, fill(docs.read_text(encoding="utf-8"), parts(arena)).encode())
        written.append(docs)
    return written


# Tables


def summary(arena: Arena) -> tuple[list[str], list[list[str]]]:
    """For each family its score and the shares of pairs that it solved."""
    heads = ["optimizer", "tasks"]
    heads += [f"{words}: solved / best / within 2 / score" for words in AXES.values()]
    found = {axis: arena.pairs(axis) for axis in AXES}
    rows = []
    for family in arena.families:
        num_tasks = len({record.task for record in arena.runs if record.family == family})
        cells = []
        for own in found.values():
            solved = sum(math.isfinite(pair.costs.get(family, math.inf)) for pair in own)
            first, twice = (round(share * len(own)) for share in scores.profile(own, family, [1, 2]))
            cells.append(f"{solved} / {first} / {twice} / {scores.score(own, family):.2f}")
        rows.append([family, str(num_tasks), *cells])
    return heads, rows


def results(arena: Arena) -> tuple[list[str], list[list[str]]]:
    """For each task and target what each family needed."""
    seconds, ge, updates = (arena.pairs(axis) for axis in AXES)
    heads = ["task", "loss ≤", *arena.families, "default over best peer"]
    rows = []
    for by_seconds, by_ge, by_update in zip(seconds, ge, updates, strict=True):
        cells = [
            "/".join(page.number(_known(pair.costs.get(family))) for pair in (by_seconds, by_ge, by_update))
            if math.isfinite(by_seconds.costs.get(family, math.inf))
            else ("–" if family in by_seconds.costs else "")
            for family in arena.families
        ]
        ratio = by_seconds.ratio_to_peers(families.DEFAULT)
        told = "–" if math.isinf(ratio) else "alone" if ratio == 0 else f"{ratio:.2f}"
        rows.append([by_seconds.task, f"{by_seconds.target:.4g}", *cells, told])
    return heads, rows


def _known(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


def task_list(arena: Arena) -> tuple[list[str], list[list[str]]]:
    """The tasks, their budgets, and where their targets are from."""
    heads = [
        "task",
        "what",
        "parameters",
        "batches of the search",
        "default's batch",
        "CPU s",
        "targets from",
    ]
    fixed = tuned.read()
    rows = []
    for name, task in tasks.TASKS.items():
        number = sum(param.numel() for param in task.model(0).parameters())
        small, large = task.batches
        own = "all" if task.own_batch is None else f"{task.own_batch:,}"
        origin = fixed.get(name, {}).get("from", "–")
        budget = f"{task.seconds:g}"
        rows.append([name, task.title, f"{number:,}", f"{small:,}, {large:,}", own, budget, origin])
    return heads, rows


def chosen(arena: Arena) -> tuple[list[str], list[list[str]]]:
    """The setting of each family that the search chose."""
    names = [name for name in arena.families if name != families.DEFAULT]
    rows = [
        [task, *(_setting(arena.settings[task].get(name)) for name in names)]
        for task in tasks.TASKS
        if task in arena.settings
    ]
    return ["task", *names], rows


def _setting(text: str | None) -> str:
    if text is None:
        return "–"
    hidden = ("solver=", "momentum=", "nesterov=", "history_size=", "line_search_fn=")
    options = text.partition(":")[2].split(",")
    return ", ".join(option for option in options if not option.startswith(hidden))


def verdict(arena: Arena) -> str:
    """The bars of the default, in words."""
    found = scores.bars(arena.pairs("seconds"))
    return (
        f"By CPU seconds, over {found.num_pairs} pairs of task and target: the default needs at most twice "
        f"the best peer's on {found.within_two}, is the best of all on {found.best}, and K-FAC alone is more "
        f"than 10 % better on {found.behind_kfac}. Seeds: {', '.join(map(str, arena.seeds))}."
    )


def parts(arena: Arena) -> dict[str, str]:
    """What ``docs/arena.md`` holds between its markers."""
    images = "![Performance profiles](images/arena-profiles.png)", "![Losses](images/arena-curves.png)"
    return {
        "verdict": verdict(arena),
        "summary": f"{markdown(*summary(arena))}\n\n{images[0]}",
        "results": f"{markdown(*results(arena))}\n\n{images[1]}",
        "tasks": markdown(*task_list(arena)),
        "settings": markdown(*chosen(arena)),
    }


# Figures


def profiles(arena: Arena) -> Figure:
    """A panel for each kind of cost."""
    figure = Figure(figsize=(11, 3.9), dpi=110, layout="constrained")
    for panel, (axis, words) in zip(figure.subplots(1, len(AXES), sharey=True), AXES.items(), strict=True):
        found = arena.pairs(axis)
        for family in arena.families:
            shares = scores.profile(found, family, _RATIOS)
            width = 2.6 if family == families.DEFAULT else 1.5
            panel.step(_RATIOS, shares, where="post", color=_COLORS[family], linewidth=width, label=family)
        panel.set(xscale="log", xlim=(1, _RATIOS[-1]), ylim=(0, 1.02), xlabel=f"times the least {words}")
        panel.set_xticks([1, 2, 4, 8, 16, 32])
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        _tidy(panel)
    figure.axes[0].set_ylabel("share of pairs solved")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False
    )
    return figure


def curves(arena: Arena) -> Figure:
    """The loss of each task against CPU seconds, seed by seed, with the targets as lines."""
    names = [name for name in tasks.TASKS if any(record.task == name for record in arena.runs)]
    columns = 4
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(11, 2.5 * rows + 0.5), dpi=110, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    labels: dict[str, Artist] = {}
    for panel, name in zip(panels, names, strict=False):
        starts = [record.points[0].loss for record in arena.runs if record.task == name]
        highest = 10 * max(filter(math.isfinite, starts), default=math.inf)  # of what is not divergence
        for family in arena.families:
            for record in arena.runs:
                if (record.task, record.family) != (name, family):
                    continue
                points = [point for point in record.points[1:] if point.loss <= highest]
                along = [point.seconds for point in points], [point.loss for point in points]
                width = 2.2 if family == families.DEFAULT else 1.1
                marker = "o" if len(points) == 1 else None
                color = _COLORS[family]
                (labels[family],) = panel.plot(*along, marker=marker, ms=4, color=color, linewidth=width)
        for target in arena.targets.get(name, ()):
            panel.axhline(target, color="#d9d9d9", linewidth=0.8, zorder=0)
        panel.set(xscale="log", yscale="log", title=name)
        low, high = panel.get_ylim()
        figures.plain_ticks(panel, (1, 2, 5) if high < 500 * low else (1,))
        panel.tick_params(labelsize=7)
        _tidy(panel)
    for place, panel in enumerate(panels):
        panel.set_visible(place < len(names))
        if place + columns >= len(names):
            panel.set_xlabel("CPU seconds", fontsize=8)
    figure.legend(list(labels.values()), list(labels), loc="outside lower center", ncols=8, frameon=False)
    return figure


def _tidy(panel: Axes) -> None:
    panel.grid(color="#d9d9d9", linewidth=0.5)
    panel.spines[["top", "right"]].set_visible(False)


# The page


def html(arena: Arena) -> bytes:
    """The page of an arena."""
    body = [
        "<h1>The arena</h1>",
        f"<p>{escape(verdict(arena))}</p>",
        "<h2>Pairs of task and target</h2>",
        page.table(*summary(arena)),
        '<p class="note">A pair is solved at the first evaluation at or below the target; medians over '
        "seeds. The score is the mean of the profile from 1 to 4, by the logarithm of the ratio.</p>",
        _figure(profiles(arena), "performance profiles"),
        "<h2>Cost to each target</h2>",
        page.table(*results(arena)),
        '<p class="note">CPU seconds / GE / updates; – where most seeds did not get there within the budget, '
        "nothing where the optimizer did not run.</p>",
        _figure(curves(arena), "losses against CPU seconds"),
        "<h2>Tasks</h2>",
        page.table(*task_list(arena)),
        "<h2>Settings that the search chose</h2>",
        page.table(*chosen(arena)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>The arena</title>\n<style>{page.STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    ).encode()


def _figure(figure: Figure, label: str) -> str:
    picture = figures.svg(figure, is_inline=True).decode()
    return f'<figure role="img" aria-label="{label}">{picture}</figure>'
