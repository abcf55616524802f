"""``blockhf claims``: each rule reaches each verdict, and the page is what the records make it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockhf_lab import claims, claims_page, figures, tasks
from blockhf_lab.claims import Finding, Records, Verdict
from blockhf_lab.comparison import Comparison, Entry
from blockhf_lab.optimizers import Spec
from command_line import run_main

ROOT = Path(__file__).parents[2]
HOLDS, PARTLY, FAILS, UNKNOWN = Verdict.HOLDS, Verdict.PARTLY, Verdict.FAILS, Verdict.UNKNOWN
Curve = Mapping[int, tuple[float, float]]
"""Train loss and test metric by update."""


def entry(optimizer: str, curve: Curve, test_key: str, seed: int = 0, status: str = "finished") -> Entry:
    points = [
        {"update": at, "epoch": at, "ge": at, "seconds": at, "train_loss": train, test_key: test}
        for at, (train, test) in {0: (99.0, 0.0), **curve}.items()
    ]
    return Entry(str(Spec.parse(optimizer)), seed, status, points)


def compared(
    task: str,
    block: Callable[[int], Curve] | None = None,
    alone: Callable[[int], Curve] | None = None,
    adam: Callable[[int], Curve] | None = None,
) -> Comparison:
    """A comparison of the paper's figure: each function makes the curve of a curvature batch or batch."""
    known = tasks.get(task, "cpu")
    key = known.test_key
    entries: list[Entry] = []
    for size in known.curvature_batches:
        entries += [entry(f"paper:curvature={size}", block(size), key)] if block else []
        entries += [entry(f"hf:curvature={size}", alone(size), key)] if alone else []
    for size in known.adam_batches:
        entries += [entry(f"adam:lr=0.001,batch={size}", adam(size), key)] if adam else []
    return Comparison(task, "cpu", known.settings(), ["200ge"], [], entries)


def error(values: Mapping[int, float]) -> Callable[[int], Curve]:
    """The same curve at every size, the test as the train."""
    return lambda size: {at: (value, value) for at, value in values.items()}


def verdicts(finding: Finding) -> list[Verdict]:
    return [check.verdict for check in finding.checks]


def cell(finding: Finding, head: str, row: int = 0) -> str:
    return finding.checks[row].cells[list(finding.heads).index(head)]


# The whole of a claim


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([HOLDS, PARTLY], PARTLY),
        ([HOLDS, FAILS], PARTLY),
        ([HOLDS, FAILS, FAILS], FAILS),
        ([FAILS], FAILS),
        ([HOLDS, UNKNOWN], PARTLY),  # what was not measured keeps it from holding whole ...
        ([FAILS, HOLDS, UNKNOWN], PARTLY),  # ... and counts neither way
        ([UNKNOWN], UNKNOWN),
        ([], UNKNOWN),
    ],
)
def test_a_claim_is_the_sum_of_its_checks(checks: list[Verdict], expected: Verdict) -> None:
    rows = [claims.Check([], verdict) for verdict in checks]
    assert Finding(1, "", "", [], rows).verdict is expected


def test_up_to_is_the_best_of_the_checks() -> None:
    rows = [claims.Check([], verdict) for verdict in (FAILS, HOLDS)]
    assert Finding(7, "", "", [], rows, takes_best=True).verdict is HOLDS


def test_nothing_measured_says_so() -> None:
    assert {finding.verdict for finding in claims.findings(Records())} == {UNKNOWN}
    assert [finding.number for finding in claims.findings(Records())] == [1, 2, 3, 4, 5, 6, 7]


# Claims 1 and 3: beside Adam


@pytest.mark.parametrize(
    ("block", "expected", "level", "ratio"),
    [
        ({10: 20.0, 20: 5.0}, HOLDS, "5", "20.0"),
        ({10: 20.0, 100: 5.0}, PARTLY, "5", "4.0"),  # there, but not an order of magnitude
        ({10: 20.0, 300: 4.0}, PARTLY, "5", "1.3"),  # there with any fewer
        ({10: 20.0, 400: 5.0}, FAILS, "5", "1.0"),  # there with as many
        ({10: 20.0}, PARTLY, "20", "10.0"),  # far fewer, but not there
        ({60: 20.0}, FAILS, "20", "1.7"),
    ],
)
def test_claim_1(block: dict[int, float], expected: Verdict, level: str, ratio: str) -> None:
    adam = error({50: 30.0, 100: 20.0, 400: 5.0, 500: 5.5})
    found = claims.claim_1(Records({"autoencoder": compared("autoencoder", error(block), adam=adam)}))
    assert verdicts(found) == [expected] * 6
    assert (found.verdict, cell(found, "level"), cell(found, "least ratio")) == (expected, level, ratio)


