"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write(path: Path, content: bytes, *, keep: Path | None = None) -> None:
    """Write all of the file or none of it; what it was before is kept under another name, if one is given."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            os.replace(path, keep)
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
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}.") from error


Shape = Any
"""What a value should be like: see ``expect``."""

_WORDS = {float: "a number", int: "a whole number", str: "a text", list: "a list", dict: "an object"}


def expect(value: Any, shape: Shape, name: str = "it") -> None:
    """Check what was read from a file that people can edit.

    Args:
        value: A value of JSON.
        shape: ``float`` for a finite number, ``int``, ``str``, ``list``, ``dict`` or ``None``; ``[shape]``
            for a list of such; a tuple for either of several; a dictionary for an object that has these keys
            (with a question mark: may have them) and ``...`` for its others.
        name: Of the value, for the message.

    Raises:
        ValueError: It is something else; the message says what and where.

    >>> expect({"seed": 1, "points": [{"ge": 2.5}]}, {"seed": int, "points": [{...: float}]})
    >>> expect({"seed": 1, "points": [{"ge": "x"}]}, {"seed": int, "points": [{...: float}]})
    Traceback (most recent call last):
        ...
    ValueError: points[0].ge is 'x', but must be a number
    """
    if isinstance(shape, tuple):
        if not any(_is_like(value, each) for each in shape):
            raise ValueError(f"{name} is {_short(value)}, but must be {' or '.join(map(_words, shape))}")
        return
    kind = shape if shape is None or isinstance(shape, type) else type(shape)
    if not _is_of(value, kind):
        raise ValueError(f"{name} is {_short(value)}, but must be {_words(kind)}")
    if isinstance(shape, list):
        for place, item in enumerate(value):
            expect(item, shape[0], f"{name}[{place}]")
    elif isinstance(shape, dict):
        inside = "" if name == "it" else f"{name}."
        named = {key.rstrip("?"): own for key, own in shape.items() if key is not ...}
        for key in named:
            if key not in value and f"{key}?" not in shape:
                raise ValueError(f"{name} has no {key}")
        for key, item in value.items():
            if key in named or ... in shape:
                expect(item, named.get(key, shape.get(...)), f"{inside}{key}")


def _is_like(value: Any, shape: Shape) -> bool:
    try:
        expect(value, shape)
    except ValueError:
        return False
    return True


def _is_of(value: Any, kind: type | None) -> bool:
    if kind is None:
        return value is None
    if isinstance(value, bool):
        return False
    # Beyond this, arithmetic overflows; no count and no loss is there.
    if isinstance(value, (int, float)):
        return abs(value) < 1e300 and (kind is float or (kind is int and isinstance(value, int)))
    return isinstance(value, kind)


def _words(shape: Shape) -> str:
    if shape is None:
        return "null"
    return _WORDS[shape if isinstance(shape, type) else type(shape)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
