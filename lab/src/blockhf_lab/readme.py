"""``blockhf readme``: the figure of the README and its generated parts, made from records."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from blockhf_lab import claims_page, comparison, figures, files
from blockhf_lab.comparison import Comparison, Entry
from blockhf_lab.optimizers import Spec

LEVELS = (20.0, 15.0, 10.0, 7.0, 5.0)
"""Train errors of the table."""

_FAMILIES: Mapping[str, str] = {
    "adam": "Adam",
    "adamw": "AdamW",
    "soap": "SOAP",
    "muon": "Muon with AdamW",
    "sgd": "SGD, Nesterov",
    "lbfgs": "L-BFGS",
}
_OWN = "BlockHF, nothing tuned"
_KFAC = "K-FAC"


def run(readme: Path, records: Path, image: Path, console: Console) -> None:
    """Make figure, table and printed report of the README anew."""
    compared = Comparison.read(records)
    text = readme.read_text(encoding="utf-8")
    made = {"race": table(compared), "report": printed(script(text))}
    files.write(image, figures.png(draw(compared)))
    files.write(readme, claims_page.fill(text, made).encode())
    console.print(f"Written: {readme} and {image}", soft_wrap=True)


def family(spec: Spec) -> str:
    """The row that an optimizer belongs to."""
    if spec.name == "blockhf":
        return _KFAC if spec.options.get("solver") == "Precondition" else _OWN
    return _FAMILIES.get(spec.name, spec.name)


def best(compared: Comparison) -> dict[str, tuple[Spec, list[Entry]]]:
    """Of each family the setting that came furthest, or there first."""
    found: dict[str, tuple[Spec, list[Entry]]] = {}

    def rank(entries: Sequence[Entry]) -> list[float]:
        times = [seconds(entries, level) for level in reversed(LEVELS)]
        return [math.inf if own is None else own for own in times]

    for spec, entries in compared.methods():
        name = family(spec)
        if name not in found or rank(entries) < rank(found[name][1]):
            found[name] = (spec, entries)
    return dict(sorted(found.items(), key=lambda item: (item[0] != _OWN, rank(item[1][1]))))


def seconds(entries: Sequence[Entry], level: float) -> float | None:
    """Until the train error was that low, the median over the seeds."""
    return comparison.cost(entries, "train_loss", lambda value: value <= level).seconds


def table(compared: Comparison) -> str:
    """Seconds to each level, a row for each family; the least in bold."""
    rows = {
        name: [seconds(entries, level) for level in LEVELS] for name, (_, entries) in best(compared).items()
    }
    columns = zip(*rows.values(), strict=True)
    least = [min((own for own in column if own is not None), default=None) for column in columns]
    lines = [["", *(f"≤ {level:g}" for level in LEVELS)], ["---"] + ["--:"] * len(LEVELS)]
    for name, times in rows.items():
        cells = ["–" if own is None else f"{own:.0f}" for own in times]
        marked = [
            f"**{cell}**" if own is not None and own == low else cell
            for cell, own, low in zip(cells, times, least, strict=True)
        ]
        lines.append([name if name == _OWN else f"{name}, tuned", *marked])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(compared: Comparison) -> Figure:
    """Test error against seconds."""
    figure = Figure(figsize=(8.4, 3.9), dpi=130, layout="constrained")
    axes = figure.subplots()
    errors: list[float] = []
    for place, (name, (spec, entries)) in enumerate(best(compared).items()):
        curve = comparison.curve(spec, entries, compared.test_key, "seconds")
        color, dashes = figures.look(place)
        axes.plot(
            curve.along,
            curve.middle,
            color=color,
            linestyle=dashes,
            linewidth=2.6 if place == 0 else 1.7,
            label=name if name == _OWN else f"{name}, tuned",
        )
        axes.plot(curve.along[-1:], curve.middle[-1:], color=color, marker="o", markersize=4)
        errors += [value for along, value in zip(curve.along, curve.middle, strict=True) if along > 2]
    figures.scale_errors(axes, errors)
    axes.set(xlim=(0, 180), xlabel="CPU seconds in updates, one thread", ylabel="test error per picture")
    axes.set_title("Autoencoder with 2.8 million parameters on MNIST", fontsize=10)
    axes.grid(color="#d9d9d9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8.5, handlelength=3)
    return figure


def script(text: str) -> str:
    """The README's program."""
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return str(code)


def printed(code: str) -> str:
    """What the program prints, in short, as a block of text."""
    buffer = io.StringIO()
    with contextlib.redirect_stdout(buffer):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    lines = buffer.getvalue().splitlines()
    return "\n".join(["```", *lines[:2], "…", *lines[-2:], "```"])
