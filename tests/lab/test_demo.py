"""The autoencoder, the contest on it, and the command line around both."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import blockhf
import blockhf_lab
from blockhf import blocks
from blockhf_lab import autoencoder, cli, demo, demo_physics, figures, files
from blockhf_lab.data import Pictures, digits
from children import PATIENCE, starts_processes
from command_line import run_main


@pytest.fixture(scope="module")
def data() -> Pictures:
    return digits()


# The autoencoder


def test_the_papers_network() -> None:
    torch.manual_seed(0)
    model = autoencoder.Autoencoder()
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    sizes = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
    assert [(layer.in_features, layer.out_features) for layer in linear] == list(itertools.pairwise(sizes))
    expected = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(sizes))
    assert sum(param.numel() for param in model.parameters()) == expected == 2_837_314
    for layer in linear:
        bound = math.sqrt(6 / (layer.in_features + layer.out_features))
        assert 0.99 * bound < layer.weight.abs().max().item() < bound * (1 + 1e-6)  # float32 rounds
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)  # uniform
        assert not layer.bias.any()
    assert [group["name"] for group in blocks.by_module(model)] == ["encoder", "decoder"]


def test_tanh_is_between_the_layers_and_neither_on_the_code_nor_on_the_output() -> None:
    model = autoencoder.Autoencoder((12, 7, 5, 3))
    kinds = [type(module) for half in (model.encoder, model.decoder) for module in half]
    half = [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    assert kinds == half + half
    assert model.encoder(torch.rand(2, 12)).shape == (2, 3)
    assert model(torch.rand(2, 12)).shape == (2, 12)


def test_the_error_is_summed_over_pixels_and_averaged_over_pictures() -> None:
    model = autoencoder.Autoencoder((4, 2))
    pictures = torch.rand(3, 4)
    outputs, loss = autoencoder.objective(model)(pictures)
    assert loss.item() == pytest.approx(((model(pictures) - pictures) ** 2).sum().item() / 3)
    assert outputs.shape == pictures.shape


@pytest.mark.parametrize("sizes", [(784,), (), (784, 0)])
def test_impossible_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least two positive"):
        autoencoder.Autoencoder(sizes)


# The contest


def test_batches_are_the_same_for_all_and_each_picture_comes_once_in_a_round() -> None:
    pictures = torch.arange(10.0).unsqueeze(1)
    first, second = (list(itertools.islice(demo.batches(pictures, 5, seed=3), 4)) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert torch.cat(first[:2]).flatten().sort().values.tolist() == list(range(10))
    assert not torch.equal(torch.cat(first[:2]), torch.cat(first[2:]))


def test_the_clock_runs_during_updates_alone(data: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def start(model: nn.Module) -> demo.Update:
        def update(batch: torch.Tensor) -> tuple[float, int | None]:
            nonlocal now
            now += 1.0
            return 5.0, 7

        return update

    def slow_error(*args: Any) -> float:
        nonlocal now
        now += 100.0
        return 3.0

    monkeypatch.setattr(demo.time, "perf_counter", lambda: now)
    monkeypatch.setattr(demo, "error", slow_error)
    settings = demo.Settings.quick(seconds=70.0)
    points = list(demo.train(demo.Contestant("x", "", 100, start), nn.Identity(), data, settings))
    assert [point.seconds for point in points] == list(range(71))
    assert points[0] == demo.Point(0, 0.0, None, None, 3.0)
    measured = [point.update for point in points if point.test_error is not None]
    assert measured == [*range(51), 52, 54, 56, 58, 60, 62, 64, 66, 68, 70]


def test_the_first_time_below_a_target_is_found() -> None:
    errors = [90.0, 40.0, None, 20.0, 30.0]
    run = demo.Run(
        demo.contestants(demo.Settings())[0],
        [demo.Point(update, 2.0 * update, 1.0, None, error) for update, error in enumerate(errors)],
    )
    assert [run.first(target) for target in (40.0, 25.0, 10.0)] == [run.points[1], run.points[3], None]


def test_block_hf_learns_and_is_ahead_of_hf_after_equal_updates(data: Pictures) -> None:
    """The demo's small setting; after 8 updates and with no clock, so it does not depend on the machine."""
    settings = demo.Settings.quick(seconds=1e6)
    errors = {}
    for contestant in demo.contestants(settings)[1:3]:
        torch.manual_seed(0)
        model = autoencoder.Autoencoder(settings.sizes)
        points = list(itertools.islice(demo.train(contestant, model, data, settings), 9))
        errors[contestant.name] = points[-1].test_error
        assert points[-1].num_cg_steps == (10 if contestant.name == "paper's block HF" else 5)
    block, single = errors["paper's block HF"], errors["paper's HF"]
    assert block is not None
    assert single is not None
    assert block < single < 60


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="positive finite"):
        demo.Settings(seconds=seconds)