def test_adam_that_does_not_get_there_counts_with_its_whole_run() -> None:
    adams = {600: {50: 9.0, 400: 5.0}, 6000: {50: 9.0, 300: 8.0}}
    both = compared("autoencoder", error({20: 5.0}), adam=lambda size: error(adams[size])(size))
    found = claims.claim_1(Records({"autoencoder": both}))
    assert (cell(found, "of Adam, batch 600"), cell(found, "of Adam, batch 6,000")) == ("400", "> 300")
    assert cell(found, "least ratio") == "≥ 15.0"


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({10: (0.1, 0.99)}, [HOLDS, HOLDS]),
        ({10: (0.5, 0.9)}, [PARTLY, PARTLY]),  # as good is not better
        ({10: (0.1, 0.5)}, [HOLDS, PARTLY]),
        ({300: (0.1, 0.5)}, [PARTLY, FAILS]),
    ],
)
def test_claim_3_wants_a_better_end_too(block: Curve, expected: list[Verdict]) -> None:
    def adam(size: int) -> Curve:
        return {200: (1.0, 0.5), 1000: (0.5, 0.9)}

    found = claims.claim_3(Records({"lstm": compared("lstm", lambda size: block, adam=adam)}))
    assert verdicts(found) == expected * 3
    assert len(found.checks[0].cells) == len(found.heads)


# Claims 2, 4 and 5: beside HF


@pytest.mark.parametrize(("wins", "expected"), [(20, HOLDS), (19, HOLDS), (10, PARTLY), (9, FAILS)])
def test_claim_2_is_the_share_of_common_updates(wins: int, expected: Verdict) -> None:
    alone = error({**dict.fromkeys(range(1, 21), 5.0), 25: 0.1})
    block = error({at: 4.0 if at <= wins else 5.0 for at in range(1, 21)})
    found = claims.claim_2(Records({"autoencoder": compared("autoencoder", block, alone)}))
    assert verdicts(found) == [expected] * 6
    assert found.verdict is expected
    assert cell(found, "block HF better at") == f"{wins / 20:.0%}"
    assert cell(found, "last common update") == "20"


@pytest.mark.parametrize(
    ("lstm", "cnn", "expected"),
    [
        ((1.1, 1.2), (1.0, 1.1), HOLDS),
        ((1.1, 1.2), (1.3, 1.1), PARTLY),
        ((1.2, 1.2), (1.3, 1.1), FAILS),
        ((1.195, 1.2), (1.195, 1.2), FAILS),  # nothing to speak of
    ],
)
def test_claim_4_is_what_the_smallest_curvature_batch_costs(
    lstm: tuple[float, float], cnn: tuple[float, float], expected: Verdict
) -> None:
    def curve(factor: float, smallest: int) -> Callable[[int], Curve]:
        # The longer runs of smaller curvature batches are cut at the common update.
        def of(size: int) -> Curve:
            worse = factor if size == smallest else 1.0
            return {5: (2.0 * worse, 0.5 / worse), **({9: (0.0, 1.0)} if size == smallest else {})}

        return of

    both = {
        task: compared(task, curve(factors[0], smallest), curve(factors[1], smallest))
        for task, factors, smallest in (("lstm", lstm, 600), ("cnn", cnn, 128))
    }
    found = claims.claim_4(Records(both))
    assert found.verdict is expected
    assert cell(found, "update") == "5"
    assert cell(found, "it loses") == f"{lstm[0] - 1:+.2%}"


