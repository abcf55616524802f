"""The first program of a page, as a stranger would copy it: ``python tests/readme.py README.md``."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def first_program(page: Path) -> str:
    """The first Python block, unchanged."""
    found = re.search(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"{page} has no Python block.")
    return found[1]


if __name__ == "__main__":
    print(first_program(Path(sys.argv[1])), end="")
