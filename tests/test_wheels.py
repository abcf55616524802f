"""What is in the distributions: the library has no experiments and no data, the lab has the digits."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import blockhf
import blockhf_lab
from blockhf_lab.data import SHA256
from children import PATIENCE, starts_processes
from readme import first_program

ROOT = Path(__file__).parents[1]

pytestmark = starts_processes


def wheel_of(project: Path, folder: Path) -> Path:
    """The wheel of a project.

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
    return wheel


def built(project: Path, folder: Path) -> dict[str, str]:
    """The files in a project's wheel, with the text of its metadata."""
    with zipfile.ZipFile(wheel_of(project, folder)) as archive:
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
    tables = {f"blockhf_lab/{name}.json" for name in ("arena/tuned", "nist/problems")}
    assert held == modules(ROOT / "lab") | digits | tables | {"blockhf_lab/py.typed"}
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


NOT_SOURCES = (
    "__pycache__",
    "*.egg-info",
    ".git",
    ".venv",
    ".*_cache",
    ".hypothesis",
    "build",
    "dist",
    "site",
    "runs",
)


def test_the_source_distribution_holds_all_that_the_tests_read(tmp_path: Path) -> None:
    copy = tmp_path / "project"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    there = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / f"blockhf-{blockhf.__version__}.tar.gz") as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    private = {name for name in there if name.startswith((".ci/", ".gitignore", ".gitattributes"))}
    assert there - private - held == set()
    assert not {name for name in held if name.endswith(".pyc")}


def test_pages_outside_of_the_metadata_agree_with_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    repository = project["urls"]["Repository"]
    assert lab["urls"]["Repository"] == repository
    assert f"\nrepository-code: {repository}\n" in citation
    assert f"\nversion: {blockhf.__version__}\n" in citation
    (released,) = re.findall(r"^date-released: (.*)$", citation, re.MULTILINE)
    assert f"\n## {blockhf.__version__} - {released}\n" in (ROOT / "CHANGELOG.md").read_text()
    least = project["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {least}" in project["classifiers"]


def test_links_of_the_readme_lead_to_files_that_are_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    repository = project["urls"]["Repository"]
    raw = repository.replace("github.com", "raw.githubusercontent.com") + "/main/"
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text())
    files = [
        link.removeprefix(start)
        for start in (f"{repository}/blob/main/", raw)
        for link in links
        if start in link
    ]
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_the_readmes_program_runs_unchanged_with_the_wheel_alone(tmp_path: Path) -> None:
    """In a new environment, with what the wheel asks for and nothing else: not even numpy."""

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "wheel").mkdir()
    wheel = wheel_of(ROOT, tmp_path / "wheel")
    program = tmp_path / "program.py"
    program.write_text(first_program(ROOT / "README.md"))
    run(sys.executable, "-m", "venv", tmp_path / "alone")
    python = tmp_path / "alone" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    there = run(python, "-m", "pip", "list", "--format=freeze")
    assert "blockhf==" in there
    assert not re.search("^(blockhf[-_]lab|numpy)==", there, re.MULTILINE)
    assert run(tmp_path / "alone" / "bin" / "blockhf", "--version") == f"blockhf {blockhf.__version__}\n"
    printed = run(python, program).splitlines()
    assert printed[0].startswith("step 1: loss ")
    losses = [float(line.split()[3].rstrip(",;")) for line in printed if line.startswith("step ")]
    assert losses[-1] < 0.1 * losses[0]