def test_claim_4_cannot_hold_whole_on_one_task() -> None:
    def alone(size: int) -> Curve:
        return {5: (3.0, 0.3) if size == 600 else (2.0, 0.5)}

    both = compared("lstm", error({5: 2.0}), alone)
    found = claims.claim_4(Records({"lstm": both}))
    assert verdicts(found) == [HOLDS] * 4 + [UNKNOWN]  # 3,000 to 600 and 1,200 to 600, train and test
    assert found.verdict is PARTLY


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({5: (1.0, 0.5), 9: (0.5, 0.6)}, [HOLDS, HOLDS, HOLDS, HOLDS]),
        ({5: (0.5, 0.5), 9: (0.75, 0.57)}, [PARTLY, HOLDS, HOLDS, PARTLY]),  # rises as much as HF
        ({5: (0.5, 0.5), 9: (1.5, 0.5)}, [FAILS, FAILS, FAILS, FAILS]),
    ],
)
def test_claim_5(block: Curve, expected: list[Verdict]) -> None:
    def alone(size: int) -> Curve:
        return {5: (0.75, 0.6), 9: (1.0, 0.55)}

    both = compared("cnn", lambda size: block, alone, lambda size: {100: (0.2, 0.59)})
    found = claims.claim_5(Records({"cnn": both}))
    assert verdicts(found) == expected * 3
    assert all(len(check.cells) == len(found.heads) for check in found.checks)


# Claims 6 and 7: time


def step(**ratios: tuple[float, float]) -> dict[str, Any]:
    """A record in which Adam's update takes a second: updates of HF in it, and of block HF in HF's."""
    rows = []
    for network, (alone, ratio) in ratios.items():
        for size in claims.PAPER_SECONDS[network]:
            rows.append({"network": network, "optimizer": f"HF, curvature {size}", "seconds": alone})
            rows.append(
                {"network": network, "optimizer": f"block HF, curvature {size}", "seconds": alone * ratio}
            )
        rows.append({"network": network, "optimizer": "Adam, batch 6000", "seconds": 1.0})
    return {"results": rows}


def test_claim_6() -> None:
    assert claims.claim_6(Records(step=step(autoencoder=(8, 1.1), residual=(8, 1.1)))).verdict is HOLDS
    assert claims.claim_6(Records(step=step(autoencoder=(8, 1.1), residual=(20, 1.1)))).verdict is PARTLY
    assert claims.claim_6(Records(step=step(autoencoder=(20, 1.5), residual=(20, 1.5)))).verdict is FAILS
    one = claims.claim_6(Records(step=step(autoencoder=(8, 1.1))))
    assert (one.verdict, verdicts(one)) == (PARTLY, [HOLDS] * 3 + [UNKNOWN] * 3)
    assert [cell(one, "ratio"), cell(one, "the paper's")] == ["1.10", "1.12"]


@pytest.mark.parametrize(
    ("two", "machine", "expected"),
    [(0.55, 2.0, HOLDS), (0.62, 1.7, HOLDS), (0.7, 1.9, PARTLY), (0.95, 1.9, FAILS)],
)
def test_claim_7(two: float, machine: float, expected: Verdict) -> None:
    found = {"equal": {"one": 1.0, "two": two, "machine": machine}}
    worse = {"encoder / decoder": {"one": 1.0, "two": 1.0, "machine": machine}}
    assert claims.claim_7(Records(parallel={"blocks": found | worse})).verdict is expected


# Records


def test_missing_lines_and_other_optimizers_are_told_apart() -> None:
    whole = compared("autoencoder", error({10: 5.0}), error({10: 6.0}), error({100: 5.0}))
    key = tasks.get("autoencoder").test_key
    fewer = replace(
        whole,
        entries=[
            *(each for each in whole.entries if "curvature=600" not in each.optimizer),
            entry("adam:lr=0.1,batch=600", {1: (0.0, 0.0)}, key),
            entry("blockhf", {1: (0.0, 0.0)}, key),
            entry("paper:curvature=600,lr=1", {1: (0.0, 0.0)}, key),
        ],
    )
    records = Records({"autoencoder": fewer})
    for finding in (claims.claim_1(records), claims.claim_2(records)):
        assert verdicts(finding) == [HOLDS] * 4 + [UNKNOWN] * 2
        assert finding.verdict is PARTLY
        assert {len(check.cells) for check in finding.checks} == {len(finding.heads)}


def test_medians_over_the_seeds_count() -> None:
    key = tasks.get("autoencoder").test_key
    runs = [
        entry("paper:curvature=600", {10: (value, value)}, key, seed) for seed, value in enumerate((1, 5, 9))
    ]
    (line,) = claims.lines(Comparison("autoencoder", "cpu", {}, [], [], runs), "paper").values()
    assert claims.series(line, claims.Metric("", key, False)) == {10: 5}