def test_results_hold_no_number_that_json_lacks() -> None:
    """A diverging run is recorded and drawn, too."""
    runs = [
        demo.Run(contestant, [demo.Point(0, 0.0, None, None, 9.0), demo.Point(1, 1.0, math.inf, 3, math.nan)])
        for contestant in demo.contestants(demo.Settings())
    ]
    content = json.loads(demo._json(runs, demo.Settings(), True))
    assert content["runs"][0]["points"][1]["test_error"] is None


@pytest.mark.parametrize("errors", [[9.0], [9.0, math.nan], [math.nan, math.inf], [9.0, 8.0, 7.0]])
def test_short_and_diverging_runs_can_be_drawn(errors: list[float]) -> None:
    steps = [float(update) for update in range(len(errors))]
    assert figures.race([figures.Curve("x", steps, steps, errors)], title="")[:4] == b"\x89PNG"


def test_a_file_that_cannot_be_written_leaves_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "results.json").mkdir()
    with pytest.raises(OSError, match=r"results\.json"):
        files.write(tmp_path / "results.json", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


# The command line


def _child(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "blockhf", *args],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "COLUMNS": "100"},
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
    )


@starts_processes
def test_the_quick_demo_runs_and_writes_its_files(tmp_path: Path) -> None:
    done = _child("demo", "--quick", "--seconds", "0.2", "--seed", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    out = tmp_path / "runs" / "demo"
    assert sorted(path.name for path in out.iterdir()) == ["demo.png", "results.json"]
    picture = (out / "demo.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(picture) > 10_000
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert results["finished"] is True
    assert results["settings"]["seed"] == 1
    names = [run["name"] for run in results["runs"]]
    assert names == ["BlockHF", "paper's block HF", "paper's HF", "Adam, batch 300", "Adam, batch 60"]
    starts = {run["points"][0]["test_error"] for run in results["runs"]}
    assert len(starts) == 1  # the same weights for all
    for run in results["runs"]:
        assert run["name"] in done.stdout
        assert run["points"][-1]["seconds"] >= 0.2
        assert run["points"][-1]["test_error"] is not None
        assert run["train_error"] is not None
    solved = {run["name"]: run for run in results["physics"]["runs"]}
    assert len(solved) == 4
    assert len({run["errors"][0] for run in solved.values()}) == 1
    for name, run in solved.items():
        assert name in done.stdout
        assert run["seconds"][-1] >= 0.2
        assert run["errors"][-1] > 0


def test_the_contest_without_noise_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(demo_physics, "time", SimpleNamespace(perf_counter=tick))
    tracks: list[demo_physics.Track] = []
    seen: list[str] = []
    demo_physics.run(2.0, 0, tracks, lambda track: seen.append(track.name))
    names = [name for name, _, _ in demo_physics.CONTESTANTS]
    assert (
        seen == [name for name in names for _ in range(2)] + names
    )  # start and first update, then the second
    assert all(track.updates == [0, 1, 2] for track in tracks)
    assert [track.first(math.inf) for track in tracks] == [0.0] * 4
    assert tracks[0].first(0.0) is None


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"blockhf {blockhf.__version__}\n"


def test_ctrl_c_keeps_what_was_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    train = demo.train

    def interrupted(contestant: demo.Contestant, *args: Any) -> Iterator[demo.Point]:
        yield from itertools.islice(train(contestant, *args), 3)
        if contestant.name == "paper's HF":
            raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupted)
    assert run_main(monkeypatch, "demo", "--quick", "--seconds", "60", "--out", str(tmp_path)) == 130
    shown = capsys.readouterr()
    assert "Interrupted" in shown.out
    assert shown.err == ""
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["finished"] is False
    assert len(results["runs"]) == 5
    assert all(len(run["points"]) >= 2 for run in results["runs"])  # they take turns
    assert len(results["runs"][2]["points"]) == 3
    assert results["runs"][2]["train_error"] is None
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_ctrl_c_before_anything_was_recorded(
    monkeypatch: pytest.MonkeyPatch, data: Pictures, tmp_path: Path
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_warm_up", interrupted)
    screen = io.StringIO()
    assert demo.run(data, demo.Settings.quick(), tmp_path, Console(file=screen)) is False
    assert "Nothing was recorded" in screen.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_errors_of_use_are_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_main(monkeypatch, "demo", "--quick", "--seconds", "nan") == 2
    assert capsys.readouterr().err.startswith("Error: seconds is nan")
    (tmp_path / "file").touch()
    assert run_main(monkeypatch, "demo", "--quick", "--out", str(tmp_path / "file" / "x")) == 2
    assert capsys.readouterr().err.startswith("Error: ")


@pytest.mark.parametrize("module", ["typer", "rich.console", "matplotlib.figure"])
def test_a_missing_extra_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    for name in ("demo", "figures"):
        monkeypatch.delitem(sys.modules, f"blockhf_lab.{name}")
        monkeypatch.delattr(blockhf_lab, name)
    message = run_main(monkeypatch, "demo")
    assert isinstance(message, str)
    assert module in message
    assert "python -m pip install 'blockhf-lab'" in message


def test_another_missing_module_is_no_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli, "_app", broken)
    with pytest.raises(ModuleNotFoundError):
        cli.main()
