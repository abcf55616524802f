"""The plan: its equations on cases worked out by hand, what it counts, its command; real ranks beside it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockhf import blocks
from blockhf_lab import bench, benchmesh, calibration, figures, plan, planning
from blockhf_lab.plan import Machine, Mesh, Model, Part, Update
from children import starts_processes
from command_line import run_main

# Two blocks of 100 and 50 parameters; 10 gradient samples, 4 of curvature, 2 CG iterations: 3 products.
MODEL = Model("toy", (Part("a", 100, 50.0), Part("b", 50, 30.0)), 20.0, 60.0, 7.0, (12, 4))
UPDATE = Update(gradient_batch=8, curvature_batch=4, cg_steps=2)
MACHINE = Machine(
    gradient=10.0, product=20.0, forward=40.0, memory=15 * 4 * 100.0, bandwidth=1000.0, latency=0.5
)


def messages(prediction: plan.Prediction) -> dict[str, plan.Message]:
    return {message.purpose: message for message in prediction.messages}


# The equations


def test_one_rank_sends_nothing_and_does_all() -> None:
    found = plan.predict(MODEL, UPDATE, MACHINE, Mesh())
    assert found.messages == ()
    assert found.sending == {}
    assert found.multiplications == {
        "gradient": 8 * 60.0,
        "linearization": 4 * 2 * 20.0,
        "products": 3 * 4 * (50.0 + 30.0),
    }
    assert found.computing["gradient"] == 48.0
    assert found.computing["linearization"] == 4.0
    # A product: 4 samples of 50 and 30 at 20 a second; the vectors of 100 numbers take a second.
    assert found.computing["CG"] == pytest.approx(3 * (10.0 + 1.0 + 6.0 + 0.5))
    assert found.seconds == pytest.approx(48 + 4 + 52.5 + 4 * 4 * 150 / 6000)


def test_two_coordinates_of_blocks_send_nothing_while_they_solve() -> None:
    found = plan.predict(MODEL, UPDATE, MACHINE, Mesh(block=2))
    assert list(messages(found)) == ["numbers", "sums", "samples", "directions"]
    assert found.computing["CG"] == pytest.approx(3 * 11.0)  # the slower one's
    assert found.computing["gradient"] == 24.0
    assert found.computing["linearization"] == 4.0  # both see all of the curvature's samples
    assert found.loads == pytest.approx((1.0, 6.5 / 11))
    numbers, sums, samples, directions = found.messages
    assert (numbers.handed, numbers.sent, numbers.rounds) == (8 * 3, 24.0, 1)
    assert (sums.handed, sums.sent, sums.rounds) == (4 * 151, 4 * 151.0, 2)
    assert (samples.calls, samples.handed, samples.sent, samples.rounds) == (2, 2 * 16, 32.0, 2)
    assert (directions.calls, directions.handed, directions.sent) == (2, 8 * 7 * 2 + 400, 512.0)
    assert found.sending["sums"] == pytest.approx(2 * 0.5 + 0.604)
    assert found.sending["directions"] == pytest.approx(2 * 0.5 + 0.512)
    assert found.solving == pytest.approx(33.0 + 1.512)


def test_ranks_along_data_share_the_samples_and_add_up_every_product() -> None:
    found = plan.predict(MODEL, UPDATE, MACHINE, Mesh(data=2))
    assert list(messages(found)) == ["numbers", "sums", "products"]
    assert found.computing["CG"] == pytest.approx(3 * (5.0 + 1.0 + 3.0 + 0.5))
    assert found.computing["linearization"] == 2.0
    products = messages(found)["products"]
    assert products.calls == 1 + 3 * 2
    assert products.handed == 4 * 4 + 3 * 4 * 150  # two flags of blocks, two of all
    assert products.sent == pytest.approx(products.handed)
    assert products.rounds == 2 * 7


def test_the_gradient_is_reduced_with_the_fewest_bytes() -> None:
    for ranks in (2, 3, 8):
        message = plan.all_reduce("sums", 4 * 150, ranks)
        assert message.sent == pytest.approx(2 * (ranks - 1) / ranks * 150 * 4)
        assert message.rounds == 2 * math.ceil(math.log2(ranks))


def test_memory() -> None:
    found = plan.predict(MODEL, UPDATE, MACHINE, Mesh(block=2)).memory
    assert found == {
        "parameters, gradient, directions": 3 * 4 * 150,
        "directions gathered": 2 * 512,
        "CG": 4 * (100 + 6 * 100),
        "activations": 4 * 7 * max(4, 2 * 4),
    }
    adam = plan.data_parallel_adam(MODEL, UPDATE, MACHINE, 2).memory
    assert adam == {"parameters, gradient": 1200, "moments": 1200, "activations": 4 * 7 * 4}


def test_micro_batches_save_memory_and_cost_a_forward_pass_with_each_product() -> None:
    small = plan.predict(MODEL, replace(UPDATE, micro_batch=2), MACHINE, Mesh())
    whole = plan.predict(MODEL, UPDATE, MACHINE, Mesh())
    assert small.memory["activations"] == 4 * 7 * 2 * 2
    assert small.computing["CG"] - whole.computing["CG"] == pytest.approx(3 * 2 * 20 * 4 / 40)
    fits = plan.predict(MODEL, replace(UPDATE, micro_batch=4), MACHINE, Mesh())
    assert fits.computing == whole.computing


def test_ranks_that_disturb_each_other_are_slower_together_and_not_alone() -> None:
    shared = replace(MACHINE, efficiency=0.5)
    one, two = (plan.predict(MODEL, UPDATE, machine, Mesh()) for machine in (MACHINE, shared))
    assert one.seconds == two.seconds
    one, two = (plan.predict(MODEL, UPDATE, machine, Mesh(2)) for machine in (MACHINE, shared))
    assert two.computing == {phase: pytest.approx(2 * seconds) for phase, seconds in one.computing.items()}
    assert two.sending == one.sending


def test_adam_shares_the_gradient() -> None:
    found = plan.data_parallel_adam(MODEL, UPDATE, MACHINE, 4)
    assert found.computing["gradient"] == 12.0
    assert found.sending == {"sums": pytest.approx(4 * 0.5 + 1.5 * 0.6)}
    assert plan.data_parallel_adam(MODEL, UPDATE, MACHINE, 1).messages == ()


def test_the_best_mesh_goes_by_the_network() -> None:
    quick, slow = (replace(MACHINE, latency=latency, bandwidth=1e9) for latency in (0.0, 10.0))
    assert plan.best(MODEL, UPDATE, quick, 2).mesh == Mesh(1, 2)  # evenly shared
    assert plan.best(MODEL, UPDATE, slow, 2).mesh == Mesh(2, 1)  # no message in each product
    assert plan.best(MODEL, UPDATE, quick, 4).mesh.ranks == 4
    assert plan.best(MODEL, UPDATE, slow, 8).mesh.block <= 2  # no coordinate without a block


def test_the_best_mesh_is_none_that_is_slower() -> None:
    for ranks in (1, 2, 6, 8):
        found = plan.best(MODEL, UPDATE, MACHINE, ranks).seconds
        for block in (1, 2):
            if ranks % block == 0:
                assert found <= plan.predict(MODEL, UPDATE, MACHINE, Mesh(block, ranks // block)).seconds


def test_scaling_over_ranks() -> None:
    scaled = plan.scaling(MODEL, UPDATE, MACHINE, (1, 2, 4))
    assert [prediction.mesh.ranks for prediction in scaled.block_hf] == [1, 2, 4]
    assert [prediction.mesh for prediction in scaled.data_alone] == [Mesh(1, 1), Mesh(1, 2), Mesh(1, 4)]
    assert plan.speed_ups(scaled.adam)[0] == 1.0


@pytest.mark.parametrize("layers", [1, 2, 24])
def test_products_by_layer_cost_more_than_one_with_all(layers: int) -> None:
    each = plan.transformer(1e6 * layers, layers, 16)
    whole = plan.transformer(1e6 * layers, layers, 16, num_blocks=1)
    total, (single,) = sum(part.product for part in each.blocks), whole.blocks
    assert total / single.product == pytest.approx((layers + 3) / 4)
    assert each.parameters == whole.parameters == single.parameters
    assert single.product == pytest.approx(4 * each.forward)
    assert each.gradient == pytest.approx(3 * each.forward)


def test_a_transformer_in_a_number_of_blocks() -> None:
    model = plan.transformer(24e6, layers=24, tokens=1, num_blocks=5)
    assert sum(part.parameters for part in model.blocks) == 24_000_000
    assert [part.name for part in model.blocks][:2] == ["layers 1 to 5", "layers 6 to 10"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Update(10, 20, 3), "curvature_batch is 20, but must be at most gradient_batch, 10"),
        (lambda: Update(10, 5, 0), "cg_steps is 0, but must be at least 1"),
        (lambda: Machine(0.0, 1.0, 1.0), "gradient is 0.0, but must be above 0"),
        (lambda: Machine(1.0, 1.0, 1.0, latency=-1.0), "latency is -1.0"),
        (lambda: Mesh(0, 2), "neither side may be less than 1"),
        (lambda: plan.transformer(1e6, 0, 1), "No transformer has 1e\\+06 parameters, 0 layers"),
        (lambda: plan.transformer(1e6, 2, 1, 3), "There are 3 blocks, but must be between 1 and the 2"),
        (lambda: planning.Request(), "Name either a task"),
        (lambda: planning.Request(task="lstm", parameters=1.0), "Name either a task"),
        (lambda: planning.Request(task="tree"), "There is no task 'tree'"),
        (lambda: planning.Request(parameters=1e6), "Give the --flops"),
        (lambda: planning.Request(task="cnn", ranks=2, block=2), "either --ranks, or --block"),
        (lambda: planning.Request(task="cnn", ranks=0), "ranks is 0, but must be at least 1"),
        (lambda: planning.Request(task="cnn", latencies=(1.0, 2.0)), "1 bandwidths and 2 latencies"),
        (lambda: benchmesh.Settings(ranks=3), "ranks is 3, but must be 2 or 4"),
        (lambda: benchmesh.Settings(curvature=2000), "curvature is 2000, but must be at most 1200"),
        (lambda: benchmesh.Settings(repetitions=0), "repetitions is 0, but must be at least 1"),
    ],
)
def test_what_cannot_be_planned(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# What is counted


def test_the_autoencoders_products_are_those_of_its_layers() -> None:
    case = bench.network("autoencoder", 2)
    model, _ = calibration.describe(case, case.groups)
    layers = [784_000, 500_000, 125_000, 7_500]
    half, first = sum(layers), layers[0]
    # The tangent begins at the block's first layer, and the cotangent goes no further down.
    assert [part.product for part in model.blocks] == [
        4 * half + 2 * half - 2 * first,
        4 * half - 2 * layers[-1],
    ]
    assert model.forward == 2 * half
    assert model.gradient == 3 * 2 * half - first
    assert model.parameters == sum(param.numel() for param in case.params)
    assert model.sample_bytes == (4 * 784, 4 * 784)
    # The input of each layer, and the difference from the picture.
    assert model.activations == pytest.approx(2 * 784 + 2 * (1000 + 500 + 250) + 30)
    single, _ = calibration.describe(case, blocks.single(case.model))
    assert model.blocks[0].product / single.blocks[0].product == pytest.approx(0.71, abs=0.005)


@pytest.mark.parametrize("task", ["cnn", "transformer"])
def test_other_tasks_are_counted_and_measured(task: str) -> None:
    case = bench.network(calibration.TASKS[task].network, 2)
    model, machine = calibration.describe(case, calibration.partition(case, "2"), repetitions=1)
    assert len(model.blocks) == 2
    assert 2 * model.forward < model.gradient <= 3 * model.forward
    assert all(part.product > model.forward / 10 for part in model.blocks)
    assert all(speed > 1e3 for speed in (machine.gradient, machine.product, machine.forward, machine.memory))


def test_partitions_by_a_word_or_a_number() -> None:
    case = bench.network("autoencoder", 1)
    assert calibration.partition(case, "") is case.groups
    sizes = {word: len(calibration.partition(case, word)) for word in ("single", "module", "layer", "3")}
    assert sizes == {"single": 1, "module": 2, "layer": 8, "3": 3}
    with pytest.raises(ValueError, match="blocks is 'many', but must be a number or one of"):
        calibration.partition(case, "many")


# The command


def test_the_plan_of_a_transformer_is_shown_written_and_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, plot = tmp_path / "new" / "plan.json", tmp_path / "new" / "plan.png"
    sizes = ("--parameters", "1e9", "--flops", "1e14", "--ranks", "64", "--micro-batch", "64")
    networks = ("--bandwidth", "25,0.1", "--latency", "10,20000")
    files = ("--json", str(out), "--plot", str(plot))
    monkeypatch.setenv("COLUMNS", "160")
    assert run_main(monkeypatch, "plan", *sizes, *networks, *files) == 0
    shown = capsys.readouterr().out
    assert "products of layer 24" in shown
    assert "An update on 64 ranks" in shown
    assert "0.1 GB/s, 20 ms" in shown
    content = json.loads(out.read_text())
    assert [len(network["scaling"]) for network in content["networks"]] == [11, 11]
    fast, slow = content["networks"]
    assert fast["block_hf"]["speed_up"] > slow["block_hf"]["speed_up"] > 5
    # Where the network is slow, the sum of the gradients is all that data-parallel Adam does.
    assert slow["adam"]["speed_up"] < 1 < fast["adam"]["speed_up"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in plot.with_suffix(".svg").read_bytes()


def test_the_plan_of_a_task_on_a_given_mesh(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    args = ("autoencoder", "--blocks", "4", "--flops", "1e11", "--block", "2", "--data", "3")
    assert run_main(monkeypatch, "plan", *args, "--json", str(out)) == 0
    capsys.readouterr()
    content = json.loads(out.read_text())
    assert content["networks"][0]["block_hf"]["mesh"] == {"block": 2, "data": 3}
    assert len(content["model"]["blocks"]) == 4
    assert content["update"]["curvature_batch"] == 1200


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("autoencoder", "--bandwidth", "fast"), "bandwidth is 'fast', but must be a number"),
        (("--parameters", "1e6", "--flops", "1", "--blocks", "module"), "must be layer, single or a number"),
        (("autoencoder", "--flops", "1e9", "--bandwidth", "0"), "bandwidth is 0.0, but must be above 0"),
    ],
)
def test_options_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    assert run_main(monkeypatch, "plan", *args) == 2
    assert message in capsys.readouterr().err


def test_the_same_plan_gives_the_same_picture() -> None:
    scaled = plan.scaling(MODEL, UPDATE, MACHINE, (1, 2, 4))
    drawn = [figures.svg(figures.scaling([("here", scaled)], title="toy")) for _ in range(2)]
    assert drawn[0] == drawn[1]


# Beside real ranks; the first test that asks for what they measured waits for them


@pytest.fixture(scope="module")
def measured() -> tuple[benchmesh.Settings, dict[str, Any]]:
    settings = benchmesh.Settings(curvature=40, cg_steps=3, repetitions=1, small=True)
    return settings, benchmesh.measure(2, settings)


def expected_traffic(model: Model, settings: benchmesh.Settings, mesh: Mesh) -> dict[str, int]:
    update = Update(5 * settings.curvature, settings.curvature, settings.cg_steps)
    predicted = plan.predict(model, update, Machine(1e9, 1e9, 1e9), mesh).messages
    calls = {f"{message.purpose}_messages": message.calls for message in predicted}
    return calls | {f"{message.purpose}_bytes": message.handed for message in predicted}


@starts_processes
def test_real_ranks_exchange_what_the_plan_says(
    measured: tuple[benchmesh.Settings, dict[str, Any]],
) -> None:
    settings, found = measured
    for name in ("encoder / decoder", "equal"):
        described = found["models"][name]["model"]
        model = Model(**{**described, "blocks": tuple(Part(**part) for part in described["blocks"])})
        for mesh in (Mesh(2, 1), Mesh(1, 2)):
            assert found["traffic"][f"{name}, {mesh}"] == expected_traffic(model, settings, mesh)


@starts_processes
def test_the_benchmark_compares_with_one_rank_the_machine_and_the_plan(
    measured: tuple[benchmesh.Settings, dict[str, Any]],
) -> None:
    settings, found = measured
    rows = benchmesh.rows(found, 2, settings)
    assert [(row.blocks, row.mesh) for row in rows] == [
        ("encoder / decoder", "2 x 1"),
        ("encoder / decoder", "1 x 2"),
        ("equal", "2 x 1"),
        ("equal", "1 x 2"),
    ]
    for row in rows:
        assert 0 < row.one.solve < row.one.update
        assert row.one.products == row.many.products == 2 * (settings.cg_steps + 1)
        assert 0 < row.many.solve < row.many.update
        assert 1 < row.placement <= 2
        assert row.allowed(2) <= row.placement
        assert row.predicted_speed_up("solve") > 0
    claimed = benchmesh.claimed(rows)
    assert claimed["equal"] == {
        "one": rows[2].one.solve,
        "two": rows[2].many.solve,
        "machine": rows[2].machine,
    }
    assert len(benchmesh.checks(rows)) == 8
    assert benchmesh.table(2, rows).row_count == 8
    lines = benchmesh.markdown(2, rows)
    assert lines[0].startswith("2 ranks; all at once make")
    assert len({line.count("|") for line in lines[2:-1]}) == 1


def test_a_page_with_no_place_for_the_table() -> None:
    with pytest.raises(ValueError, match="The page has no place for the table"):
        benchmesh.with_table("# Scaling", "")


def test_bars() -> None:
    turn, row = benchmesh.Turn, benchmesh.Row
    good = row("equal", "2 x 1", turn(10, 12), turn(6, 8), 2.0, 1.8, (turn(10, 12), turn(6, 8)))
    assert all(benchmesh.checks([good]).values())
    slow = replace(good, many=turn(6.3, 8))
    assert list(benchmesh.checks([slow]).values()) == [True, False, True, True]
    shorter = replace(good, many=turn(6, 8, products=3))
    assert list(benchmesh.checks([shorter]).values()) == [False, True, True, True]
    misjudged = replace(good, predicted=(turn(10, 12), turn(5, 8)))
    assert list(benchmesh.checks([misjudged]).values()) == [True, True, False, True]


def test_the_equal_blocks_of_the_autoencoder() -> None:
    case = bench.network("autoencoder", 2)
    groups = benchmesh.partitions(case.model)["equal"]
    assert blocks.check(case.model, groups)
    model, _ = calibration.describe(case, groups)
    costs = [part.product for part in model.blocks]
    assert sum(costs) / max(costs) > 1.9


@pytest.mark.slow
@starts_processes
def test_four_real_ranks_exchange_what_the_plan_says() -> None:
    settings = benchmesh.Settings(ranks=4, curvature=40, cg_steps=2, repetitions=1, small=True)
    found = benchmesh.measure(4, settings)
    described = found["models"]["equal"]["model"]
    model = Model(**{**described, "blocks": tuple(Part(**part) for part in described["blocks"])})
    for mesh in (Mesh(2, 2), Mesh(1, 4)):
        assert found["traffic"][f"equal, {mesh}"] == expected_traffic(model, settings, mesh)


@starts_processes
def test_where_a_rank_fails_its_error_is_raised_here() -> None:
    settings = benchmesh.Settings(curvature=40, repetitions=1, small=True)
    object.__setattr__(settings, "cg_steps", 0)
    with pytest.raises(Exception, match="max_cg_steps of block 'encoder' is 0"):
        benchmesh.measure(2, settings)
