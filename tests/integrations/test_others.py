"""Ignite, TensorBoard and plain loops."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from blockhf import StepReport
from blockhf.integrations import data_mesh, scalars
from blockhf.integrations.tensorboard import write_report
from integration_tasks import run

pytestmark = pytest.mark.filterwarnings("ignore")

TINY = ("--samples", "800", "--width", "16")


def test_an_ignite_engine_trains_and_resumes_to_equal_parameters(tmp_path: Path) -> None:
    pytest.importorskip("ignite")
    own = run("trainers/ignite_engine", *TINY, "--epochs", "4", "--folder", str(tmp_path))
    assert own["equal"]
    assert len(own["losses"]) == 16
    assert own["losses"][-1] < 0.8 * own["losses"][0]


def test_a_plain_loop_with_schedule_and_average_resumes_to_equal_parameters() -> None:
    own = run("trainers/plain_loop", *TINY, "--steps", "8")
    assert own["equal"]
    assert own["losses"][-1] < 0.8 * own["losses"][0]
    assert own["average"] < own["losses"][0]


def test_reports_are_curves_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run("trainers/plain_loop", *TINY, "--steps", "8", "--log", str(tmp_path))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert {"blockhf/loss", "blockhf/seconds"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("blockhf/loss")][:2] == [1, 2]


def test_the_page_on_trainers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("lightning", "accelerate", "transformers", "ignite", "tensorboard"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "howto" / "trainers.md"
    names: dict[str, Any] = {"__name__": "page"}
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(found) == 6
    for code in found:
        exec(compile(code, str(page), "exec"), names)


def test_numbers_that_a_step_does_not_have_are_left_out() -> None:
    report = StepReport(3, False, "no step lowers the loss", 2.0)
    written = []

    class Writer:
        def add_scalar(self, *arguments: object) -> None:
            written.append(arguments)

    write_report(Writer(), report)
    assert ("blockhf/loss", 2.0, 3) in written
    assert ("blockhf/accepted", 0.0, 3) in written
    assert len(written) == 4
    assert scalars(None) == {}


def test_one_process_needs_no_mesh() -> None:
    assert data_mesh() is None
