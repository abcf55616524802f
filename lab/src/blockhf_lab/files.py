"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write(path: Path, content: bytes) -> None:
    """Write all of the file or none of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def to_json(content: Any, *, indent: int | None = None) -> bytes:
    r"""As JSON, with ``null`` for numbers that JSON does not have.

    >>> to_json({"loss": float("nan"), "steps": (1, 2)})
    b'{"loss": null, "steps": [1, 2]}\n'
    """
    return (json.dumps(_finite(content), allow_nan=False, ensure_ascii=False, indent=indent) + "\n").encode()


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ValueError: It is none; the error names the file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}.") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
