"""The core tests on other versions of torch and Python, each in an environment of its own.

``python -m blockhf_lab.versions run`` makes the environments one after the other with uv, and deletes each
after use: torch's Linux wheels bring several GB of CUDA along. ``here`` runs the tests in the environment
that calls it. Both write a record for each pair of versions; ``page`` makes docs/versions.md of them.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import blockhf
from blockhf_lab import files

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / "results" / "versions"

CORE = (
    "tests/linalg/test_conjugate_gradient.py",
    "tests/linalg/test_exact.py",
    "tests/linalg/test_solvers.py",
    "tests/curvature/test_linearize.py",
    "tests/curvature/test_traced.py",
    "tests/preconditioners/test_kronecker.py",
    "tests/policies/test_damping.py",
    "tests/policies/test_search.py",
    "tests/policies/test_subspace.py",
    "tests/optimizer/test_golden.py",
    "tests/test_batches.py",
    "tests/test_blocks.py",
    "tests/test_isolation.py",
    "tests/test_objective.py",
    "tests/test_point.py",
    "tests/test_torch.py",
)
"""Tests of the library by itself, of each room some, that take a minute."""

NEEDED = ("hypothesis", "numpy", "pytest", "pytest-timeout", "scipy", "setuptools")
"""What these tests import, besides torch."""

PAIRS = (
    ("2.6.0", "3.10"),
    ("2.6.0", "3.11"),
    ("2.6.0", "3.13"),
    ("2.9.1", "3.11"),
    ("2.9.1", "3.13"),
    ("newest", "3.11"),
    ("newest", "3.13"),
)
"""Versions of torch and of Python: the lowest, one in between, and the newest."""


def losses(num_steps: int = 5) -> list[float]:
    """The first losses of the default method on a small task, in double precision."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 4, generator=generator, dtype=torch.float64)
    targets = inputs.prod(1, keepdim=True).tanh()
    model = nn.Sequential(
        nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)
    ).double()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) / 4)

    def objective(batch: Any) -> Any:
        outputs = model(batch[0])
        return outputs, nn.functional.mse_loss(outputs, batch[1])

    optimizer = blockhf.BlockHF(blockhf.blocks.by_layer(model))
    return [float(optimizer.step(objective, (inputs, targets))) for _ in range(num_steps)]


def here(tests: Sequence[str] = CORE) -> dict[str, Any]:
    """Run the core tests in this environment; returns the record."""
    import torch

    before = _cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
        command += [
            "-c",
            "pyproject.toml",
            "--override-ini",
            "addopts=--strict-markers",
            f"--junitxml={results}",
            *tests,
        ]
        subprocess.run(command, cwd=ROOT, check=False)
        counted = _counts(results)
    return {
        "blockhf": blockhf.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        **counted,
        "cpu_seconds": round(_cpu_seconds() - before, 1),
        "losses": losses(),
    }


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _counts(results: Path) -> dict[str, Any]:
    if not results.exists():
        raise ValueError("pytest wrote no results: see what it printed above.")
    cases = list(xml.etree.ElementTree.parse(results).iter("testcase"))
    if not cases:
        raise ValueError("pytest ran no test: see what it printed above.")
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [skip.get("message", "") for case in cases for skip in case.iter("skipped")]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": sorted(f"{case.get('classname')}::{case.get('name')}" for case in failed),
        "skipped": {reason: skipped.count(reason) for reason in sorted(set(skipped))},
    }


def record_name(record: Mapping[str, Any]) -> str:
    """The file of a record; versions are told to the figure that matters."""
    torch_version = str(record["torch"]).partition("+")[0]
    return f"torch-{torch_version}-python-{'.'.join(str(record['python']).split('.')[:2])}.json"


