"""The standing campaign: a short one, what it would see, its record, and its page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from blockhf import BlockHF
from blockhf.isolation import IsolatedBuffers
from blockhf_lab.claims_page import fill
from blockhf_lab.fuzz import campaign, cases, interrupts, page
from command_line import run_main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("what", "number"), [("cases", 30), ("interrupts", 20)])
def test_a_short_campaign_finds_nothing(what: str, number: int, tmp_path: Path) -> None:
    record = campaign.run(campaign.Settings(what, number, seed=14), tmp_path, print)
    assert record["findings"] == []
    assert record["done"] == number
    assert sum(record["checks"].values()) >= number // 2


def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def run(folder: str, number: int) -> dict[str, object]:
        campaign.run(campaign.Settings("cases", number, seed=3), tmp_path / folder, lambda _: None)
        record = json.loads((tmp_path / folder / "cases.json").read_text())
        del record["cpu_seconds"]
        return dict(record)

    run("stopped", 2)
    assert run("stopped", 5) == run("at once", 5)
    with pytest.raises(ValueError, match="is the record of 'blockhf fuzz cases --number 5 --seed 3'"):
        campaign.run(campaign.Settings("cases", 5, seed=4), tmp_path / "stopped", print)


def test_no_time_makes_an_empty_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("interrupts", "--number", "3", "--seed", "1", "--seconds", "1e-9", "--out", str(tmp_path))
    assert run_main(monkeypatch, "fuzz", *arguments) == 0
    assert json.loads((tmp_path / "interrupts.json").read_text())["done"] == 0


def test_a_step_that_goes_elsewhere_would_be_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finish = BlockHF._finish

    def spoiled(self: BlockHF, update: object, *, accepted: bool) -> torch.Tensor:
        for group in self.param_groups:
            group["params"][0].data.mul_(1.0001)
        return finish(self, update, accepted=accepted)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockHF, "_finish", spoiled)
    record = campaign.run(campaign.Settings("cases", 25, seed=14), tmp_path, lambda _: None)
    words = " ".join(finding["what"] for finding in record["findings"])
    assert "block step: the block step: off by" in words
    assert "a rejected step changed parameters" in words


def test_an_interrupt_that_leaves_something_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("blockhf.isolation.Restored.__exit__", lambda *_: None)
    record = campaign.run(campaign.Settings("interrupts", 20, seed=14), tmp_path, lambda _: None)
    assert any("not as before" in finding["what"] for finding in record["findings"])


def test_a_finding_stays_in_the_record_and_is_tried_again(tmp_path: Path) -> None:
    settings = campaign.Settings("cases", 1, seed=3)
    record = campaign.run(settings, tmp_path, lambda _: None)
    record["findings"] = [{"trial": 0, "what": "matrix: off"}]
    (tmp_path / "cases.json").write_text(json.dumps(record))
    record = campaign.run(settings, tmp_path, lambda _: None)
    assert record["findings"] == [{"trial": 0, "what": "matrix: off", "now": "passes"}]
    assert campaign.failing(record) == []
    assert "| cases | 1 | 1 | 0 |" in page.parts({"cases": record})["summary"]


def test_what_torch_itself_rounds_is_no_finding_and_more_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """LayerNorm over two entries, whose second derivatives lose digits in single precision."""
    trial = campaign.generator(0, 1780)
    assert not any("matrix" in finding for finding in cases.run_case(trial).findings)
    monkeypatch.setattr(cases, "rounding", lambda *_: 0.0)
    trial = campaign.generator(0, 1780)
    assert any("Hessian by DoubleBackward" in finding for finding in cases.run_case(trial).findings)


def test_errors_without_a_sentence_are_findings() -> None:
    verdict = cases.Verdict()

    def fail(error: Exception) -> None:
        raise error

    verdict.run("a", lambda: fail(IndexError("list index out of range, says the interpreter")))
    verdict.run("b", lambda: fail(ValueError("bad value")))
    verdict.run("c", lambda: fail(ValueError("lr is -1, but must be at least 0.")))
    assert [finding[:9] for finding in verdict.findings] == ["a: unclea", "b: unclea"]
    assert verdict.refusals == ["c: ValueError: lr is -1, but must be at least 0."]


def test_an_interrupt_comes_at_its_line() -> None:
    with interrupts.Interrupter() as counted, IsolatedBuffers():
        pass
    assert 0 < len(counted.aimed) <= counted.num_events
    with pytest.raises(KeyboardInterrupt), interrupts.Interrupter(2) as stopped, IsolatedBuffers():
        pass
    assert stopped.where.startswith("isolation.py:")


# The page


def text() -> str:
    return (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_the_page_is_what_the_records_make_it() -> None:
    made = page.parts(page.records(ROOT / "results" / "reliability"))
    assert fill(text(), made) == text(), (
        "Run blockhf fuzz page results/reliability --page docs/reliability.md."
    )
    assert "reliability.md" in (ROOT / "mkdocs.yml").read_text()


def test_the_page_has_no_numbers_of_its_own() -> None:
    assert not re.search(r"\d", re.sub(r"(<!-- .+? -->).*?<!-- end -->", "", text(), flags=re.DOTALL))


def test_the_page_needs_a_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no record"):
        page.records(tmp_path)
