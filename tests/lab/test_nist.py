"""NIST's nonlinear regressions: the data, the models, and what ``blockhf bench nist`` finds."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import blockhf
from blockhf_lab import nist
from blockhf_lab.nist import bench


@pytest.mark.parametrize("name", nist.NAMES)
def test_the_certified_parameters_have_the_certified_squares(name: str) -> None:
    problem = nist.load(name)
    found = problem.residuals(torch.tensor(problem.certified, dtype=torch.float64)).square().sum()
    # Lanczos1 has no noise: its squares are those of rounding in the certified digits.
    assert float(found) == pytest.approx(problem.squares, rel=1e-8, abs=1e-20)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("name", nist.NAMES)
def test_every_problem_is_solved_to_six_digits(name: str, start: int) -> None:
    problem = nist.load(name)
    params = torch.tensor(problem.starts[start], dtype=torch.float64, requires_grad=True)
    result = blockhf.least_squares(lambda: problem.residuals(params), [params])
    assert result.success, result.status
    assert nist.digits(params.tolist(), problem.certified) >= 6


def test_the_command_writes_records_and_a_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- summary --><!-- end -->\n<!-- nist --><!-- end -->\n")
    console = Console(file=io.StringIO(), width=200)
    bench.run(["Misra1a", "BoxBOD"], tmp_path / "nist.json", page, console)
    record = json.loads((tmp_path / "nist.json").read_text())
    assert [own["name"] for own in record["problems"]] == ["Misra1a", "BoxBOD"]
    assert record["problems"][0]["blockhf"][0]["digits"] > 6
    text = page.read_text()
    assert "`blockhf.least_squares` 2 of 2" in text
    assert "scipy's `lm` 1 of 2" in text  # which fails on BoxBOD from afar
    assert "| Misra1a | lower | 2 | 14 |" in text
    with pytest.raises(ValueError, match="There is no problem 'Misra2'"):
        bench.run(["Misra2"], None, None, console)
