"""``blockhf bench nist``: certified digits by ``blockhf.least_squares`` and by scipy's ``lm``."""

from __future__ import annotations

import importlib
import importlib.util
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.func import jacrev

import blockhf
from blockhf_lab import files, runs, tables
from blockhf_lab.claims_page import fill
from blockhf_lab.nist.problems import NAMES, Problem, digits, load

ENOUGH = 6.0
"""Digits that count as solved."""

_TOLERANCE = 1e-15  # scipy's tolerances, as small as it takes them
_MOST_EVALUATIONS = 5000
_HEADS = ["problem", "level", "parameters", "points"]


def run(names: Sequence[str] | None, out: Path | None, page: Path | None, console: Console) -> None:
    """Solve the problems, and show and write what came of it."""
    problems = [load(name) for name in names or NAMES]
    has_scipy = importlib.util.find_spec("scipy") is not None
    if not has_scipy:
        console.print("scipy is not installed, so its columns are left out.")
    record = {
        "environment": {**runs.environment(), "scipy": _scipy_version() if has_scipy else None},
        "problems": [measure(problem, has_scipy) for problem in problems],
    }
    heads, rows = table(record)
    tables.show(console, heads, rows)
    console.print(summary(record))
    if out is not None:
        files.write(out, files.to_json(record, indent=1))
    if page is not None:
        text = "\n".join([_line(heads), _line(["---"] * len(heads)), *map(_line, rows)])
        filled = fill(page.read_text(encoding="utf-8"), {"summary": summary(record), "nist": text})
        files.write(page, filled.encode())


def measure(problem: Problem, has_scipy: bool) -> dict[str, Any]:
    """Both starts by both."""
    found: dict[str, Any] = {
        "name": problem.name,
        "level": problem.level,
        "parameters": len(problem.certified),
        "points": len(problem.y),
        "blockhf": [_ours(problem, start) for start in problem.starts],
    }
    if has_scipy:
        found["scipy"] = [_scipys(problem, start) for start in problem.starts]
    return found


def _ours(problem: Problem, start: Sequence[float]) -> dict[str, Any]:
    params = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    before = time.process_time()
    result = blockhf.least_squares(lambda: problem.residuals(params), [params])
    return {
        "digits": digits(params.tolist(), problem.certified),
        "evaluations": result.num_evaluations,
        "steps": result.num_steps,
        "seconds": time.process_time() - before,
        "status": result.status,
    }


def _scipys(problem: Problem, start: Sequence[float]) -> dict[str, Any]:
    """MINPACK's Levenberg-Marquardt with its own scaling and the exact Jacobian."""
    optimize = importlib.import_module("scipy.optimize")
    before = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of overflows on the way
            found = optimize.least_squares(
                lambda params: problem.residuals(torch.as_tensor(params)).numpy(),
                start,
                jac=lambda params: jacrev(problem.residuals)(torch.as_tensor(params)).numpy(),
                method="lm",
                x_scale="jac",
                xtol=_TOLERANCE,
                ftol=_TOLERANCE,
                gtol=_TOLERANCE,
                max_nfev=_MOST_EVALUATIONS,
            )
    except ValueError as error:  # residuals that are not finite
        return {"digits": 0.0, "evaluations": None, "seconds": None, "status": str(error)}
    return {
        "digits": digits(found.x.tolist(), problem.certified),
        "evaluations": int(found.nfev),
        "seconds": time.process_time() - before,
        "status": str(found.message),
    }


def table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A row for each problem: digits and evaluations from each start."""
    solvers = [name for name in ("blockhf", "scipy") if name in record["problems"][0]]
    heads = _HEADS + [f"{name}, start {number}" for name in solvers for number in (1, 2)]
    rows = [
        [
            *(str(own[key]) for key in ("name", "level", "parameters", "points")),
            *(_cell(each) for name in solvers for each in own[name]),
        ]
        for own in record["problems"]
    ]
    return heads, rows


def summary(record: dict[str, Any]) -> str:
    """How many problems each solved from both starts."""
    found = record["problems"]
    parts = []
    for name, words in (("blockhf", "`blockhf.least_squares`"), ("scipy", "scipy's `lm`")):
        if name in found[0]:
            solved = sum(all(each["digits"] >= ENOUGH for each in own[name]) for own in found)
            parts.append(f"{words} {solved} of {len(found)}")
    return f"To {ENOUGH:.0f} digits of all parameters, from both starts: {', '.join(parts)}."


def _cell(each: dict[str, Any]) -> str:
    number = f"{each['digits']:.1f}"
    shown = number if each["digits"] >= ENOUGH else f"**{number}**"
    return shown if each["evaluations"] is None else f"{shown} ({each['evaluations']})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _scipy_version() -> str:
    return str(importlib.import_module("scipy").__version__)
