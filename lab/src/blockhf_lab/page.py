"""A comparison as one HTML page that needs nothing else: no script, no other file, no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import blockhf
from blockhf_lab import figures
from blockhf_lab.comparison import AXES, Comparison, Summary, summaries
from blockhf_lab.runs import Budget

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --faint: #d9d9d9; --soft: #f4f4f2;
  --c0: #0072b2; --c1: #c85200; --c2: #00805c; --c3: #b3578d; --c4: #b07a00; --c5: #2a8fc7; --c6: #7a59a0;
  --c7: #707070; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e6; --paper: #16181a; --faint: #3a3d40;
  --soft: #202326; --c0: #5fb4e5; --c1: #ff8a3d; --c2: #3ecf9f; --c3: #e79cc4; --c4: #f0b93a;
  --c5: #8fd0f5; --c6: #b59be0; --c7: #a8a8a8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.3rem 0.7rem 0.3rem 0; text-align: right; white-space: nowrap; vertical-align: bottom;
  border-bottom: 1px solid var(--faint); }
th:first-child, td:first-child, .words td { text-align: left; }
.words td { white-space: normal; overflow-wrap: anywhere; }
.words th { text-align: left; vertical-align: top; }
.panels { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; } figure svg { display: block; width: 100%; height: auto; }
figure svg text { fill: currentColor; }
.note { font-size: 0.9rem; max-width: 46rem; }
"""


def page(compared: Comparison) -> bytes:
    """The page of a comparison."""
    title = f"{compared.settings['title']}, {compared.preset}"
    lines = summaries(compared)
    seeds = sorted({entry.seed for entry in compared.entries})
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{len(lines)} optimizers, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}, "
        f"{escape(budgets(compared))}. Lines are medians over the seeds, bands their "
        "range.</p>",
        "<h2>When targets were reached</h2>",
        _results(compared, lines),
        '<p class="note">Under a target: updates / GE / seconds. Medians over the seeds; – where most of '
        "them did not get there. Seconds are those of the updates alone. One GE is one gradient on "
        f"{compared.settings['large_batch']:,} samples; products, forward passes and evaluations that an "
        "optimizer makes for itself are counted in that unit. The peak of memory is that of an update beyond "
        "what was in use before the run; of it the optimizer keeps a part from update to update.</p>",
    ]
    for axis, words in AXES.items():
        parts += [f"<h2>Against {escape(words)}</h2>", _panels(compared, axis)]
    parts += [
        "<h2>Settings</h2>",
        _words({**compared.settings, **{spec.label: str(spec) for spec, _ in compared.methods()}}),
        "<h2>Where it ran</h2>",
        *map(_words, compared.environments),
        f'<p class="note">Made by blockhf {escape(blockhf.__version__)}.</p>',
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    ).encode()


def budgets(compared: Comparison) -> str:
    """What the runs were allowed to spend, in words."""
    words = [Budget.parse(text).words for text in compared.budgets]
    return f"{' or '.join(words)} for each run"


def headings(compared: Comparison) -> list[str]:
    """The heads of the table of results."""
    metric = compared.settings["metric"]
    is_accuracy = metric == "accuracy"
    sign, test = ("≥", "test accuracy") if is_accuracy else ("≤", "test error")
    return [
        "optimizer",
        "updates",
        "GE",
        "seconds",
        "peak MiB",
        "kept MiB",
        "train error" if metric == "loss" else "train loss",
        f"best {test}",
        *(f"{test} {sign} {target:g}" for target in compared.settings["targets"]),
        "end",
    ]


def cells(line: Summary) -> list[str]:
    """The cells of an optimizer; those of the targets have updates, GE and seconds."""
    return [
        line.spec.label,
        *map(number, (line.total.update, line.total.ge, line.total.seconds)),
        *map(mebibytes, (line.total.peak_bytes, line.total.state_bytes)),
        number(line.train),
        number(line.best),
        *(
            "–"
            if target.update is None
            else f"{number(target.update)} / {number(target.ge)} / {number(target.seconds)} s"
            for target in line.targets
        ),
        ", ".join(line.statuses),
    ]


def number(value: float | None) -> str:
    """Three figures, or all of them before the point.

    >>> number(12345.6), number(0.98765), number(None)
    ('12346', '0.988', '–')
    """
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def mebibytes(size: float | None) -> str:
    """Bytes in the unit of the tables."""
    return number(None if size is None else size / 2**20)


def _results(compared: Comparison, lines: Sequence[Summary]) -> str:
    return table(headings(compared), [cells(line) for line in lines])


def _panels(compared: Comparison, axis: str) -> str:
    found = []
    for row in figures.panels(compared, axis):
        for panel in row:
            picture = figures.svg(figures.draw_alone(compared, panel), is_inline=True).decode()
            label = escape(f"{panel.metric} against {AXES[axis]}: {panel.title}", quote=True)
            found.append(f'<figure role="img" aria-label="{label}">{picture}</figure>')
    return f'<div class="panels">{"".join(found)}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls where the page is narrow."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _words(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(str(key).replace('_', ' '))}</th><td>{escape(_plain(value))}</td></tr>"
        for key, value in values.items()
    )
    return f'<table class="words"><tbody>{rows}</tbody></table>'


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return "–" if value is None else str(value)
