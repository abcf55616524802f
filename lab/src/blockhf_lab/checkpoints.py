"""Checkpoints of a run: sealed with a checksum, written whole or not at all, and the one before kept.

A checkpoint is what ``torch.save`` writes, a zip archive, whose comment is the SHA-256 sum of all before it.
``torch.load`` reads it as it is; ``read`` compares the sum first, because torch looks at none: a changed
byte in a tensor would be loaded as a parameter.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from blockhf_lab import files

NEWEST = "checkpoint.pt"
PREVIOUS = "checkpoint.previous.pt"
_DAMAGED = "checkpoint.damaged.pt"
_FORMAT = 2
_MARK = b"sha256:"
_LENGTH = len(_MARK) + 64


class Damaged(ValueError):
    """A file that is not what was written."""


def save(folder: Path, content: dict[str, Any]) -> None:
    """Make this the newest checkpoint and the newest the previous one.

    Killed at any moment, it leaves at least one of the two whole.
    """
    file = io.BytesIO()
    torch.save({"format": _FORMAT, **content}, file)
    files.write(folder / NEWEST, sealed(file.getvalue()), keep=folder / PREVIOUS)


def read(path: Path) -> dict[str, Any]:
    """What was saved.

    Checkpoints of earlier versions have neither a sum nor a format; they are read as they are.

    Raises:
        Damaged: It is not as it was saved.
    """
    content = path.read_bytes()
    is_sealed = content[-_LENGTH:-64] == _MARK
    if is_sealed and _sum(content[:-_LENGTH]) != content[-64:]:
        raise Damaged("it is damaged: its checksum does not match")
    try:
        found = torch.load(io.BytesIO(content), weights_only=True)
    except (
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,
        OSError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        what = next(iter(str(error).splitlines()), type(error).__name__)
        raise Damaged(f"it is damaged: {what}") from error
    if not isinstance(found, dict) or ("format" in found and not is_sealed):
        raise Damaged("it is damaged: its checksum is missing")
    return found


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that it never takes the place of the one before it."""
    os.replace(path, path.with_name(_DAMAGED))


def sealed(archive: bytes) -> bytes:
    """A zip archive without a comment, with its sum as the comment."""
    assert archive[-2:] == b"\0\0"  # the length of the comment, which ends the archive
    content = archive[:-2] + _LENGTH.to_bytes(2, "little")
    return content + _MARK + _sum(content)


def _sum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
