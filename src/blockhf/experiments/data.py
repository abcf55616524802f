"""The handwritten digits that the package carries, and a strict reader of their format.

The digits are a part of MNIST (LeCun & Cortes): the first 6,000 pictures of the training set and the first
1,000 of the test set, in the order of the originals. ``digits/README.md`` tells where they come from.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "digits"

SHA256: Mapping[str, str] = {
    "train-images-idx3-ubyte.gz": "e342b002d020eea956ff6e18bebe83a1a345b70a7fe3103cd2725a607b055903",
    "train-labels-idx1-ubyte.gz": "64c683e3e288d74182ccb48e0a1472523009128cf9bdc6e6cd4be9792523500e",
    "t10k-images-idx3-ubyte.gz": "1107a88c1dcf1bde0925f29c9f47e943757cc4c8190862d72943ef6e4a638a2c",
    "t10k-labels-idx1-ubyte.gz": "59f1210430c03405bf13b88e2855be7b6adbf45b16966f8f6bf11013873bf815",
}
"""The carried files, as they are on disk."""

_UNSIGNED_BYTE = 8
_REINSTALL = "Reinstall blockhf to get its digits back."


@dataclass(frozen=True, eq=False)
class Digits:
    """Pictures of 28 × 28 pixels as rows of 784 numbers in [0, 1], and the digits 0 to 9 they show."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def digits(folder: Path = FOLDER) -> Digits:
    """The carried digits: 6,000 to train on and 1,000 to test with.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is not the one that was carried.

    Example:
        >>> data = digits()
        >>> data.train_images.shape, data.test_images.shape
        (torch.Size([6000, 784]), torch.Size([1000, 784]))
        >>> data.train_labels[:5]
        tensor([5, 0, 4, 1, 9])
    """
    train_images, train_labels, test_images, test_labels = (
        parse_idx(_carried(folder / name), name, num_dims=3 if "images" in name else 1) for name in SHA256
    )
    return Digits(_pixels(train_images), train_labels.long(), _pixels(test_images), test_labels.long())


def parse_idx(packed: bytes, name: str, *, num_dims: int) -> Tensor:
    """The bytes of a gzip-compressed idx file as a tensor of ``uint8``.

    An idx file has two zero bytes, the type of the entries (8 for unsigned bytes), the number of
    dimensions, each dimension as a big-endian 32-bit number, and then the entries, the last index fastest.

    Args:
        packed: The compressed file.
        name: What to call it in errors.
        num_dims: How many dimensions it must have.

    Raises:
        ValueError: It is something else, or cut short, or has bytes to spare.

    Example:
        >>> parse_idx(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9])), "two.gz", num_dims=1)
        tensor([7, 9], dtype=torch.uint8)
    """
    try:
        raw = gzip.decompress(packed)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _bad(name, f"cannot be decompressed ({error})") from error
    magic, start = bytes([0, 0, _UNSIGNED_BYTE, num_dims]), 4 + 4 * num_dims
    if raw[:4] != magic:
        raise _bad(
            name,
            f"begins with {raw[:4].hex() or 'nothing'} and not with {magic.hex()}: "
            f"it is no idx file of bytes in {num_dims} dimension{'' if num_dims == 1 else 's'}",
        )
    if len(raw) < start:
        raise _bad(name, f"ends within its header, after {len(raw)} of {start} bytes")
    shape = struct.unpack(f">{num_dims}I", raw[4:start])
    size = math.prod(shape)
    if len(raw) - start != size:
        raise _bad(name, f"promises {size} bytes of shape {shape} and has {len(raw) - start}")
    if size == 0:
        raise _bad(name, f"is empty: its shape is {shape}")
    return torch.frombuffer(bytearray(raw[start:]), dtype=torch.uint8).view(shape)


def _carried(path: Path) -> bytes:
    try:
        packed = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.name} is not in {path.parent}. {_REINSTALL}") from None
    if (actual := hashlib.sha256(packed).hexdigest()) != SHA256[path.name]:
        raise _bad(path.name, f"was altered: its SHA-256 begins with {actual[:12]}", _REINSTALL)
    return packed


def _pixels(pictures: Tensor) -> Tensor:
    return pictures.flatten(start_dim=1).float().div_(255)


def _bad(name: str, what: str, remedy: str = "Get the file again from where it came.") -> ValueError:
    return ValueError(f"{name} {what}. {remedy}")