def run(pairs: Sequence[tuple[str, str]], folder: Path, uv: str) -> bool:
    """Make an environment for each pair, run the tests in it, keep the record, delete the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    fine = True
    for torch_version, python_version in pairs:
        print(f"torch {torch_version}, Python {python_version}", flush=True)
        with tempfile.TemporaryDirectory() as room:
            interpreter = Path(room) / "venv" / "bin" / "python"
            environment = {**os.environ, "UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR", f"{room}/cache")}
            wanted = "torch" if torch_version == "newest" else f"torch=={torch_version}"
            install = [uv, "pip", "install", "--quiet", "--python", str(interpreter), wanted, *NEEDED]
            make = [uv, "venv", "--quiet", "--python", python_version, str(interpreter.parents[1])]
            if any(subprocess.run(own, env=environment, check=False).returncode for own in (make, install)):
                print("  left out: no environment could be made; uv takes Pythons from PATH, or loads them")
                fine = False
                continue
            record = Path(room) / "record.json"
            environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT / 'lab' / 'src'}"
            test = [str(interpreter), "-m", "blockhf_lab.versions", "here", "--record", str(record)]
            subprocess.run(test, env=environment, check=False)
            if not record.exists():
                fine = False
                continue
            found = files.read_json(record)
            shutil.copy(record, folder / record_name(found))
            fine = fine and not found["failed"]
    return fine


def page(folder: Path) -> str:
    """What docs/versions.md says, from the records.

    Raises:
        ValueError: There is no record.
    """
    found = [files.read_json(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise ValueError(f"There is no record in {folder}. Run: make test-versions")
    found.sort(key=lambda record: [_numbers(record["torch"]), _numbers(record["python"])])
    rows = [
        f"| {record['torch']} | {record['python']} | {record['passed']:,} | {len(record['failed'])} "
        f"| {sum(record['skipped'].values())} | {record['losses'][-1]:.10f} | {record['cpu_seconds']:.0f} s |"
        for record in found
    ]
    text = [
        "# Versions",
        "",
        "`make test-versions` runs the core tests of the library on several versions of torch and Python, "
        "each in a new environment, and makes this page from its records in `results/versions/`.",
        "",
        "| torch | Python | passed | failed | skipped | loss after four steps | CPU time |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        "The loss is that of the default method on a small task in double precision, before the fifth step. "
        "Records with other numbers of tests are of other commits, whose default may have another loss.",
        *_listed("Skipped", [(reason, record) for record in found for reason in record["skipped"]]),
        *_listed("Failed", [(name, record) for record in found for name in record["failed"]]),
        "",
        "What differs between versions of torch is in one file, `src/blockhf/_torch.py`. Where torch lacks a "
        "private name, the library does without: products by double backward instead of traced ones, "
        "uncompiled instead of compiled ones, diagonals instead of Kronecker factors. Tests take each name "
        "away and look.",
        "",
    ]
    return "\n".join(text)


def _listed(title: str, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    where: dict[str, list[str]] = {}
    for what, record in entries:
        where.setdefault(what, []).append(f"torch {record['torch']} on Python {record['python']}")
    lines = [f"- {what} ({', '.join(places)})" for what, places in where.items()]
    return ["", f"{title}:", "", *lines] if lines else []


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.partition("+")[0].split(".")]


def main() -> None:
    """Run the command that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m blockhf_lab.versions", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    own = commands.add_parser("here", help="the tests in this environment")
    own.add_argument("--record", type=Path, required=True, help="the file to write")
    others = commands.add_parser("run", help="the tests in environments of their own")
    others.add_argument("--pairs", nargs="*", help="such as 2.6.0/3.11 newest/3.13; all by default")
    others.add_argument("--uv", default="uv", help="the program that makes environments")
    commands.add_parser("page", help="docs/versions.md from the records")
    wanted = parser.parse_args()
    if wanted.command == "here":
        record = here()
        files.write(wanted.record, files.to_json(record, indent=1))
        sys.exit(bool(record["failed"]))
    if wanted.command == "run":
        pairs = [tuple(pair.split("/")) for pair in wanted.pairs] if wanted.pairs else PAIRS
        fine = run([(str(torch), str(python)) for torch, python in pairs], RECORDS, wanted.uv)
        sys.exit(not fine)
    files.write(ROOT / "docs" / "versions.md", page(RECORDS).encode())


if __name__ == "__main__":
    main()
