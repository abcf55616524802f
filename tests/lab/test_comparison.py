"""Comparisons: what tables, figures and the page are made of."""

from __future__ import annotations

import html.parser
import io
import itertools
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

import tiny_task
from blockhf_lab import comparison, figures, page, runs, tasks
from blockhf_lab.comparison import Comparison, Cost, Entry
from blockhf_lab.optimizers import Spec
from children import PATIENCE, starts_processes

FIGURE = (
    "paper:curvature=30",
    "paper:curvature=20",
    "hf:curvature=30",
    "hf:curvature=20",
    "adam:batch=20",
    "adam:batch=60",
)


def entry(optimizer: str, tests: list[float | None], seed: int = 0, status: str = "finished") -> Entry:
    """A run whose updates cost two GE and half a second, and whose train loss is half the test loss."""
    points: list[comparison.Point] = [
        {
            "update": update,
            "epoch": 0.1 * update,
            "ge": 2.0 * update,
            "seconds": 0.5 * update + 0.01 * seed,
            "train_loss": None if value is None else value / 2,
            "test_loss": value,
        }
        for update, value in enumerate(tests)
    ]
    return Entry(str(Spec.parse(optimizer)), seed, status, points, 6.0)


def compared(*entries: Entry, **settings: Any) -> Comparison:
    return Comparison(
        "tiny",
        "quick",
        {**tiny_task.task().settings(), "targets": [60.0, 20.0], **settings},
        ["20updates"],
        [{"torch": "2", "cores": 2, "commit": None}],
        entries,
    )


@pytest.fixture(scope="module")
def content(whole: Comparison) -> bytes:
    return page.page(whole)


@pytest.fixture(scope="module")
def whole() -> Comparison:
    entries = [
        entry(text, [100.0 / (1 + update * (place + 1) / 9) + seed for update in range(12)], seed)
        for place, text in enumerate(FIGURE)
        for seed in (0, 1, 2)
    ]
    return compared(*entries)


# Numbers


def test_targets_are_medians_over_the_seeds() -> None:
    entries = [
        entry("adam", [100.0, 70.0, 50.0, 15.0], seed=0),
        entry("adam", [100.0, 50.0, 40.0, 30.0], seed=1),
        entry("adam", [100.0, 90.0, 80.0, 60.0], seed=2),
    ]
    both = compared(*entries)
    assert comparison.reached(both, entries, 60.0) == Cost(2, 4.0, 1.0)
    assert comparison.reached(both, entries, 20.0) == Cost(None, None, None)
    assert comparison.reached(both, entries[:2], 60.0).update == 2  # the later of two
    assert comparison.reached(both, entries[:2], 20.0).update is None


def test_accuracy_is_reached_from_below() -> None:
    run = entry("adam", [0.1, 0.5, 0.9])
    run = Entry(
        run.optimizer, 0, "finished", [{**point, "test_accuracy": point["test_loss"]} for point in run.points]
    )
    both = compared(run, metric="accuracy")
    assert comparison.reached(both, [run], 0.5).update == 1
    assert comparison.summaries(both)[0].best == 0.9


def test_a_diverged_run_reaches_nothing_more_and_its_best_counts() -> None:
    run = entry("adam", [100.0, 55.0, None], status="diverged")
    line = comparison.summaries(compared(run))[0]
    assert (line.best, line.train, line.statuses) == (55.0, None, ["diverged"])
    assert [cost.update for cost in line.targets] == [1, None]


def test_the_library_comes_first_and_then_the_order_of_the_paper() -> None:
    runs = [entry(text, [1.0]) for text in (*FIGURE, "blockhf", "sgd:lr=1")]
    names = [str(spec) for spec, _ in compared(*reversed(runs)).methods()]
    assert names == [
        "blockhf",
        "paper:curvature=30",
        "paper:curvature=20",
        "hf:curvature=30",
        "hf:curvature=20",
        "adam:batch=60",
        "adam:batch=20",
        "sgd:lr=1",
    ]


def test_a_curve_is_the_median_with_the_range_where_half_of_the_seeds_are() -> None:
    entries = [
        entry("adam", [9.0, 8.0, 7.0, 6.0], seed=0),
        entry("adam", [9.0, 6.0, 5.0], seed=1),
        entry("adam", [9.0, 4.0, None], seed=2),
    ]
    curve = comparison.curve(Spec.parse("adam"), entries, "test_loss", "update")
    assert list(curve.along) == [0, 1, 2]  # update 3 has one of three
    assert list(curve.middle) == [9.0, 6.0, 6.0]
    assert list(curve.low) == [9.0, 4.0, 5.0]
    assert list(curve.high) == [9.0, 8.0, 7.0]
    seconds = comparison.curve(Spec.parse("adam"), entries, "test_loss", "seconds").along
    assert list(seconds) == pytest.approx([0.01, 0.51, 1.005])
    assert all(before <= after for before, after in itertools.pairwise(seconds))