def test_a_median_is_taken_where_all_seeds_were_evaluated() -> None:
    key = "test_loss"
    curves: list[Curve] = [
        {10: (1.0, 1.0), 39: (5.0, 5.0)},
        {10: (2.0, 2.0), 40: (3.0, 3.0)},
        {10: (9.0, 9.0)},
    ]
    runs = [entry("hf:curvature=600", curve, key, seed) for seed, curve in enumerate(curves)]
    line = (Spec.parse("hf:curvature=600"), runs)
    assert claims.series(line, claims.Metric("", key, False)) == {10: 2.0}


def write(folder: Path, *comparisons: Comparison) -> Path:
    for each in comparisons:
        (folder / each.task).mkdir(parents=True)
        (folder / each.task / "comparison.json").write_bytes(each.to_json())
    return folder


def test_unfinished_runs_were_not_measured(tmp_path: Path) -> None:
    whole = compared("autoencoder", error({10: 5.0}), error({10: 6.0}))
    running = replace(
        whole,
        entries=[
            replace(each, status="unfinished") if each.optimizer == "hf:curvature=600" else each
            for each in whole.entries
        ],
    )
    found = claims.claim_2(Records.read(write(tmp_path, running)))
    assert verdicts(found) == [HOLDS] * 4 + [UNKNOWN] * 2
    with pytest.raises(FileNotFoundError, match="has no records of finished runs"):
        Records.read(tmp_path / "autoencoder")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"blocks": {"equal": {"one": 1}}}', '{"blocks": []}'])
@pytest.mark.parametrize("name", ["step.json", "parallel.json"])
def test_another_file_is_no_record(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} is no"):
        Records.read(tmp_path)


# The command and the page


@pytest.fixture
def records(tmp_path: Path) -> Path:
    def curve(speed: float) -> Callable[[int], Curve]:
        return lambda size: {at: (9.0 / (1 + speed * at), 1 - 1 / (1 + speed * at)) for at in range(1, 12)}

    folder = write(
        tmp_path / "records",
        *(compared(task, curve(2.0), curve(1.5), curve(0.1)) for task in ("autoencoder", "lstm", "cnn")),
    )
    (folder / "step.json").write_text(json.dumps(step(autoencoder=(8, 1.1), residual=(8, 1.1))))
    parallel = {"blocks": {"equal": {"one": 1.0, "two": 0.55, "machine": 2.0}}}
    (folder / "parallel.json").write_text(json.dumps(parallel))
    return folder


EMPTY = "".join(
    f"<!-- {name} --><!-- end -->\n"
    for name in ("verdicts", "settings", "runs", "long", *(f"claim {claim}" for claim in range(1, 8)))
)


