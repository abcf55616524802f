"""Tables in Markdown, and for terminals.

There, what does not fit side by side goes into a table below, and no word is broken.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDEST = 28
"""Characters of a cell from which on it is broken between words."""

_GAP = 2


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""A table of a page.

    >>> markdown(["name", "a"], [["one", "1"]])
    '| name | a |\n| --- | --- |\n| one | 1 |'
    """
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def show(
    console: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    caption: str = "",
) -> None:
    """Print a table, in several parts where the terminal is narrow; the first column is in each."""
    if title:
        console.print(Text(title, style="italic"))
    for columns in parts(heads, rows, console.width):
        table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
        widths = [_width(heads[column], [row[column] for row in rows]) for column in columns]
        # Heads stay in one line where there is room for all of them.
        roomy = [max(width, len(heads[column])) for width, column in zip(widths, columns, strict=True)]
        fits = sum(roomy) + _GAP * (len(roomy) + 1) <= console.width
        for place, (column, width) in enumerate(zip(columns, roomy if fits else widths, strict=True)):
            width = min(width, console.width - 2 * _GAP)
            # Of a first column with a width rich takes one for the padding.
            table.add_column(heads[column], justify="right" if place else "left", width=width + (place == 0))
        for row in rows:
            table.add_row(*(row[column] for column in columns))
        console.print(table)
    if caption:
        console.print(Text(caption, style="dim"))


def parts(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Which columns go beside each other.

    >>> parts(["name", "a", "b"], [["one", "1" * 20, "2" * 20]], width=40)
    [[0, 1], [0, 2]]
    """
    widths = [_width(head, [row[column] for row in rows]) + _GAP for column, head in enumerate(heads)]
    found: list[list[int]] = [[0]]
    for column in range(1, len(heads)):
        if len(found[-1]) > 1 and sum(widths[own] for own in found[-1]) + widths[column] + _GAP > width:
            found.append([0])
        found[-1].append(column)
    return found


def _width(head: str, cells: Sequence[str]) -> int:
    """In which a column breaks no word, and no cell that is short."""
    whole = [len(cell) for cell in cells if len(cell) <= _WIDEST]
    words = [len(word) for cell in cells for word in cell.split(" ") if len(cell) > _WIDEST]
    broken = [_WIDEST] if any(len(cell) > _WIDEST for cell in cells) else []
    return max([*whole, *words, *broken, *map(len, head.split(" "))], default=1)