def test_a_comparison_survives_its_file(whole: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    path.write_bytes(whole.to_json())
    again = Comparison.read(path)
    assert again.to_json() == whole.to_json()
    assert comparison.summaries(again) == comparison.summaries(whole)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "entries": [3]}'])
def test_another_file_is_no_comparison(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(ValueError, match=r"c\.json is no"):
        Comparison.read(tmp_path / "c.json")


def test_runs_are_collected_with_what_they_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASKS", {"tiny": tiny_task.task})
    data = tiny_task.load(None)
    for seed, optimizer in itertools.product((0, 1), ("adam:batch=20", "paper:curvature=30")):
        config = runs.Config("tiny", "quick", optimizer, seed, "6updates")
        with runs.Run(config, tmp_path / optimizer.partition(":")[0] / str(seed), data) as run:
            runs.train(run)
    (found,) = comparison.collect([tmp_path])
    assert len(found.entries) == 4
    assert [len(entries) for _, entries in found.methods()] == [2, 2]
    assert [each.num_cg for each in found.entries] == [None, None, 6.0, 6.0]
    record = runs.read_records(tmp_path / "adam" / "0")[-1]
    assert found.entries[0].points[-1]["test_loss"] == record["evaluation"]["test_loss"]
    assert len(found.environments) == 1
    config_file = tmp_path / "adam" / "0" / "config.json"
    config = json.loads(config_file.read_text())
    config["settings"]["growth"] = 9
    config_file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="have different settings"):
        comparison.collect([tmp_path])
    config_file.write_text("{}")
    with pytest.raises(ValueError, match="is no config of a run"):
        comparison.collect([tmp_path])


# Figures


def test_the_papers_four_panels(whole: Comparison) -> None:
    for axis in comparison.AXES:
        rows = figures.panels(whole, axis)
        assert [[panel.metric for panel in row] for row in rows] == [["train error"] * 2, ["test error"] * 2]
        for left, right in rows:
            assert (left.title, right.title) == ("paper and Adam", "paper and paper (HF)")
            assert [curve.label for curve in left.curves] == [
                "paper, curvature 30",
                "paper, curvature 20",
                "Adam, batch 60",
                "Adam, batch 20",
            ]
            assert [curve.label.split(",")[0] for curve in right.curves] == ["paper"] * 2 + ["paper (HF)"] * 2
    test = figures.panels(whole, "update")[1][0].curves[0]
    assert list(test.middle) == pytest.approx([100.0 / (1 + update / 9) + 1 for update in range(12)])
    assert list(test.low) == pytest.approx([value - 1 for value in test.middle])


def test_sides_with_nothing_to_compare_are_left_out() -> None:
    def titles(*texts: str) -> list[str]:
        both = compared(*(entry(text, [2.0, 1.0]) for text in texts))
        return [panel.title for panel in figures.panels(both, "ge")[0]]

    assert titles("adam", "sgd") == ["Adam and SGD"]
    assert titles("hf", "paper") == ["paper and paper (HF)"]
    assert titles("blockhf", "adam") == ["BlockHF and Adam", "BlockHF"]
    assert titles("blockhf") == ["BlockHF"]


def test_the_classes_are_measured_by_accuracy() -> None:
    run = entry("adam", [0.2, 0.5])
    points = [{**point, "test_accuracy": point["test_loss"]} for point in run.points]
    both = compared(Entry("adam", 0, "finished", points), metric="accuracy")
    train, test = (row[0] for row in figures.panels(both, "update"))
    assert (train.metric, test.metric) == ("train loss", "test accuracy")
    assert (train.is_log, test.is_log) == (True, False)
    assert list(test.curves[0].middle) == [0.2, 0.5]


def test_block_hf_and_hf_share_colors(whole: Comparison) -> None:
    looks = figures.looks(whole)
    assert len(set(looks.values())) == len(FIGURE)
    for size in (30, 20):
        block, single = looks[f"paper, curvature {size}"], looks[f"paper (HF), curvature {size}"]
        assert block[0] == single[0]
        assert block[1] == "solid" != single[1]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.0, 100.0, [1, 2, 5, 10, 20, 50, 100]),
        (2.25, 2.36, [2.25, 2.28, 2.31, 2.34]),
        (1e-20, 1e20, [1e-20, 1e-16, 1e-12, 1e-8, 1e-4, 1, 1e4, 1e8, 1e12, 1e16, 1e20]),
    ],
)
def test_an_axis_has_a_few_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert figures._places(low, high, (1, 2, 5)) == pytest.approx(expected)


def test_many_curves_look_different_and_legends_are_below_them() -> None:
    entries = [entry(f"adam:lr={rate}", [9.0, 8.0]) for rate in range(1, 15)]
    few, many = compared(*entries[:5]), compared(*entries)
    assert len(set(figures.looks(many).values())) == len(entries)
    for each in (few, many):
        figure = figures.draw_alone(each, figures.panels(each, "ge")[0][0])
        figure.canvas.draw()
        (axes,) = figure.axes
        legend = axes.get_legend()
        assert legend is not None
        assert legend.get_window_extent().y1 < axes.get_window_extent().y0


