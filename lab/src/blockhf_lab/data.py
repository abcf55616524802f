"""The handwritten digits that the lab carries, all of MNIST, CIFAR-10, and strict readers of them.

The carried digits are a part of MNIST (LeCun & Cortes): the first 6,000 pictures of the training set and the
first 1,000 of the test set, in the order of the originals. ``digits/README.md`` tells where they come from.

MNIST and CIFAR-10 (Krizhevsky) are read from a folder that the user names, or from the cache, which
``blockhf data fetch`` fills. Each file is verified by its sum at each load.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
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


@dataclass(frozen=True)
class Dataset:
    """The files of a set of data.

    Attributes:
        name: As on the command line.
        algorithm: By which the sums are made.
        sums: File name to sum.
        folders: Where, below a folder that the user names, others are used to put the files.
    """

    name: str
    algorithm: str
    sums: Mapping[str, str]
    folders: tuple[str, ...] = ()

    def check(self, file: str, content: bytes, remedy: str) -> None:
        """Raise if the content is not that of the file."""
        actual = hashlib.new(self.algorithm, content, usedforsecurity=False).hexdigest()
        if actual != self.sums[file]:
            raise _bad(
                file,
                f"is not the file of that name in {self.name}: it has {len(content):,} bytes, and its "
                f"{self.algorithm.upper()} begins with {actual[:12]} instead of {self.sums[file][:12]}",
                remedy,
            )


MNIST = Dataset(
    "mnist",
    "md5",
    {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    ("mnist", "MNIST/raw"),
)
CIFAR10 = Dataset(
    "cifar10",
    "sha1",
    {
        "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
        "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
        "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
        "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
        "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
        "test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c",
    },
    ("cifar10", "cifar-10-batches-bin"),
)
DATASETS: Mapping[str, Dataset] = {dataset.name: dataset for dataset in (MNIST, CIFAR10)}

_UNSIGNED_BYTE = 8
_CIFAR_BYTES = 1 + 3 * 32 * 32
_REINSTALL = "Reinstall blockhf to get its digits back."


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pictures with pixels in [0, 1], and the class 0 to 9 of what each shows.

    MNIST's are rows of 784 numbers; those of CIFAR-10 have 3 channels of 32 × 32.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def digits(folder: Path = FOLDER) -> Pictures:
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
        parse_packed_idx(_carried(folder / name), name, num_dims=3 if "images" in name else 1)
        for name in SHA256
    )
    return Pictures(_pixels(train_images), train_labels.long(), _pixels(test_images), test_labels.long())


def mnist(folder: Path | None = None) -> Pictures:
    """All of MNIST: 60,000 to train on and 10,000 to test with.

    Args:
        folder: Where the four idx files are, compressed by gzip or not; none is the cache.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is another than its name says.
    """
    train_images, train_labels, test_images, test_labels = (
        parse_idx(content, name, num_dims=3 if "images" in name else 1)
        for name, content in verified(MNIST, folder)
    )
    return Pictures(_pixels(train_images), train_labels.long(), _pixels(test_images), test_labels.long())


def cifar10(folder: Path | None = None) -> Pictures:
    """All of CIFAR-10: 50,000 to train on and 10,000 to test with.

    Args:
        folder: Where the six files of the binary version are; none is the cache.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is another than its name says.
    """
    *train, test = (parse_cifar(content, name) for name, content in verified(CIFAR10, folder))
    return Pictures(
        torch.cat([images for images, _ in train]),
        torch.cat([labels for _, labels in train]),
        *test,
    )


def cache() -> Path:
    """Where fetched data is kept: ``BLOCKHF_DATA``, or ``blockhf`` in the user's cache."""
    if named := os.environ.get("BLOCKHF_DATA"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockhf"


def verified(dataset: Dataset, folder: Path | None = None) -> Iterator[tuple[str, bytes]]:
    """Each file of a set of data with its content, which is what it should be.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is another than its name says.
    """
    fetch = f"Run: blockhf data fetch {dataset.name}"
    if folder is None:
        places, remedy = [cache() / dataset.name], f"{fetch}, or name a folder that has it with --data."
    else:
        places = [folder, *(folder / below for below in dataset.folders)]
        remedy = f"Get the file again from where it came, or leave out --data and run: {fetch[5:]}."
    for name in dataset.sums:
        path = next(
            (place / file for place in places for file in (name, f"{name}.gz") if (place / file).is_file()),
            None,
        )
        if path is None:
            raise FileNotFoundError(f"{name} is not in {places[0]}. {remedy}")
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = _decompressed(content, path.name)
        dataset.check(name, content, f"It is {path}. {remedy}")
        yield name, content


def parse_cifar(raw: bytes, name: str) -> tuple[Tensor, Tensor]:
    """The bytes of a binary batch of CIFAR-10 as pictures in [0, 1] and labels.

    A picture has a byte for its class and 1,024 for each of red, green and blue.

    Raises:
        ValueError: It is something else.
    """
    if not raw or len(raw) % _CIFAR_BYTES:
        raise _bad(name, f"has {len(raw):,} bytes, which is no multiple of {_CIFAR_BYTES:,}")
    rows = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, _CIFAR_BYTES)
    labels = rows[:, 0].long()
    if labels.max() > 9:
        raise _bad(name, f"has a picture of class {int(labels.max())}, and there are 0 to 9")
    return rows[:, 1:].float().div_(255).view(-1, 3, 32, 32), labels


def parse_packed_idx(packed: bytes, name: str, *, num_dims: int) -> Tensor:
    """As ``parse_idx``, of the file compressed by gzip.

    Example:
        >>> parse_packed_idx(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9])), "two.gz", num_dims=1)
        tensor([7, 9], dtype=torch.uint8)
    """
    return parse_idx(_decompressed(packed, name), name, num_dims=num_dims)


def parse_idx(raw: bytes, name: str, *, num_dims: int) -> Tensor:
    """The bytes of an idx file as a tensor of ``uint8``.

    An idx file has two zero bytes, the type of the entries (8 for unsigned bytes), the number of
    dimensions, each dimension as a big-endian 32-bit number, and then the entries, the last index fastest.

    Args:
        raw: The file.
        name: What to call it in errors.
        num_dims: How many dimensions it must have.

    Raises:
        ValueError: It is something else, or cut short, or has bytes to spare.
    """
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


def _decompressed(packed: bytes, name: str) -> bytes:
    try:
        return gzip.decompress(packed)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _bad(name, f"cannot be decompressed ({error})") from error


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
