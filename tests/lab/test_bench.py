"""The benchmark: its networks, that it tells right from wrong, and its command line."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from blockhf.curvature import DoubleBackward
from blockhf_lab import bench, cli, peers, residual
from blockhf_lab.transformer import Transformer
from children import PATIENCE, starts_processes

SMALL = bench.Options(samples=2, repetitions=1)


# The residual network


def test_the_papers_residual_network() -> None:
    torch.manual_seed(0)
    model = residual.ResidualNetwork()
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.kernel_size[0], c.stride[0]) for c in convolutions] == [
        (3, 16, 3, 1),
        (16, 16, 3, 1),
        (16, 16, 3, 1),
        (16, 32, 3, 2),
        (32, 32, 3, 1),
        (16, 32, 1, 2),
        (32, 64, 3, 2),
        (64, 64, 3, 1),
        (32, 64, 1, 2),
    ]
    shapes = []
    hooks = [
        block.register_forward_hook(lambda _, inputs, output: shapes.append(tuple(output.shape[1:])))
        for block in model.residual
    ]
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    for hook in hooks:
        hook.remove()
    assert shapes == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


def test_its_weights_are_glorots_and_its_biases_zero() -> None:
    torch.manual_seed(0)
    for name, param in residual.ResidualNetwork().named_parameters():
        if name.endswith("bias"):
            assert not param.any()
        else:
            area = param[0, 0].numel()
            bound = math.sqrt(6 / (area * (param.shape[0] + param.shape[1])))
            assert 0.95 * bound < param.abs().max().item() < bound * (1 + 1e-6)


def test_the_shortcut_goes_around_the_convolutions() -> None:
    model = residual.ResidualBlock(4, 4)
    for param in model.parameters():
        nn.init.zeros_(param)
    inputs = torch.rand(2, 4, 5, 5)
    torch.testing.assert_close(model(inputs), inputs)


def test_its_groups_are_the_papers_blocks() -> None:
    groups = residual.groups(residual.ResidualNetwork())
    owners = {
        group["name"]: {".".join(name.split(".")[:2]).removesuffix(".weight") for name, _ in group["params"]}
        for group in groups
    }
    assert owners == {
        "bottom": {"first", "first.bias", "residual.0"},
        "middle": {"residual.1"},
        "top": {"residual.2", "head", "head.bias"},
    }


def test_every_position_of_the_transformer_sees_every_other() -> None:
    torch.manual_seed(0)
    model = Transformer(length=4, width=8, num_heads=2)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 2, 3, 4], [1, 2, 3, 6]])
    logits = model(tokens)
    assert not torch.isclose(logits[0], logits[1]).all(dim=1).any()
    assert not torch.isclose(logits[0], logits[2]).all(dim=1).any()


# The measurements


@pytest.mark.parametrize("name", bench.SAMPLES)
def test_each_network_is_there_with_its_blocks(name: str) -> None:
    case = bench.network(name, 2)
    assert len(case.batch[0]) == 2
    grouped = {param for group in case.groups for _, param in group["params"]}
    assert grouped == set(case.params)
    _, loss = case.objective(case.batch)
    assert loss.isfinite()


def test_the_classical_product_is_that_of_the_double_backward() -> None:
    case = bench.network("residual", 2)
    vector = torch.randn(sum(param.numel() for param in case.params))
    expected = peers.ours("", case, DoubleBackward()).linearize()(vector)
    torch.testing.assert_close(peers.three_backward_passes(case).linearize()(vector), expected)


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("name", bench.SAMPLES)
@pytest.mark.parametrize("library", ["curvlinops", "backpack", "jax"])
def test_peers_agree_where_they_are_installed(name: str, library: str) -> None:
    pytest.importorskip(library)
    case = bench.network(name, 2)
    vector = torch.randn(sum(param.numel() for param in case.params))
    expected = peers.ours("", case, DoubleBackward()).linearize()(vector)
    way = getattr(peers, library)(case)
    actual = way.leave(way.linearize()(way.enter(vector)))
    assert bench._difference(actual, expected) < bench.TOLERANCE


def test_a_wrong_a_failing_and_a_missing_way_are_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> peers.Way:
        raise peers.UnavailableError("that is not installed")

    def failing() -> peers.Way:
        raise RuntimeError("no such kernel\nand more")

    def uncompiled() -> peers.Way:
        warnings.warn("Compiling failed, so the products run without it", stacklevel=1)
        return peers.ours("", bench.network("residual", 2), DoubleBackward())

    def ways(case: peers.Network, options: bench.Options) -> Iterator[Any]:
        yield "double backward", lambda: peers.ours("", case, DoubleBackward())
        yield "doubled", lambda: peers.Way("doubled", lambda: lambda vector: 2 * vector)
        yield "nan", lambda: peers.Way("nan", lambda: lambda vector: vector * math.nan)
        yield "missing", missing
        yield "failing", failing
        yield "uncompiled", uncompiled

    monkeypatch.setattr(bench, "ways", ways)
    rows = {row.way: row for row in bench.products(bench.network("residual", 2), SMALL)}
    assert rows["gradient"].product == 1.0
    assert rows["double backward"].product is not None
    for name in ("doubled", "nan", "missing", "failing", "uncompiled"):
        assert rows[name].product is None
    assert rows["doubled"].note.startswith("wrong: it differs by")
    assert rows["nan"].note.startswith("wrong")
    assert rows["missing"].note == "that is not installed"
    assert rows["uncompiled"].note.startswith("Compiling failed")
    assert rows["failing"].note == "fails: RuntimeError: no such kernel"


def test_candidates_take_turns_and_the_best_turn_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = 0.0, []
    costs = {"a": iter([3.0, 1.0, 2.0]), "b": iter([5.0, 5.0, 4.0])}

    def candidate(name: str) -> Any:
        def run() -> None:
            nonlocal now
            order.append(name)
            now += next(costs[name])

        return run

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now)
    assert bench.best({name: candidate(name) for name in costs}, 3) == {"a": 1.0, "b": 4.0}
    assert order == ["a", "b"] * 3


def test_a_turn_ends_when_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pending = 0.0, []

    class Device:
        @staticmethod
        def synchronize() -> None:
            nonlocal now
            now += sum(pending)
            pending.clear()

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now)
    monkeypatch.setattr(torch, "get_device_module", lambda _: Device)
    assert bench.best({"a": lambda: pending.append(2.0)}, 2, "cuda") == {"a": 2.0}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's memory counters")
def test_the_peak_is_that_of_the_call() -> None:
    def rise(mebibytes: int) -> None:
        torch.ones(mebibytes * 2**18)

    rise(128)
    for size in (64, 16):
        found = bench.peak_mib(lambda size=size: rise(size))  # type: ignore[misc]
        assert found is not None
        assert found == pytest.approx(size, abs=4)


def test_the_shares_of_a_cg_iteration_add_up() -> None:
    shares = bench.iteration_shares(bench.network("autoencoder", 4), SMALL, num_steps=2)
    assert sum(shares.values()) == pytest.approx(1)
    assert all(share > 0 for share in shares.values())


# The command line


def _child(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "blockhf", "bench", *args],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "COLUMNS": "120"},
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
    )


@starts_processes
def test_products_are_measured_shown_and_written(tmp_path: Path) -> None:
    small = ("--samples", "8", "--repetitions", "1", "--threads", "1")
    done = _child("products", *small, "--networks", "autoencoder,lstm", "--json", "out/a.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "out" / "a.json").read_text(encoding="utf-8"))
    assert content["finished"] is True
    assert (content["benchmark"], content["seed"], content["threads"]) == ("products", 0, 1)
    assert {"blockhf", "torch"} <= set(content["versions"])
    assert "seed 0" in done.stdout
    rows = {(row["network"], row["way"]): row for row in content["results"]}
    assert len(rows) == len(content["results"])
    for name, way in (
        ("autoencoder", "double backward"),
        ("autoencoder", "traced"),
        ("autoencoder", "three backward passes"),
        ("lstm", "double backward"),
        ("lstm", "formed"),
    ):
        row = rows[name, way]
        assert row["product"] > 0, row
        assert row["difference"] <= bench.TOLERANCE
        assert way in done.stdout
    assert rows["lstm", "traced"]["note"].startswith("left out")
    assert rows["autoencoder", "traced, compiled"]["note"].startswith("left out")
    assert not any("wrong" in row["note"] for row in rows.values())


def _run(what: str, options: bench.Options, out: Path) -> Any:
    assert bench.run(what, options, out, Console(file=io.StringIO()))
    return json.loads(out.read_text(encoding="utf-8"))


def test_updates_are_measured(tmp_path: Path) -> None:
    content = _run("step", bench.Options(samples=4, repetitions=1), tmp_path / "b.json")
    rows = {row["optimizer"]: row for row in content["results"]}
    assert list(rows) == [
        "HF, curvature 4",
        "block HF, curvature 4",
        "HF, curvature 2",
        "block HF, curvature 2",
        "Adam, batch 20",
        "block HF, formed blocks",
        "block HF, double backward",
    ]
    assert all(row["seconds"] > 0 for row in rows.values())
    assert rows["block HF, double backward"]["note"].startswith("extrapolated")
    adam, alone, block = (
        rows[name] for name in ("Adam, batch 20", "HF, curvature 4", "block HF, curvature 4")
    )
    assert block["ratio"] == pytest.approx(block["seconds"] / adam["seconds"])
    assert block["note"].startswith(f"{block['seconds'] / alone['seconds']:.2f} × HF, curvature 4")


def test_all_of_the_papers_updates_are_measured(tmp_path: Path) -> None:
    options = bench.Options(("autoencoder", "residual"), samples=5, repetitions=1, everything=True)
    rows = _run("step", options, tmp_path / "b.json")["results"]
    found = {name: [row["optimizer"] for row in rows if row["network"] == name] for name in options.networks}
    for name, sizes, batch in (("autoencoder", (5, 2, 1), 10), ("residual", (5, 2, 1), 20)):
        assert found[name] == [
            *(f"{kind}, curvature {size}" for size in sizes for kind in ("HF", "block HF")),
            f"Adam, batch {batch}",
        ]


def test_memory_is_measured(tmp_path: Path) -> None:
    options = bench.Options(("residual",), samples=4, repetitions=1)
    content = _run("memory", options, tmp_path / "c.json")
    assert len(content["results"]) == 6
    assert all(row["difference"] <= bench.TOLERANCE for row in content["results"])


def test_errors_of_use_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for args, message in (
        (("products", "--networks", "mlp"), "There is no network 'mlp'"),
        (("step", "--networks", "transformer"), "This benchmark is for the networks autoencoder, lstm, res"),
        (("memory", "--repetitions", "0"), "repetitions is 0"),
        (("products", "--device", "hpu:7"), "There is no device 'hpu:7' here"),
        (("step", "--json", str(tmp_path / "file" / "x.json")), ""),
    ):
        monkeypatch.setattr(sys, "argv", ["blockhf", "bench", *args])
        with pytest.raises(SystemExit) as raised:
            cli.main()
        assert raised.value.code == 2
        assert capsys.readouterr().err.startswith(f"Error: {message}")


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(case: peers.Network, options: bench.Options) -> list[bench.Row]:
        if case.name == "residual":
            raise KeyboardInterrupt
        return [bench.Row(case.name, "gradient", product=1.0)]

    monkeypatch.setattr(bench, "products", interrupted)
    args = ["--samples", "1", "--json", str(tmp_path / "a.json")]
    monkeypatch.setattr(sys, "argv", ["blockhf", "bench", "products", *args])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 130
    content = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert content["finished"] is False
    assert [row["network"] for row in content["results"]] == ["autoencoder"]
