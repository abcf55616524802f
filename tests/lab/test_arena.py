"""The arena: its tasks, one run, and what is made of records."""

from __future__ import annotations

import math

import pytest
import torch

from blockhf import blocks
from blockhf_lab.arena import families, tasks
from blockhf_lab.arena.base import evaluate, take
from blockhf_lab.arena.training import train
from blockhf_lab.optimizers import Spec


@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_seed_decides_the_model_and_every_parameter_is_in_a_block(name: str) -> None:
    task = tasks.get(name)
    first, again, other = (task.model(seed) for seed in (0, 0, 1))
    own, same, another = (list(model.parameters()) for model in (first, again, other))
    assert all(map(torch.equal, own, same))
    assert not all(map(torch.equal, own, another))
    blocks.check(first, task.groups(first))


@pytest.mark.parametrize("name", tasks.TASKS)
@pytest.mark.parametrize("family", families.NAMES)
def test_every_tuned_family_has_eight_settings_where_it_applies(name: str, family: str) -> None:
    task = tasks.get(name)
    found = families.settings(task, family)
    if family == families.DEFAULT:
        assert found == ["blockhf"]
    else:
        assert len(set(found)) == (8 if family != "L-BFGS" or task.has_lbfgs else 0)
    assert {families.family_of(text) for text in found} <= {family}
    assert [str(Spec.parse(text)) for text in found] == found  # as records name them


@pytest.mark.parametrize("optimizer", ["adamw:lr=0.01,batch=64", "muon:lr=0.01,batch=64", "blockhf"])
def test_a_run_learns_and_is_evaluated_at_growing_costs(optimizer: str) -> None:
    task = tasks.get("friedman")
    record = train(task, task.load(), Spec.parse(optimizer), 0, 2.0 if optimizer == "blockhf" else 0.5)
    updates, ge, seconds, losses = zip(*record["points"], strict=True)
    assert record["status"] == "finished"
    assert losses[-1] < 0.5 * losses[0]
    assert updates[0] == ge[0] == seconds[0] == 0.0
    assert all(list(column) == sorted(set(column)) for column in (updates, ge, seconds))


def test_a_run_ends_at_its_target() -> None:
    task = tasks.get("friedman")
    record = train(task, task.load(), Spec.parse("adamw:lr=0.01,batch=64"), 0, 5.0, stop_at=0.5)
    assert record["status"] == "reached"
    assert record["points"][-1][3] <= 0.5 < record["points"][-2][3]


def test_evaluation_is_the_mean_over_all_samples_and_moves_no_buffer() -> None:
    task = tasks.get("resnet")
    model = task.model(0)
    samples = (torch.randn(6, 3, 32, 32), torch.arange(6))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    value = evaluate(task, model, samples)
    assert value == pytest.approx(float(task.loss(model, samples)[1].detach()), rel=1e-6)
    model = task.model(0)
    evaluate(task, model, samples)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    parts = [float(task.loss(model, take(samples, slice(start, start + 3)))[1].detach()) for start in (0, 3)]
    assert evaluate(task, task.model(0), samples, chunk=3) == pytest.approx(math.fsum(parts) / 2, rel=1e-6)


def test_the_text_is_made_of_overlapping_pieces() -> None:
    pieces = tasks.get("gpt").load().train[0]
    assert pieces.shape[1] == 33
    assert 0 <= int(pieces.min()) < int(pieces.max()) < 96
