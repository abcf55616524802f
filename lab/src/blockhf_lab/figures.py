"""Figures of the experiments, as PNG and SVG."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from blockhf_lab import comparison, plan
from blockhf_lab.comparison import Comparison
from blockhf_lab.optimizers import Spec

Dashes = str | tuple[float, tuple[float, ...]]

# Okabe & Ito's colors, which color-blind eyes tell apart; the dashes serve print without color.
_LOOKS: tuple[tuple[str, Dashes], ...] = (
    ("#000000", "solid"),
    ("#0072B2", "solid"),
    ("#D55E00", (0, (5, 1.5))),
    ("#009E73", (0, (3, 1, 1, 1))),
    ("#555555", (0, (1, 1))),
)


@dataclass(frozen=True)
class Curve:
    """One optimizer's way: its test error after so many updates and seconds."""

    name: str
    updates: Sequence[float]
    seconds: Sequence[float]
    errors: Sequence[float]


def race(curves: Sequence[Curve], *, title: str, physics: Sequence[Curve] = ()) -> bytes:
    """Test error against updates and against seconds, side by side; then the errors of ``physics``."""
    figure = Figure(figsize=(13.5 if physics else 9, 4.2), dpi=120, layout="constrained")
    by_updates, by_seconds, *third = figure.subplots(1, 3 if physics else 2)
    by_seconds.sharey(by_updates)
    by_seconds.tick_params(labelleft=False)
    most = max(max(curve.updates) for curve in curves)
    by_updates.set(xscale="log", xlim=(0.9, 1.2 * max(most, 2)), xlabel="updates")
    by_updates.xaxis.set_major_formatter(FuncFormatter(_plain))
    scale_errors(by_updates, [error for curve in curves for error in curve.errors])
    longest = max(max(curve.seconds) for curve in curves)
    by_seconds.set(xlim=(0, 1.04 * longest or 1.0), xlabel="seconds in updates")
    for curve, (color, dashes) in zip(curves, itertools.cycle(_LOOKS), strict=False):
        # Update 0 has no place on a logarithmic axis; it is the same for all.
        after = next((place for place, update in enumerate(curve.updates) if update > 0), len(curve.updates))
        for axes, along, errors in (
            (by_updates, curve.updates[after:], curve.errors[after:]),
            (by_seconds, curve.seconds, curve.errors),
        ):
            axes.plot(along, errors, color=color, linestyle=dashes, linewidth=2, label=curve.name)
            axes.plot(along[-1:], errors[-1:], color=color, marker="o", markersize=5)
    for axes in (by_updates, by_seconds):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, by_seconds)
    for axes in third:
        _by_orders(axes, physics)
    _head(figure, title)
    return _png(figure)


def _by_orders(axes: Axes, curves: Sequence[Curve]) -> None:
    """Relative errors against seconds, on an axis of many powers of ten."""
    for curve, (color, dashes) in zip(curves, itertools.cycle(_LOOKS), strict=False):
        axes.plot(curve.seconds, curve.errors, color=color, linestyle=dashes, linewidth=2, label=curve.name)
        axes.plot(curve.seconds[-1:], curve.errors[-1:], color=color, marker="o", markersize=5)
    axes.set(yscale="log", xlabel="seconds in updates", ylabel="relative error")
    axes.set_title("Poisson's equation by a network of 1,185 parameters", fontsize=10)
    axes.set_xlim(left=0)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, handlelength=3.2, loc="lower left", fontsize=8)


