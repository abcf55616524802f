"""What is in the two distributions: the library has no experiments and no data, the lab has the digits."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import blockhf
import blockhf_lab
from blockhf_lab.data import SHA256
from children import PATIENCE, starts_processes

ROOT = Path(__file__).parents[1]

pytestmark = starts_processes


def built(project: Path, folder: Path) -> dict[str, str]:
    """The files in a project's wheel, with the text of its metadata.

    Setuptools alone builds it, so nothing is downloaded. It writes beside the sources, so these are copied.
    """
    copy = folder / "project"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(project / name, copy)
    shutil.copytree(project / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=copy, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name).decode() if ".dist-info/" in name else "" for name in archive.namelist()
        }


def modules(project: Path) -> set[str]:
    return {path.relative_to(project / "src").as_posix() for path in (project / "src").rglob("*.py")}


def metadata(files: dict[str, str], name: str) -> str:
    (text,) = (text for path, text in files.items() if path.endswith(f".dist-info/{name}"))
    return text


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return built(ROOT, tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return built(ROOT / "lab", tmp_path_factory.mktemp("lab"))


def test_the_library_holds_its_modules_alone(library: dict[str, str]) -> None:
    assert {name for name in library if ".dist-info/" not in name} == modules(ROOT) | {"blockhf/py.typed"}
    assert not any("experiments" in name or "digits" in name for name in library)


def test_the_library_depends_on_torch_alone(library: dict[str, str]) -> None:
    needed = re.findall("^Requires-Dist: ([a-z]+)[^;]*$", metadata(library, "METADATA"), re.MULTILINE)
    assert needed == ["torch"]


def test_the_lab_holds_the_digits(lab: dict[str, str]) -> None:
    digits = {f"blockhf_lab/digits/{name}" for name in ("README.md", *SHA256)}
    held = {name for name in lab if ".dist-info/" not in name}
    assert held == modules(ROOT / "lab") | digits | {"blockhf_lab/py.typed"}
    assert metadata(lab, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_the_command_is_the_librarys_and_finds_the_lab(library: dict[str, str], lab: dict[str, str]) -> None:
    assert metadata(library, "entry_points.txt").split("\n")[:2] == [
        "[console_scripts]",
        "blockhf = blockhf.__main__:main",
    ]
    assert metadata(lab, "entry_points.txt").split("\n")[:2] == [
        "[blockhf.commands]",
        "main = blockhf_lab.cli:main",
    ]


def test_both_have_one_version(library: dict[str, str], lab: dict[str, str]) -> None:
    assert blockhf_lab.__version__ == blockhf.__version__
    for files in (library, lab):
        assert f"\nVersion: {blockhf.__version__}\n" in metadata(files, "METADATA")
