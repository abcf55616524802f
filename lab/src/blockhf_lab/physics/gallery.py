"""``blockhf gallery``: figures and tables of the tasks without noise, from the folders of their runs."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from PIL import Image
from torch import nn

from blockhf_lab import checkpoints, comparison, files, physics, tasks
from blockhf_lab.claims_page import fill
from blockhf_lab.comparison import Comparison, Entry
from blockhf_lab.optimizers import Spec
from blockhf_lab.physics.problem import PhysicsTask, View, predict

# Family by the spec's name, with its color: Okabe & Ito's, which color-blind eyes tell apart; ours is black.
FAMILIES: Mapping[str, tuple[str, str]] = {
    "blockhf": ("BlockHF", "#000000"),
    "least-squares": ("BlockHF.least_squares", "#555555"),
    "kernel-gn": ("kernel Gauss-Newton", "#009E73"),
    "ssbfgs": ("self-scaled BFGS", "#CC79A7"),
    "full-lbfgs": ("L-BFGS", "#0072B2"),
    "adam-lbfgs": ("Adam, then L-BFGS", "#56B4E9"),
    "soap": ("SOAP", "#E69F00"),
    "adam": ("Adam", "#D55E00"),
}
OURS = ("blockhf", "least-squares")


@dataclass(frozen=True)
class Line:
    """A family on a task: the setting whose train loss ended lowest, with the medians over its seeds."""

    family: str
    spec: Spec
    entries: Sequence[Entry]
    loss: float
    error: float


def lines(compared: Comparison) -> list[Line]:
    """The families of a comparison, in the order of ``FAMILIES``."""
    found: dict[str, Line] = {}
    for summary, (spec, entries) in zip(comparison.summaries(compared), compared.methods(), strict=True):
        if spec.name not in FAMILIES:
            continue
        loss = math.inf if summary.train is None else summary.train
        error = math.inf if summary.best is None else summary.best
        if spec.name not in found or loss < found[spec.name].loss:
            found[spec.name] = Line(spec.name, spec, entries, loss, error)
    return [found[name] for name in FAMILIES if name in found]


def run(folder: Path, records: Path, page: Path) -> list[str]:
    """Write records, figures and the page's generated parts; returns the tasks that there were.

    Args:
        folder: Has a folder for each task, with those of its runs in it, as ``blockhf compare`` makes them.
        records: Where to put ``TASK/comparison.json``.
        page: Has parts ``<!-- table -->`` and ``<!-- TASK -->``; figures go to ``images`` beside it.
    """
    found = [name for name in physics.TASKS if (folder / name).is_dir()]
    if not found:
        raise ValueError(f"{folder} has no folder of a task: {', '.join(physics.TASKS)}.")
    images = page.parent / "images"
    for path in (records, images):
        path.mkdir(parents=True, exist_ok=True)
    for name in found:
        (compared,) = comparison.collect([folder / name])
        (records / name).mkdir(exist_ok=True)
        files.write(records / name / "comparison.json", compared.to_json())
        task = tasks.get(name, compared.preset)
        assert isinstance(task, PhysicsTask)
        model = _trained(task, folder / name, lines(compared))
        files.write(images / f"{name}.png", _png(panel(task, model, compared)))
    fill_page(records, page)
    return found


def fill_page(records: Path, page: Path) -> None:
    """Make the generated parts of the page anew from the records alone."""
    compared = {
        name: Comparison.read(path)
        for name in physics.TASKS
        if (path := records / name / "comparison.json").exists()
    }
    parts = {"table": table(compared), **{name: section(own) for name, own in compared.items()}}
    files.write(page, fill(page.read_text(encoding="utf-8"), parts).encode())


# Words


def table(found: Mapping[str, Comparison]) -> str:
    """Train loss at the end for each task and family, the lowest in bold, and what the bars say."""
    rows = {name: {line.family: line for line in lines(compared)} for name, compared in found.items()}
    families = [name for name in FAMILIES if any(name in row for row in rows.values())]
    heads = ["task", "CPU seconds", *(FAMILIES[name][0] for name in families)]
    body = []
    for name, row in rows.items():
        lowest = min(line.loss for line in row.values())
        cells = []
        for family in families:
            line = row.get(family)
            text = "–" if line is None else _number(line.loss)
            cells.append(f"**{text}**" if line is not None and line.loss == lowest else text)
        budgets = " and ".join(budget.removesuffix("s") for budget in found[name].budgets)
        body.append([f"`{name}`", budgets, *cells])
    lost = verdict(rows)
    return "\n".join([*_markdown(heads, body), "", lost])


def verdict(rows: Mapping[str, Mapping[str, Line]]) -> str:
    """On how many tasks ours has the lowest loss, and how far it is off on the others."""
    won, others = 0, []
    for name, row in rows.items():
        own = min((row[key] for key in OURS if key in row), key=lambda line: line.loss, default=None)
        rivals = min((line.loss for key, line in row.items() if key not in OURS), default=math.inf)
        if own is None:
            others.append(f"not run on `{name}`")
        elif own.loss <= rivals:
            won += 1
        else:
            ratio = f"{own.loss / rivals:,.3g} times the lowest"
            others.append(f"{ratio} on `{name}` (relative error {_number(own.error)})")
    words = f"BlockHF has the lowest loss on {won} of {len(rows)} tasks"
    return f"{words}; {', '.join(others)}." if others else f"{words}."


def section(compared: Comparison) -> str:
    """A task's equation, figure and table."""
    task = tasks.get(compared.task, compared.preset)
    assert isinstance(task, PhysicsTask)
    heads = ["optimizer", "seeds", "updates", "train loss", "relative error", "setting"]
    body = []
    for line in lines(compared):
        updates = sorted(entry.points[-1]["update"] or 0 for entry in line.entries)[len(line.entries) // 2]
        options = ", ".join(f"{key} {value}" for key, value in line.spec.options.items())
        body.append(
            [
                FAMILIES[line.family][0],
                ", ".join(str(entry.seed) for entry in line.entries),
                f"{updates:.0f}",
                _number(line.loss),
                _number(line.error),
                options,
            ]
        )
    return "\n".join(
        [
            f"{task.equation}. {compared.settings['title']}; "
            f"{' and '.join(compared.budgets)} of CPU for each optimizer.",
            "",
            f"![Solution, pointwise error and error against CPU seconds](images/{compared.task}.png)",
            "",
            *_markdown(heads, body),
        ]
    )


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def _number(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "diverged"


# Figures


def panel(task: PhysicsTask, model: nn.Module | None, compared: Comparison) -> Figure:
    """Solution and pointwise error of our model, and the errors of all against CPU seconds."""
    figure = Figure(figsize=(12.5, 3.7), dpi=110, layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.25))
    view = task.view()
    if model is not None:
        exact = task.solution(view.points)
        found = predict(model, view.points)
        draw = _draw_line if len(view.shape) == 1 else _draw_plane
        draw(figure, left, middle, view, found.numpy(), exact.numpy())
    convergence(right, compared)
    figure.suptitle(task.title, fontsize=11, x=0.01, ha="left")
    return figure


def convergence(axes: Axes, compared: Comparison, names: Sequence[str] = tuple(FAMILIES)) -> None:
    """The relative error of each family against CPU seconds; of its first seed, smoothed by nothing."""
    low, high = math.inf, 0.0
    for line in lines(compared):
        if line.family not in names:
            continue
        label, color = FAMILIES[line.family]
        points = line.entries[0].points
        seconds = [point["seconds"] or 0.0 for point in points]
        errors = [_value(point[compared.test_key]) for point in points]
        is_ours = line.family in OURS
        axes.plot(
            seconds,
            errors,
            color=color,
            linewidth=2.6 if is_ours else 1.5,
            label=label,
            zorder=3 if is_ours else 2,
        )
        axes.plot(seconds[-1:], errors[-1:], color=color, marker="o", markersize=5, zorder=4)
        finite = [error for error in errors if 0 < error < math.inf]
        low, high = min(low, *finite), max(high, *finite)
    axes.set(yscale="log", ylim=(max(low / 3, 1e-17), min(3 * high, 30)), xlabel="CPU seconds")
    axes.set_title("relative L2 error", fontsize=10)
    axes.yaxis.set_major_locator(LogLocator(numticks=9))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(color="#e3e3e3", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_plane(
    figure: Figure,
    left: Axes,
    middle: Axes,
    view: View,
    found: np.ndarray[Any, Any],
    exact: np.ndarray[Any, Any],
) -> None:
    reach, least = float(np.abs(exact).max()), float(exact.min())
    has_signs = least < -0.1 * reach  # or else half of the colors would go unused
    colors = {
        "cmap": "RdBu_r" if has_signs else "viridis",
        "vmin": -reach if has_signs else least,
        "vmax": reach,
    }
    off = np.log10(np.maximum(np.abs(found - exact), 1e-12))
    shown = (
        (left, found, "solution, by BlockHF", colors),
        (middle, off, "log₁₀ of the pointwise error", {"cmap": "magma", "vmin": np.quantile(off, 0.02)}),
    )
    for axes, values, title, options in shown:
        image = axes.imshow(
            values.reshape(view.shape), origin="lower", extent=view.extent, aspect="auto", **options
        )
        axes.set_title(title, fontsize=10)
        axes.set(xlabel=view.labels[0], ylabel=view.labels[1])
        figure.colorbar(image, ax=axes, pad=0.02, aspect=25)
    middle.set_ylabel("")


def _draw_line(
    figure: Figure,
    left: Axes,
    middle: Axes,
    view: View,
    found: np.ndarray[Any, Any],
    exact: np.ndarray[Any, Any],
) -> None:
    x = view.points[:, 0].numpy()
    left.plot(x, exact, color="#bbbbbb", linewidth=4, label="exact")
    left.plot(x, found, color="#000000", linewidth=1.0, label="BlockHF")
    left.set_title("solution", fontsize=10)
    left.legend(fontsize=8, frameon=False)
    middle.semilogy(x, np.maximum(np.abs(found - exact), 1e-17), color="#7a3b8f", linewidth=0.8)
    middle.set_title("pointwise error", fontsize=10)
    for axes in (left, middle):
        axes.set(xlabel=view.labels[0], xlim=(x[0], x[-1]))
        axes.grid(color="#e3e3e3", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)


def _value(value: float | None) -> float:
    return math.nan if value is None else value


def _trained(task: PhysicsTask, folder: Path, found: Sequence[Line]) -> nn.Module | None:
    """The model of our best run, from its checkpoint."""
    own = [line for line in found if line.family in OURS]
    if not own:
        return None
    best = min(own, key=lambda line: line.loss)
    path = folder / best.spec.folder / f"seed-{best.entries[0].seed}" / checkpoints.NEWEST
    if not path.exists():
        return None
    with torch.random.fork_rng():
        model = task.make_model()
    model.load_state_dict(checkpoints.read(path)["model"])
    return model


def _png(figure: Figure) -> bytes:
    """Without transparency, which would take a third more bytes."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    Image.open(drawn).convert("RGB").save(small, format="png", optimize=True)
    return small.getvalue()
