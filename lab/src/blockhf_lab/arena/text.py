"""Text for the language models: sources of Python's own standard library, which are on every machine."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

_MOST_BYTES = 3_000_000
VOCABULARY = 96
"""Characters: those that ASCII prints, the newline among them; all others are read as a tilde."""


@functools.cache
def characters() -> tuple[Tensor, str]:
    """The modules in the order of their names, as numbers below ``VOCABULARY``, and the SHA-256 of the text.

    Versions of Python differ in it, so records have the sum.
    """
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = b"".join(path.read_bytes() for path in paths)[:_MOST_BYTES]
    numbers = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    printed = (numbers >= 32) & (numbers < 127)
    numbers = torch.where(printed, numbers - 31, torch.where(numbers == 10, 0, VOCABULARY - 1))
    return numbers, hashlib.sha256(content).hexdigest()


def sequences(length: int) -> tuple[Tensor, str]:
    """The text in pieces of ``length + 1`` characters, each the next one's neighbour by one character."""
    numbers, checksum = characters()
    number = (len(numbers) - 1) // length
    starts = torch.arange(number)[:, None] * length
    return numbers[starts + torch.arange(length + 1)], checksum