def test_the_command_shows_all_and_makes_the_page(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    page = tmp_path / "docs" / "claims.md"
    page.parent.mkdir()
    page.write_text(f"By hand.\n{EMPTY}", encoding="utf-8")
    assert run_main(monkeypatch, "claims", str(records), "--page", str(page)) == 0
    shown = capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert text.startswith("By hand.\n")
    for finding in claims.findings(Records.read(records)):
        assert f"{finding.number}. {finding.claim}: {finding.verdict}" in shown
        assert f"| {finding.number} | {finding.claim} | **{finding.verdict}** |" in text
        for check in finding.checks:
            assert f"| {' | '.join([*check.cells, str(check.verdict)])} |" in text
    images = sorted(path.name for path in (page.parent / "images").iterdir())
    assert images == [f"claim-{claim}.png" for claim in range(1, 6)]
    assert all(f"(images/{name})" in text for name in images)
    assert run_main(monkeypatch, "claims", str(records), "--page", str(page)) == 0
    assert page.read_text(encoding="utf-8") == text


def test_misuse_is_told(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text(EMPTY.replace("<!-- claim 3 -->", ""), encoding="utf-8")
    for args, message in (
        ((), "results/claims has no records"),
        ((str(records), "--page", "page.md"), "The page has 0 parts <!-- claim 3 -->"),
        ((str(records), "--page", "none.md"), ""),
    ):
        assert run_main(monkeypatch, "claims", *args) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "images").exists()


def test_figures_show_what_the_claims_compare(records: Path) -> None:
    found = claims_page.panels(Records.read(records))
    titles = {claim: [column[0][0].title for column in columns] for claim, columns in found.items()}
    adam, alone = "paper and Adam", "paper and paper (HF)"
    assert titles == {
        1: [f"autoencoder, short: {adam}"],
        2: [f"autoencoder, short: {alone}"],
        3: [f"lstm, short: {adam}"],
        4: [f"lstm, short: {alone}", f"cnn, short: {alone}"],
        5: [f"cnn, short: {adam}", f"cnn, short: {alone}"],
    }
    assert {panel.axis for columns in found.values() for column in columns for panel, _ in column} == {
        "update"
    }
    sizes = {claim: figures.grid(columns).get_size_inches() for claim, columns in found.items()}
    assert sizes[1][0] == sizes[4][0]
    assert sizes[4][1] >= 2 * 3.8  # two rows, and what their legends take


# Long runs


def longer(task: str, seeds: Mapping[str, int], curve: Curve) -> Comparison:
    """Long runs of some optimizers, each with so many seeds."""
    known = tasks.get(task, "long")
    entries = [
        entry(optimizer, curve, known.test_key, seed)
        for optimizer, number in seeds.items()
        for seed in range(number)
    ]
    return Comparison(task, "long", known.settings(), ["300updates"], [], entries)


PAIR = ("paper:curvature=600", "hf:curvature=600")


def test_a_check_is_judged_by_long_runs_where_its_lines_have_two_seeds() -> None:
    short = {"autoencoder": compared("autoencoder", error({1: 4.0}), error({1: 5.0}))}
    equal = {1: (5.0, 5.0), 300: (1.0, 1.0)}
    one = {"autoencoder": longer("autoencoder", {PAIR[0]: 2, PAIR[1]: 1}, equal)}
    two = {"autoencoder": longer("autoencoder", dict.fromkeys(PAIR, 2), equal)}
    before = claims.claim_2(Records(short))
    assert claims.claim_2(Records(short, long=one)) == before
    after = claims.claim_2(Records(short, long=two))
    assert after.checks[:4] == before.checks[:4]
    assert verdicts(after) == [HOLDS] * 4 + [FAILS] * 2
    assert (before.judged_by, after.judged_by) == ("6 short", "2 long, 4 short")
    assert cell(after, "runs") == "short: 1 seed, 1 updates"
    assert cell(after, "runs", 4) == "long: 2 seeds, 300 updates"
    assert cell(after, "last common update", 4) == "300"


def test_seeds_must_be_common_to_all_lines_of_a_check() -> None:
    known = longer("autoencoder", dict.fromkeys(PAIR, 2), {1: (5.0, 5.0)})
    apart = [
        replace(each, seed=each.seed + 1) if each.optimizer.startswith("hf") else each
        for each in known.entries
    ]
    found = claims.claim_2(Records(long={"autoencoder": replace(known, entries=apart)}))
    assert verdicts(found) == [UNKNOWN] * 6


def test_every_claim_about_quality_can_be_judged_by_long_runs_alone() -> None:
    curve = {1: (2.0, 0.5), 300: (1.0, 0.6)}
    long = {
        task: longer(task, dict.fromkeys(tasks.get(task, "long").figure(), 2), curve)
        for task in ("autoencoder", "lstm", "cnn")
    }
    found = claims.findings(Records(long=long))
    counts = ["6 long", "6 long", "6 long", "8 long", "12 long", "", ""]
    assert [finding.judged_by for finding in found] == counts
    assert UNKNOWN not in [check.verdict for finding in found for check in finding.checks]


def test_the_command_draws_long_runs_and_names_what_is_missing(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = {PAIR[0]: 2, PAIR[1]: 1, "adam:lr=0.001,batch=600": 3}
    long = write(tmp_path / "long", longer("autoencoder", seeds, {1: (5.0, 5.0), 300: (1.0, 1.0)}))
    page = tmp_path / "claims.md"
    page.write_text(EMPTY, encoding="utf-8")
    args = ("claims", str(records), "--page", str(page))
    assert run_main(monkeypatch, *args, "--long", str(long)) == 0
    text = page.read_text(encoding="utf-8")
    assert "(images/long-autoencoder.png)" in text
    assert (tmp_path / "images" / "long-autoencoder.png").exists()
    assert "- With one seed, so in no verdict: paper (HF), curvature 600." in text
    assert "- With two seeds: paper, curvature 600." in text
    assert re.search(
        r"^- Not run: paper, curvature 3000; .*Adam, batch 6000, lr 0.001\.$", text, re.MULTILINE
    )
    capsys.readouterr()
    assert run_main(monkeypatch, *args, "--long", str(tmp_path / "none")) == 2
    assert "none has no records of finished runs" in capsys.readouterr().err.replace("\n", " ")


def test_figures_have_long_runs_first_and_short_ones_that_judge(records: Path) -> None:
    sizes = tasks.get("autoencoder", "long").curvature_batches
    seeds = {f"{name}:curvature={size}": 2 for name in ("paper", "hf") for size in sizes}
    adam = {"adam:lr=0.001,batch=600": 2}
    long = {"autoencoder": longer("autoencoder", seeds | adam, {1: (5.0, 5.0), 300: (1.0, 1.0)})}
    found = claims_page.panels(replace(Records.read(records), long=long))
    titles = {claim: [row[0][0].title for row in rows] for claim, rows in found.items()}
    assert titles[1] == [f"autoencoder, {name}: paper and Adam" for name in ("long", "short")]
    assert titles[2] == ["autoencoder, long: paper and paper (HF)"]
    four = claims_page.draw_long(long["autoencoder"]).axes
    assert [axes.get_ylabel() for axes in four] == ["train error", "test error"] * 2
    assert [axes.get_title() for axes in four[::2]] == ["paper and Adam", "paper and paper (HF)"]
    assert {axes.get_xscale() for axes in four} == {"log"}


def page_text() -> str:
    return (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")


def test_the_page_is_what_the_records_make_it() -> None:
    made = claims_page.parts(Records.read(ROOT / "results" / "claims", ROOT / "results" / "long"))
    assert claims_page.fill(page_text(), made) == page_text(), (
        "Run blockhf claims results/claims --long results/long --page docs/claims.md."
    )
    for name in re.findall(r"\((images/[^)]+)\)", page_text()):
        assert (ROOT / "docs" / name).exists()


def test_the_page_has_no_numbers_of_its_own() -> None:
    text = re.sub(r"(<!-- .+? -->).*?<!-- end -->", "", page_text(), flags=re.DOTALL)
    text = re.sub(r"^## Claim \d", "", text, flags=re.MULTILINE)
    assert not re.search(r"\d", text)


def test_a_change_of_page_or_records_is_seen(records: Path) -> None:
    made = claims_page.parts(Records.read(records))
    page = claims_page.fill(EMPTY, made)
    assert claims_page.fill(page, made) == page
    for content in made.values():
        assert claims_page.fill(page.replace(content, content.replace("a", "o", 1)), made) == page
    path = records / "autoencoder" / "comparison.json"
    content = json.loads(path.read_text())
    content["entries"][0]["points"][-1]["train_loss"] = 123.0
    path.write_text(json.dumps(content))
    assert claims_page.fill(page, claims_page.parts(Records.read(records))) != page


def test_a_seed_that_one_optimizer_alone_has_does_not_count() -> None:
    falling = {1: 50.0, 2: 40.0}
    found = compared("autoencoder", block=error(falling), alone=error({1: 51.0, 2: 41.0}))
    unlucky = [
        entry(f"hf:curvature={size}", error({1: 1.0, 2: 1.0})(size), "test_loss", seed)
        for size in tasks.get("autoencoder", "cpu").curvature_batches
        for seed in (1, 2)
    ]
    more = replace(found, entries=[*found.entries, *unlucky])
    assert verdicts(claims.claim_2(Records({"autoencoder": more}))) == [HOLDS] * 6


def test_claim_5_compares_by_common_seeds_too() -> None:
    found = compared("cnn", error({1: 0.5, 2: 0.4}), error({1: 0.6, 2: 0.5}), error({1: 0.5, 9: 0.4}))
    lucky = [
        entry(f"{name}={size}", {1: (2.0, 0.9), 2: (0.0, 0.9)}, "test_accuracy", seed)
        for name, sizes in (
            ("hf:curvature", tasks.get("cnn", "cpu").curvature_batches),
            ("adam:lr=0.001,batch", tasks.get("cnn", "cpu").adam_batches),
        )
        for size in sizes
        for seed in (1, 2)
    ]
    more = replace(found, entries=[*found.entries, *lucky])
    assert claims.claim_5(Records({"cnn": more})) == claims.claim_5(Records({"cnn": found}))
