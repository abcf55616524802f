"""Tables fit a terminal of 80 columns and break no word."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from blockhf_lab import claims_page, commands, tables

ROOT = Path(__file__).parents[2]
ROWS = [
    ["paper (HF), curvature 3000", "16", "335", "finished"],
    ["LBFGS, batch 6000, history_size 50, line_search_fn strong_wolfe, lr 0.5", "7", "149", "diverged"],
]


def shown(width: int, rows: list[list[str]]) -> str:
    buffer = io.StringIO()
    heads = ["optimizer", "updates", "gradient equivalents", "end"]
    tables.show(Console(file=buffer, width=width), heads, rows, title="A title", caption="A caption")
    return buffer.getvalue()


@pytest.mark.parametrize("width", [50, 60, 80, 200])
def test_tables_fit_and_keep_their_words(width: int) -> None:
    text = shown(width, ROWS)
    assert max(map(len, text.splitlines())) <= width
    words = set(text.split())
    assert {word for row in ROWS for cell in row for word in cell.split()} <= words
    assert {"A", "title", "caption", "equivalents"} <= words


def test_what_does_not_fit_goes_below() -> None:
    assert shown(200, ROWS).count("optimizer") == 1
    assert shown(50, ROWS).count("optimizer") == 3


def test_the_records_of_this_repository_fit_80_columns(tmp_path: Path) -> None:
    buffer = io.StringIO()
    console = Console(file=buffer, width=80)
    claims_page.run(ROOT / "results/claims", ROOT / "results/long", None, console)
    commands._show([commands.Comparison.read(ROOT / "results/race-autoencoder/comparison.json")], console)
    assert max(map(len, buffer.getvalue().splitlines())) <= 80
    assert "…" not in buffer.getvalue()
    assert {"curvature", "evaluations", "Precondition", "strong_wolfe,"} <= set(buffer.getvalue().split())
