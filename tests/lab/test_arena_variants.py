"""The default's variants in the arena: what they change, their records, and the tables."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from blockhf import AdamWalk, BlockHF
from blockhf_lab.arena import records, runner, tasks, variants, variants_page
from blockhf_lab.arena.training import Method, Point, batches
from blockhf_lab.arena.variants import PLAIN, STEPS, VARIANTS
from blockhf_lab.arena.variants_page import Variants
from blockhf_lab.optimizers import Spec
from blockhf_lab.parts import FixedRate, NeverBack
from command_line import run_main

DOCS = Path(__file__).parents[2] / "docs" / "arena.md"


def record(stage: str, losses: list[float], **changes: Any) -> records.Record:
    """A run on Friedman's function: evaluation number n after n seconds, 10 n updates and 2 n GE."""
    points = [Point(10 * n, 2.0 * n, float(n), loss) for n, loss in enumerate(losses)]
    own = {"task": "friedman", "seed": 0, "budget": 10.0, "status": "finished", **changes}
    return records.Record(optimizer=VARIANTS[stage].optimizer, family="", stage=stage, points=points, **own)


def found(*runs: records.Record) -> Variants:
    return Variants({(run.task, run.stage, run.seed): run for run in runs}, {"friedman": [2.0, 1.0, 0.5]})


def test_variants_are_picked_with_what_they_are_compared_with() -> None:
    assert [own.name for own in variants.select(["x1024"])] == [PLAIN, "x1024"]
    assert [own.name for own in variants.select(["held-out"])] == [PLAIN, STEPS, "held-out"]
    assert variants.select([]) == variants.select(variants.GROUPS) == list(VARIANTS.values())
    with pytest.raises(ValueError, match=r"no variant 'scales' .* scale, sorted, ablation .* x1000"):
        variants.select(["scales"])


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=lambda variant: variant.name)
def test_every_variant_runs_the_default_but_for_what_it_says(variant: variants.Variant) -> None:
    spec = Spec.parse(variant.optimizer)
    assert str(spec) == variant.optimizer  # as records name it
    task = variant.task(tasks.get("friedman"))
    assert isinstance(spec.bare(task.model(0), task.groups), BlockHF)
    is_other = (variant.scale != 1.0, variant.order is not None, bool(spec.options))
    assert sum(is_other) == (variant.name != PLAIN)


@pytest.mark.parametrize("name", ["classifier", "friedman", "factorization", "burgers", "poisson"])
def test_batches_come_sorted(name: str) -> None:
    task = tasks.get(name)
    samples = {
        "classifier": lambda n: (torch.randn(n, 3), torch.randint(10, (n,))),
        "friedman": lambda n: (torch.randn(n, 3), torch.randn(n, 1)),
        "factorization": lambda n: (torch.randint(9, (n,)), torch.randint(9, (n,)), torch.randn(n)),
        "burgers": lambda n: (torch.randn(n, 2), torch.randn(n), torch.rand(n) > 0.5),
        "poisson": lambda n: (torch.randn(n, 2), torch.rand(n) > 0.5),
    }[name](40)
    for size in (8, None):
        order = VARIANTS["sorted"].task(task).order
        batch = next(batches(samples, size, 0, order))
        place = 0 if name == "poisson" else 2 if name == "factorization" else 1
        keys = batch[place].reshape(len(batch[0]), -1).double().mean(dim=1)
        assert torch.equal(keys, keys.sort().values)
        plain = next(batches(samples, size, 0))
        assert {tuple(row) for row in batch[0].reshape(len(keys), -1).tolist()} == {
            tuple(row) for row in plain[0].reshape(len(keys), -1).tolist()
        }


def test_texts_are_sorted_by_their_first_characters() -> None:
    (pieces,) = variants.by_target((torch.tensor([[2, 0], [0, 9], [1, 5], [0, 1]]),))
    assert pieces.tolist() == [[0, 9], [0, 1], [1, 5], [2, 0]]


def test_the_loss_that_is_evaluated_is_not_scaled_and_powers_of_two_change_no_bit() -> None:
    plain = tasks.get("friedman")
    data = plain.load()
    digests, losses = [], []
    for name in (PLAIN, "x1024", "x1/1024", "x1000"):
        task = VARIANTS[name].task(plain)
        method = Method(task, Spec.parse("blockhf"), task.model(0), data)
        for _ in range(3):
            method.update(data.train)
        assert isinstance(method.optimizer, BlockHF)
        assert method.optimizer.report is not None
        digests.append(variants.digest(method))
        losses.append(method.optimizer.report.loss / VARIANTS[name].scale)
    assert digests[0] == digests[1] == digests[2] != digests[3]
    assert losses[:3] == [losses[0]] * 3
    assert losses[3] == pytest.approx(losses[0], rel=0.1)


