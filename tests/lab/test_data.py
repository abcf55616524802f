"""The carried digits are what they were, and the reader takes nothing else."""

from __future__ import annotations

import gzip
import shutil
import struct
from pathlib import Path

import pytest
import torch

from blockhf_lab import data


@pytest.fixture(scope="module")
def digits() -> data.Pictures:
    return data.digits()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(data.FOLDER, tmp_path / "digits"))


def test_sizes_types_and_ranges(digits: data.Pictures) -> None:
    for images, labels, number in (
        (digits.train_images, digits.train_labels, 6000),
        (digits.test_images, digits.test_labels, 1000),
    ):
        assert images.shape == (number, 784)
        assert images.dtype == torch.float32
        assert images.min() == 0
        assert images.max() == 1
        assert labels.shape == (number,)
        assert labels.dtype == torch.int64
        assert labels.unique().tolist() == list(range(10))


def test_they_are_the_front_of_mnist(digits: data.Pictures) -> None:
    assert digits.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert digits.test_labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert digits.train_images.mean() == pytest.approx(0.1307, abs=2e-3)  # MNIST's, as is known
    assert torch.equal(digits.train_images, (digits.train_images * 255).round() / 255)


def test_the_folder_is_small_and_names_its_source() -> None:
    files = list(data.FOLDER.iterdir())
    assert {file.name for file in files} == {*data.SHA256, "README.md"}
    assert sum(file.stat().st_size for file in files) <= 1_500_000
    note = (data.FOLDER / "README.md").read_text(encoding="utf-8")
    for word in ("MNIST", "LeCun", "Cortes", "ShareAlike 3.0"):
        assert word in note


@pytest.mark.parametrize("name", data.SHA256)
def test_the_bytes_can_be_made_again(name: str) -> None:
    """Neither time nor file name is in the gzip header."""
    header = (data.FOLDER / name).read_bytes()[:10]
    assert header[3] == 0
    assert header[4:8] == bytes(4)


@pytest.mark.parametrize("name", data.SHA256)
@pytest.mark.parametrize("damage", ["cut", "flipped", "longer", "empty"])
def test_a_damaged_file_is_named(folder: Path, name: str, damage: str) -> None:
    path = folder / name
    packed = bytearray(path.read_bytes())
    if damage == "cut":
        del packed[-5:]
    elif damage == "flipped":
        packed[len(packed) // 2] ^= 1
    elif damage == "longer":
        packed.append(0)
    else:
        packed.clear()
    path.write_bytes(packed)
    with pytest.raises(ValueError, match=rf"{name} was altered.*Reinstall"):
        data.digits(folder)


def test_another_valid_file_in_its_place_is_refused(folder: Path) -> None:
    shutil.copy(folder / "t10k-labels-idx1-ubyte.gz", folder / "train-labels-idx1-ubyte.gz")
    with pytest.raises(ValueError, match=r"train-labels.*was altered"):
        data.digits(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"t10k-labels.*Reinstall"):
        data.digits(folder)


def _idx(*shape: int, magic: bytes = b"\0\0\x08", num_dims: int | None = None, body: bytes) -> bytes:
    dims = len(shape) if num_dims is None else num_dims
    return gzip.compress(magic + bytes([dims]) + struct.pack(f">{len(shape)}I", *shape) + body)


def test_the_reader_keeps_the_order() -> None:
    found = data.parse_packed_idx(_idx(2, 1, 3, body=bytes(range(6))), "six", num_dims=3)
    assert found.tolist() == [[[0, 1, 2]], [[3, 4, 5]]]


@pytest.mark.parametrize(
    ("packed", "what"),
    [
        pytest.param(_idx(5, body=bytes(4)), r"promises 5 bytes of shape \(5,\) and has 4", id="too short"),
        pytest.param(_idx(5, body=bytes(6)), r"promises 5 bytes of shape \(5,\) and has 6", id="too long"),
        pytest.param(_idx(2**32 - 1, body=bytes(6)), "promises 4294967295 bytes", id="absurd size"),
        pytest.param(_idx(0, body=b""), "is empty", id="no samples"),
        pytest.param(_idx(5, body=bytes(5), magic=b"\0\0\x0d"), "begins with 00000d01", id="floats"),
        pytest.param(_idx(5, body=bytes(5), magic=b"\1\0\x08"), "begins with 01000801", id="magic"),
        pytest.param(_idx(5, 1, body=bytes(5)), "begins with 00000802", id="two dimensions"),
        pytest.param(
            gzip.compress(b"\0\0\x08\1\0\0"),
            "ends within its header, after 6 of 8 bytes",
            id="cut in the header",
        ),
        pytest.param(gzip.compress(b""), "begins with nothing", id="empty inside"),
        pytest.param(b"", "begins with nothing", id="empty"),
        pytest.param(b"<html>404</html>", "cannot be decompressed", id="no gzip"),
        pytest.param(_idx(5, body=bytes(5))[:-6], "cannot be decompressed", id="cut in the trailer"),
        pytest.param(_idx(5, body=bytes(5))[:15], "cannot be decompressed", id="cut in the middle"),
        pytest.param(_idx(5, body=bytes(5)) + b"more", "cannot be decompressed", id="surplus"),
    ],
)
def test_the_reader_says_what_is_wrong(packed: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=rf"labels\.gz {what}.*Get the file again"):
        data.parse_packed_idx(packed, "labels.gz", num_dims=1)