def test_png_and_svg_are_whole_and_the_same_each_time(whole: Comparison) -> None:
    drawn, again = (figures.svg(figures.draw(whole, "ge")) for _ in range(2))
    assert drawn == again
    assert Image.open(io.BytesIO(figures.png(figures.draw(whole, "ge")))).size[0] > 1000
    text = "".join(ElementTree.fromstring(drawn).itertext())
    for spec, _ in whole.methods():
        assert spec.label in text


@pytest.mark.parametrize(
    "tests", [[9.0], [9.0, None], [None, None], [9.0, math.inf], [9.0, 1e30, 1e-30], [0.0, 0.0]]
)
def test_short_and_diverged_runs_can_be_drawn(tests: list[float | None]) -> None:
    both = compared(entry("adam", tests), entry("paper", [9.0, 8.0]))
    assert figures.png(figures.draw(both, "ge"))[:4] == b"\x89PNG"
    assert all(len(page.cells(line)) == len(page.headings(both)) for line in comparison.summaries(both))


# The page


class _Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "data")]

    def handle_data(self, content: str) -> None:
        self.text += content


def test_the_page_holds_everything_and_asks_for_nothing(whole: Comparison, content: bytes) -> None:
    reader = _Reader()
    reader.feed(content.decode())
    assert not {"script", "link", "img", "iframe"} & set(reader.tags)
    assert all(link.startswith("#") for link in reader.links)
    assert b"url(http" not in content
    assert b"@import" not in content
    assert reader.tags.count("svg") == 12
    for words in (
        "A tiny autoencoder",
        "large batch",
        "20 updates for each run",
        "torch",
        "test error ≤ 60",
        "slow_start",
    ):
        assert words in reader.text
    for spec, _ in whole.methods():
        assert str(spec) in reader.text
    assert len(content) < 1_000_000


def test_what_is_shown_is_escaped() -> None:
    both = compared(entry("adam", [2.0, 1.0]), title="<script>alert(1)</script>")
    content = page.page(both).decode()
    assert "<script" not in content
    assert "&lt;script&gt;" in content


def test_the_numbers_of_the_page_are_those_of_the_comparison(whole: Comparison, content: bytes) -> None:
    line = comparison.summaries(whole)[0]
    target = line.targets[0]
    assert target.update is not None
    shown = f"{page.number(target.update)} / {page.number(target.ge)} / {page.number(target.seconds)} s"
    assert f"<td>{shown}</td>" in content.decode()


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@starts_processes
def test_the_page_in_a_browser(content: bytes, tmp_path: Path) -> None:
    """On a phone: nothing is wider than the screen, and light and dark are as asked for."""
    assert CHROMIUM is not None
    (tmp_path / "page.html").write_bytes(content)

    def chromium(*arguments: str) -> str:
        done = subprocess.run(
            [
                str(CHROMIUM),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={tmp_path / 'profile'}",
                "--allow-file-access-from-files",
                *arguments,
            ],
            capture_output=True,
            encoding="utf-8",
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    for scheme, is_dark in ((0, True), (1, False)):
        picture = tmp_path / f"{scheme}.png"
        chromium(
            f"--blink-settings=preferredColorScheme={scheme}",
            "--window-size=400,1800",
            f"--screenshot={picture}",
            f"file://{tmp_path / 'page.html'}",
        )
        image = Image.open(picture).convert("L")
        shades = image.getcolors()
        assert (image.getpixel((2, 2)) < 60) == is_dark  # type: ignore[operator]
        # There is ink of the opposite shade: text, axes and lines are drawn.
        ink = sum(count for count, shade in shades if (shade > 150) == is_dark)  # type: ignore[operator, misc]
        assert ink > 2000

    # The page within a frame as wide as a phone, measured from outside.
    (tmp_path / "frame.html").write_text(
        '<iframe src="page.html" width="360" height="800"></iframe><p id="found"></p><script>'
        "document.querySelector('iframe').onload = (event) => {"
        "const page = event.target.contentDocument;"
        "const svg = [...page.querySelectorAll('figure svg')].map((each) => each.getBoundingClientRect());"
        "document.getElementById('found').textContent = [page.documentElement.scrollWidth,"
        "svg.length, Math.min(...svg.map((box) => box.width)),"
        "Math.min(...svg.map((box) => box.height))].join(' ');};</script>"
    )
    found = re.search(
        r'<p id="found">([\d. ]+)</p>', chromium("--dump-dom", f"file://{tmp_path / 'frame.html'}")
    )
    assert found is not None
    width, number, narrowest, flattest = map(float, found[1].split())
    assert width <= 360
    assert number == 12
    assert narrowest > 300
    assert flattest > 200


def test_a_long_title_stays_within_a_narrow_figure(whole: Comparison) -> None:
    panel = figures.panels(whole, "ge")[0][0]
    figure = figures.grid([[(panel, figures.looks(whole))]], "Three layers of something on something " * 3)
    figure.canvas.draw()
    (title,) = (text for text in figure.texts if text.get_text().startswith("Three"))
    assert title.get_window_extent().width < figure.bbox.width