def test_runs_are_put_down_once_with_the_bits_at_each_target(tmp_path: Path) -> None:
    plan = runner.Plan(["friedman"], (), [0], tmp_path, share=0.02)
    told: list[str] = []
    variants.run(plan, ["x1024"], told.append)
    plain, scaled = records.read(tmp_path)
    assert (plain.stage, scaled.stage) == (PLAIN, "x1024")
    both = {point.update for point in plain.points} & {point.update for point in scaled.points}
    assert len(both) > 1
    first, second = (
        {point.update: sum_ for point, sum_ in zip(run.points, run.digests, strict=True)}
        for run in (plain, scaled)
    )
    assert {update: first[update] for update in both} == {update: second[update] for update in both}
    assert len(told) == 2
    variants.run(plan, ["scale"], told.append)
    assert len(told) == 2 + 4
    variants.run(runner.Plan(["friedman"], (), [0], tmp_path, share=0.02, again=True), ["x1024"], told.append)
    assert len(told) == 2 + 4 + 2


def test_updates_are_compared_with_the_plain_run_of_the_same_seed() -> None:
    runs = found(
        record(PLAIN, [3, 2, 1, 0.5], digests=["", "a", "b", "c"]),
        record("x1024", [3, 2, 1, 0.5], digests=["", "a", "b", "c"]),
        record("sorted", [3, 2, 1.5, 1], digests=["", "x", "y", "z"]),
    )
    _, (scaled, ordered) = variants_page.robustness(runs)
    assert scaled[1:] == ["3", "3", "3", "3", "1.00 to 1.00, mean 1.00", "0"]
    assert ordered[1:] == ["3", "0", "1", "1", "1.00 to 1.50, mean 1.22", "1"]
    heads, rows = variants_page.updates(runs)
    assert heads == ["task", "seed", PLAIN, "x1024", "sorted"]
    assert rows == [["friedman", "0", "10 / 20 / 30", "10 / 20 / 30", "10 / 30 / –"]]


def test_a_part_costs_the_ratio_without_it_to_with_it_where_both_got_there() -> None:
    runs = found(
        record(PLAIN, [3, 2, 1, 0.6]),
        record("x1024", [3, 2, 1, 0.6]),
        record("rotations", [3, 2.5, 2, 1.5, 1, 0.5]),
        record("walk", [3, 2.5]),
        record(STEPS, [3, 2.5, 2]),
        record("cg", [3, 2.5, 2.5, 2.5, 2]),
    )
    _, rows = variants_page.ablation(runs)
    assert rows[0][:6] == ["nothing", "2", "0", "0", "1.00", "1.00 / 1.00 / –"]
    assert [row[1:] for row in rows[1:]] == [
        ["2", "0", "1", "2.00", "2.00 / 2.00 / –", "2.00", "friedman 2.00", "friedman 2.00"],
        ["0", "2", "0", "–", "– / – / –", "–", "–", "–"],
        ["1", "1", "0", "2.00", "2.00 / – / –", "2.00", "friedman 2.00", "friedman 2.00"],
        ["1", "0", "0", "2.00", "2.00 / – / –", "2.00", "friedman 2.00", "friedman 2.00"],
    ]
    assert math.isnan(variants_page.mean([]))


def test_the_tables_have_their_place_in_the_documentation(tmp_path: Path) -> None:
    variants.run(runner.Plan(["friedman"], (), [0], tmp_path, share=0.01), ["x1024", "rate"], lambda _: None)
    docs = tmp_path / "arena.md"
    docs.write_text(DOCS.read_text(encoding="utf-8"), encoding="utf-8")
    variants_page.write(tmp_path, docs)
    text = docs.read_text(encoding="utf-8")
    assert "| loss × 1,024 |" in text
    assert "| adaptation of the rate |" in text
    with pytest.raises(ValueError, match="has no runs of variants"):
        Variants.read(tmp_path / "none")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "digit"], "There is no task 'digit' in the arena. There are autoencoder"),
        (["--only", "scale,shuffled"], "There is no variant 'shuffled'"),
        (["--processes", "0"], "--processes is 0, but must be at least 1"),
    ],
)
def test_what_there_is_not_is_said_with_what_there_is(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_main(monkeypatch, "arena", "variants", "--out", str(tmp_path), *arguments) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_walk_without_a_part_goes_on_without_it() -> None:
    state: dict[str, Any] = {}
    walk = AdamWalk()
    stretch = walk.stretch(60_000, 1e6, 10_000, 1, state)
    assert stretch is not None
    FixedRate().update(stretch, 0.5, (True, 2.0), state)
    assert state["rate"] == 0.5
    assert NeverBack().judge(4.0, 5.0, 6.0) == (True, 0.2)
    assert NeverBack().judge(4.0, 2.0, 1.0) == walk.judge(4.0, 2.0, 1.0)
    assert NeverBack().judge(4.0, 2.0, math.inf) == (False, 0.25)
    least = AdamWalk(max_samples=1)
    for _ in range(4):
        own = least.stretch(60_000, 1e6, 10_000, 1, state)
        assert own is not None
        least.update(own, 0.5, (True, 0.5), state)
    assert own.num_samples == stretch.num_samples
