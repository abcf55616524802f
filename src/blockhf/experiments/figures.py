"""Figures of the experiments, as PNG."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

# Okabe & Ito's colors, which color-blind eyes tell apart; the dashes serve print without color.
_LOOKS: tuple[tuple[str, str | tuple[float, tuple[float, ...]]], ...] = (
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


def race(curves: Sequence[Curve], *, title: str) -> bytes:
    """Test error against updates and against seconds, side by side, with the error in common."""
    figure = Figure(figsize=(9, 4.2), dpi=120, layout="constrained")
    by_updates, by_seconds = figure.subplots(1, 2, sharey=True)
    most = max(max(curve.updates) for curve in curves)
    by_updates.set(xscale="log", xlim=(0.9, 1.2 * max(most, 2)), xlabel="updates")
    by_updates.xaxis.set_major_formatter(FuncFormatter(_plain))
    _scale_errors(by_updates, [error for curve in curves for error in curve.errors])
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
    by_seconds.legend(frameon=False, handlelength=3.2)
    figure.suptitle(title, fontsize=11)
    return _png(figure)


def _scale_errors(axes: Axes, errors: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers, as there would be one or two powers of ten on it."""
    finite = [error for error in errors if math.isfinite(error) and error > 0] or [1.0]
    low, high = 0.93 * min(finite), 1.07 * max(finite)
    axes.set(yscale="log", ylim=(low, high), ylabel="test error")
    places = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 1.2, 1.5, 2, 3, 5, 7)]
    axes.set_yticks([place for place in places if low <= place <= high])
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _plain(value: float, _: int | None = None) -> str:
    return f"{value:g}"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