def scale_errors(axes: Axes, errors: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers, as there would be one or two powers of ten on it."""
    finite = [error for error in errors if math.isfinite(error) and error > 0] or [1.0]
    low, high = 0.93 * min(finite), 1.07 * max(finite)
    axes.set(yscale="log", ylim=(low, high), ylabel="test error")
    plain_ticks(axes, (1, 1.2, 1.5, 2, 3, 5, 7))


def plain_ticks(axes: Axes, digits: Sequence[float] = (1, 2, 5)) -> None:
    """Plain numbers along a logarithmic vertical axis."""
    axes.set_yticks(_places(*axes.get_ylim(), digits))
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.yaxis.set_minor_formatter(NullFormatter())


def look(place: int) -> tuple[str, Dashes]:
    """Color and dashes of a curve by its place among others."""
    return PALETTE[place % len(PALETTE)], _DASHES[place % len(_DASHES)]


def _places(low: float, high: float, digits: Sequence[float]) -> list[float]:
    """Round numbers for a logarithmic axis; evenly spaced where few of these digits fall on it."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    step = max(1, len(powers) // 10)
    places = [digit * 10.0**power for power in powers[::step] for digit in (digits if step == 1 else (1,))]
    places = [place for place in places if low <= place <= high]
    if len(places) < 3:
        places = [place for place in MaxNLocator(4).tick_values(low, high) if low <= place <= high]
    return places


def _plain(value: float, _: int | None = None) -> str:
    return f"{value:g}"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


# Comparisons

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F")
_DASHES: tuple[Dashes, ...] = ("solid", (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_FAINT = "#d9d9d9"


@dataclass(frozen=True)
class Panel:
    """One picture of a comparison: a metric along an axis."""

    title: str
    metric: str
    axis: str
    is_log: bool
    curves: Sequence[comparison.Curve]


def panels(compared: Comparison, axis: str) -> list[list[Panel]]:
    """The paper's panels, row by row: train and test; the recipe with others, the recipe with HF.

    On the left are the optimizers of other kinds beside the paper's recipe, on the right all that solve by
    HF. A side with nothing to compare is left out.
    """
    methods = compared.methods()
    recipe = [index for index, (spec, _) in enumerate(methods) if spec.name == "paper"]
    others = [index for index, (spec, _) in enumerate(methods) if spec.name not in ("paper", "hf")]
    second = [index for index, (spec, _) in enumerate(methods) if spec.is_second_order]
    sides = []
    if others:
        sides.append((_title([methods[index][0] for index in recipe + others]), recipe + others))
    if second and second != others:
        sides.append((_title([methods[index][0] for index in second]), second))
    metric = compared.settings["metric"]
    is_accuracy = metric == "accuracy"
    rows = (
        ("train error" if metric == "loss" else "train loss", "train_loss", True),
        ("test accuracy" if is_accuracy else "test error", compared.test_key, not is_accuracy),
    )
    return [
        [
            Panel(
                side,
                words,
                axis,
                is_log,
                [comparison.curve(*methods[index], key, axis) for index in members],
            )
            for side, members in sides
        ]
        for words, key, is_log in rows
    ]


def looks(compared: Comparison) -> dict[str, tuple[str, Dashes]]:
    """Color and dashes of each optimizer, the same in all panels.

    The recipe with blocks and with one (HF), with the same options, have the same color, and HF is dashed.
    """
    specs = [spec for spec, _ in compared.methods()]
    colors: dict[str, int] = {}
    for spec in specs:
        colors.setdefault(_color_key(spec), len(colors))
    # Where colors come again, dashes are the other way round.
    dashes = itertools.cycle((*_DASHES[2:] * (len(PALETTE) // 2), *_DASHES[:1:-1] * (len(PALETTE) // 2)))
    return {
        spec.label: (
            PALETTE[colors[_color_key(spec)] % len(PALETTE)],
            _DASHES[("paper", "hf").index(spec.name)] if spec.name in ("paper", "hf") else next(dashes),
        )
        for spec in specs
    }


def _color_key(spec: Spec) -> str:
    return str(Spec("hf", spec.options)) if spec.name == "paper" else str(spec)


def _head(figure: Figure, title: str) -> None:
    """A title above all panels, in as many lines as the figure's width makes of it."""
    figure.suptitle(textwrap.fill(title, width=int(12 * figure.get_figwidth())), fontsize=11)


def _legend(figure: Figure, axes: Axes) -> None:
    """The legend of a panel, below all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3, fontsize=8, handlelength=3, frameon=False
    )


def _title(specs: Sequence[Spec]) -> str:
    return " and ".join(dict.fromkeys(spec.kind for spec in specs))


def draw(compared: Comparison, axis: str) -> Figure:
    """All panels of a comparison along one axis."""
    own = looks(compared)
    rows = [[(panel, own) for panel in row] for row in panels(compared, axis)]
    return grid(rows, f"{compared.settings['title']} ({compared.preset})")


def grid(rows: Sequence[Sequence[tuple[Panel, dict[str, tuple[str, Dashes]]]]], title: str = "") -> Figure:
    """Panels in rows, each with the looks of its comparison."""
    height = sum(3.8 + max(_below(panel) for panel, _ in row) for row in rows)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(5.2 * len(rows[0]), height), dpi=120, layout=layout)
    for row, places in zip(rows, figure.subplots(len(rows), len(rows[0]), squeeze=False), strict=True):
        for (panel, own), axes in zip(row, places, strict=True):
            _draw(panel, axes, own)
    if title:
        _head(figure, title)
    return figure


def draw_alone(compared: Comparison, panel: Panel) -> Figure:
    """One panel, narrow enough for a phone."""
    figure = Figure(figsize=(4.5, 3.5 + _below(panel)), layout="constrained")
    _draw(panel, figure.subplots(), looks(compared))
    return figure


def _below(panel: Panel) -> float:
    """Inches for the legend below a panel, where it covers no curve."""
    return 0.17 * len(panel.curves)


def _draw(panel: Panel, axes: Axes, looks: dict[str, Any]) -> None:
    values: list[float] = []
    places: list[float] = []
    for curve in panel.curves:
        color, dashes = looks[curve.label]
        # What has no place on a logarithmic axis: the start, which is the same for all.
        kept = [index for index, along in enumerate(curve.along) if along > 0]
        along, middle, low, high = (
            [values[index] for index in kept] for values in (curve.along, curve.middle, curve.low, curve.high)
        )
        axes.plot(along, middle, color=color, linestyle=dashes, linewidth=1.8, label=curve.label)
        axes.plot(along[-1:], middle[-1:], color=color, marker="o", markersize=4)
        if low != high:
            axes.fill_between(along, low, high, color=color, alpha=0.15, linewidth=0)
        values += [*middle, *low, *high]
        places += along
    if panel.is_log:
        scale_errors(axes, values)
    axes.set(xscale="log", xlabel=comparison.AXES[panel.axis], ylabel=panel.metric)
    axes.set_title(panel.title, fontsize=10)
    if places and max(places) < 30 * min(places):
        axes.set_xticks(_places(min(places), max(places), (1, 2, 3, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(color=_FAINT, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.curves:
        axes.legend(fontsize=8, handlelength=3, framealpha=0.0, loc="upper left", bbox_to_anchor=(0.0, -0.18))


# Plans


def scaling(found: Sequence[tuple[str, plan.Scaling]], *, title: str) -> Figure:
    """Speed-ups against one rank, a panel for each network between the ranks."""
    figure = Figure(figsize=(1.0 + 4.2 * len(found), 4.2), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    highest = 1.0
    for axes, (words, scaled) in zip(panels, found, strict=True):
        axes.plot(scaled.ranks, scaled.ranks, color=_FAINT, linewidth=1.2, label="as many ranks")
        for name, predictions, (color, dashes) in zip(
            ("block HF, best mesh", "block HF, data alone", "Adam, data-parallel"),
            (scaled.block_hf, scaled.data_alone, scaled.adam),
            _LOOKS[1:],
            strict=False,
        ):
            speed_ups = plan.speed_ups(predictions)
            highest = max(highest, *speed_ups)
            axes.plot(scaled.ranks, speed_ups, color=color, linestyle=dashes, linewidth=1.8, label=name)
            axes.plot(scaled.ranks[-1:], speed_ups[-1:], color=color, marker="o", markersize=4, clip_on=False)
        axes.set(xscale="log", xlabel="ranks", xlim=(0.9, 1.25 * max(scaled.ranks)))
        axes.set_xticks([ranks for ranks in scaled.ranks if math.log2(ranks) % 2 == 0])
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(words, fontsize=10)
        axes.grid(color=_FAINT, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(yscale="log", ylim=(0.5, 1.6 * highest), ylabel="speed-up against one rank")
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1.0,)))
    panels[0].yaxis.set_major_formatter(FuncFormatter(_plain))
    panels[0].yaxis.set_minor_formatter(NullFormatter())
    _legend(figure, panels[0])
    _head(figure, title)
    return figure


def png(figure: Figure) -> bytes:
    """As PNG; the same figure gives the same bytes."""
    return _png(figure)


def svg(figure: Figure, *, is_inline: bool = False) -> bytes:
    """As SVG, with text as text; the same figure gives the same bytes.

    Args:
        figure: The figure.
        is_inline: For a page: no background, and ink and colors are variables of the page's style.
    """
    buffer = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "blockhf"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=is_inline)
    if not is_inline:
        return buffer.getvalue()
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :]
    for index, color in enumerate(PALETTE):
        text = text.replace(color.lower(), f"var(--c{index})")
    text = text.replace(_FAINT, "var(--faint)").replace("#000000", "currentColor")
    return text.encode()
