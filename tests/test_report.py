"""A report is readable, plain enough for JSON, and tells what each phase cost."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockhf.report import BlockReport, Phase, StepReport, Stopwatch, _Peak

ENCODER = BlockReport(
    name="encoder",
    size=1200,
    status="converged",
    num_steps=7,
    num_products=8,
    residual=4.2e-7,
    decrease=0.125,
    damping=0.03,
    norm=1.75,
    coefficient=0.5,
)
HEAD = BlockReport(
    name="head",
    size=20,
    status="nonpositive curvature",
    num_steps=30,
    num_products=31,
    residual=0.5,
    decrease=0.25,
    damping=0.0,
    norm=0.125,
)
ACCEPTED = StepReport(
    step=12,
    accepted=True,
    reason="shrunk to 0.5",
    loss=2.5,
    loss_after=2.25,
    predicted=-0.5,
    ratio=0.5,
    blocks=(ENCODER, HEAD),
    work={"gradient_samples": 60, "num_evaluations": 2},
    phases={"gradient": Phase(0.25, 2**20), "solve": Phase(1.5, 300 * 2**20), "search": Phase(0.25, None)},
)
REJECTED = StepReport(step=1, accepted=False, reason="the loss is not finite", loss=math.nan)


def test_a_report_is_one_line() -> None:
    assert str(ACCEPTED) == (
        "step 12: loss 2.5 -> 2.25; 37 CG steps, shrunk to 0.5; 2.00 s; "
        "block head met curvature that is not positive"
    )
    assert str(REJECTED) == "step 1: loss nan; rejected: the loss is not finite; 0.00 s"


def test_blocks_without_cg_steps_are_counted() -> None:
    exact = replace(ENCODER, num_steps=0)
    assert "; 7 CG steps, 2 blocks exact, shrunk to 0.5; " in str(
        replace(ACCEPTED, blocks=[exact, ENCODER, exact])
    )


def test_details_have_a_line_per_block_and_one_for_the_cost() -> None:
    step, model, encoder, head, cost = ACCEPTED.details().splitlines()
    assert step == str(ACCEPTED)
    assert model == "  model: ratio 0.50"
    assert cost == "  time: gradient 0.25 s / 1 MiB, solve 1.50 s / 300 MiB, search 0.25 s"
    for line, facts in [
        (
            encoder,
            ["encoder ", " 7 CG steps", "converged", "4.2e-07", "damping 0.03", "|d| 1.75", "taken 0.5"],
        ),
        (head, ["head ", "30 CG steps", "nonpositive curvature", "5.0e-01", "damping 0,", "taken 0"]),
    ]:
        assert [fact for fact in facts if fact not in line] == []
    assert "model -0.125" in encoder  # the model falls


def test_what_is_said_once_and_what_was_spent_have_their_places() -> None:
    work = {"gradient_batch": 1200, "curvature_batch": 600}
    report = replace(
        ACCEPTED, setup={"tracing": 1.26}, hints=["use blocks."], warnings=["bad."], spent="40 %", work=work
    )
    assert "; tracing took 1.3 s, once" in str(report).splitlines()[0]
    assert str(report).splitlines()[1:] == ["  warning: bad.", "  hint: use blocks."]
    for line in ("  samples: gradient 1,200, curvature 600", "  spent: 40 %"):
        assert line in report.details().splitlines()


def test_a_way_to_products_that_all_blocks_share_is_named_once() -> None:
    ways = [replace(ENCODER, products="traced"), replace(HEAD, products="traced")]
    assert replace(ACCEPTED, blocks=ways).details().count("traced") == 1
    ways[1] = replace(HEAD, products="formed")
    assert replace(ACCEPTED, blocks=ways).details().splitlines()[2].endswith("taken 0.5; traced")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_steps": 0}, "exact"),
        ({"num_steps": 0, "norm": 0.0}, "no gradient"),
        ({"num_steps": 0, "status": "step limit"}, "preconditioner alone"),
        ({"num_steps": 0, "status": "no influence"}, "0 CG steps, no influence"),
    ],
)
def test_a_block_without_cg_steps_says_how_it_was_solved(change: dict[str, Any], words: str) -> None:
    assert replace(ENCODER, **change).solved == words


@pytest.mark.parametrize(
    ("name", "kind", "label"),
    [
        ("0", "Linear", "0: Linear"),
        ("layers.3", "Block", "layers.3: Block"),
        ("block0", "Sequential", "block0: Sequential"),
        ("encoder", "Sequential", "encoder"),
        ("0", "", "0"),
    ],
)
def test_numbers_for_names_come_with_the_class_of_the_module(name: str, kind: str, label: str) -> None:
    assert replace(ENCODER, name=name, kind=kind).label == label


def test_totals_are_sums_over_phases_and_blocks() -> None:
    assert ACCEPTED.seconds == 2.0
    assert ACCEPTED.num_products == 39
    assert (REJECTED.seconds, REJECTED.num_products) == (0, 0)


def strict(report: StepReport) -> Any:
    return json.loads(json.dumps(report.to_dict(), allow_nan=False))


@pytest.mark.parametrize("report", [ACCEPTED, REJECTED], ids=["accepted", "rejected"])
def test_a_report_survives_json_unchanged(report: StepReport) -> None:
    assert strict(report) == report.to_dict()


def test_the_dict_of_a_report_has_all_that_the_report_has() -> None:
    plain = strict(ACCEPTED)
    assert plain["blocks"][0] == vars(ENCODER)
    assert plain["blocks"][1] == vars(HEAD)
    assert plain["phases"]["solve"] == {"seconds": 1.5, "peak_bytes": 300 * 2**20}
    assert plain["phases"]["search"]["peak_bytes"] is None
    assert plain["work"] == ACCEPTED.work
    assert plain["seconds"] == 2.0
    for name in ("step", "accepted", "reason", "loss", "loss_after", "predicted", "ratio"):
        assert plain[name] == getattr(ACCEPTED, name)


@pytest.mark.parametrize(("value", "text"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_numbers_that_json_does_not_have_become_words_that_float_reads(value: float, text: str) -> None:
    block = BlockReport("b", 1, "non finite", 0, 1, value, 0.0, 0.0, 0.0)
    plain = strict(StepReport(step=1, accepted=False, reason="", loss=value, blocks=[block]))
    assert plain["loss"] == plain["blocks"][0]["residual"] == text
    assert str(float(plain["loss"])) == str(value)


def test_a_stopwatch_measures_each_phase_even_one_that_fails() -> None:
    watch = Stopwatch(torch.device("cpu"), memory=False)
    with watch.phase("short"):
        pass
    with pytest.raises(ZeroDivisionError), watch.phase("long"):
        time.sleep(0.02) or 1 / 0
    assert list(watch.phases) == ["short", "long"]
    assert watch.phases["long"].seconds >= 0.02 > watch.phases["short"].seconds >= 0
    assert all(phase.peak_bytes is None for phase in watch.phases.values())


def test_a_stopwatch_tells_peak_memory_where_the_machine_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset, status = tmp_path / "clear_refs", tmp_path / "status"
    monkeypatch.setattr(_Peak, "_RESET", reset)
    monkeypatch.setattr(_Peak, "_STATUS", status)
    watch = Stopwatch(torch.device("cpu"), memory=True)
    with watch.phase("nothing to read"):
        pass
    assert reset.read_text() == "5"
    status.write_text("VmPeak:\t   99 kB\nVmHWM:\t   1234 kB\nVmRSS:\t  7 kB\n")
    with watch.phase("a peak"):
        pass
    status.write_text("Name: something else\n")
    with watch.phase("no such line"):
        pass
    assert [phase.peak_bytes for phase in watch.phases.values()] == [None, 1234 * 1024, None]


def test_a_stopwatch_without_leave_to_reset_still_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Peak, "_RESET", tmp_path / "missing" / "clear_refs")
    status = tmp_path / "status"
    status.write_text("VmHWM:\t 2 kB\n")
    monkeypatch.setattr(_Peak, "_STATUS", status)
    watch = Stopwatch(torch.device("cpu"), memory=True)
    with watch.phase("solve"):
        pass
    assert watch.phases["solve"].peak_bytes == 2048
