"""The code of docs/physics.md runs and finds the solution."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[1] / "docs" / "physics.md"


def test_the_page_finds_the_solution() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "physics"}
    kept = torch.get_default_dtype()
    try:
        exec(compile(code, str(PAGE), "exec"), names)
    finally:
        torch.set_default_dtype(kept)
    assert float(names["loss"]) < 1e-5
    assert float(names["error"]) < 1e-3
