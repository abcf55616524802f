"""The choice between the ways to a product: by counted operations, and the same in a resumed run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from blockhf import Auto, BlockHF, Cholesky, DoubleBackward, Formed, NoWalk, Traced, blocks
from blockhf.curvature import auto
from blockhf.curvature.formed import FormingError
from blockhf.fx_graphs import TracingError
from curvature_tasks import branching, data, mlp, squares, step


@pytest.mark.usefixtures("nothing_is_too_small")
@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_where_tracing_fails_one_warning_says_why_and_the_step_is_that_of_the_double_backward(
    micro_batch_size: int | None,
) -> None:
    losses = {}
    for way in (Auto(), DoubleBackward()):
        model = mlp(3, 40, 2)
        optimizer = BlockHF.martens(
            blocks.single(model), products=way, max_cg_steps=3, micro_batch_size=micro_batch_size
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                optimizer.step(branching(model), data(8))
        assert len(caught) == (1 if isinstance(way, Auto) else 0)
        assert all("cannot be traced" in str(warning.message) for warning in caught)
        assert optimizer.report is not None
        losses[type(way)] = optimizer.report.loss_after
    assert losses[Auto] == losses[DoubleBackward]


@pytest.mark.usefixtures("nothing_is_too_small")
def test_a_small_block_is_formed_and_a_large_one_is_traced_and_the_report_says_so() -> None:
    model = mlp(3, 4000, 5, 2)
    optimizer = BlockHF.martens(blocks.by_layer(model), max_cg_steps=100, cg_progress=0.0)
    step(optimizer, model, 8)
    assert optimizer.report is not None
    first, middle, last = (block.products for block in optimizer.report.blocks)
    assert first.startswith("traced")
    assert middle.startswith("traced")
    assert last.startswith("formed, 12 x 12: cheaper than 100 products")
    assert "formed" in optimizer.report.details()


@pytest.mark.usefixtures("nothing_is_too_small")
def test_by_default_only_small_blocks_are_formed_for_the_sake_of_an_exact_solution() -> None:
    model = mlp(3, 300, 40, 2)  # 1,200, 12,040 and 82 parameters
    ways = {}
    for small in (1000, 2000):
        optimizer = BlockHF(blocks.by_layer(model), solver=Cholesky(worth=100, small=small))
        step(optimizer, model, 600)
        assert optimizer.report is not None
        ways[small] = [block.products.partition(",")[0] for block in optimizer.report.blocks]
        assert [block.num_products for block in optimizer.report.blocks][1:] == [4, 0]
    assert ways == {1000: ["traced", "traced", "formed"], 2000: ["formed", "traced", "formed"]}
    assert Cholesky().small == 1000


def test_a_tiny_problem_is_left_to_the_double_backward() -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.by_layer(model))
    step(optimizer, model, 8)
    assert optimizer.report is not None
    assert {block.products for block in optimizer.report.blocks} == {
        "double backward: too small for tracing to pay"
    }


@pytest.mark.usefixtures("nothing_is_too_small")
def test_the_choice_is_the_same_each_time() -> None:
    """A resumed run must make the same choice, so nothing in it goes by the clock."""
    notes = set()
    for _ in range(3):
        model = mlp(3, 60, 5, 2)
        optimizer = BlockHF.martens(blocks.by_layer(model), max_cg_steps=12)
        step(optimizer, model, 8)
        assert optimizer.report is not None
        notes.add(tuple(block.products.split(" in ")[0] for block in optimizer.report.blocks))
    assert len(notes) == 1


@pytest.mark.parametrize("products", [Traced, Formed, Auto, DoubleBackward])
def test_every_way_makes_the_same_steps(products: Callable[[], Any]) -> None:
    model = mlp(3, 6, 2)
    reference = copy.deepcopy(model)
    for one, way in ((model, products()), (reference, DoubleBackward())):
        optimizer = BlockHF.paper(
            blocks.by_layer(one), curvature_batch_size=12, products=way, damping=0.1, max_cg_steps=8
        )
        for _ in range(4):
            step(optimizer, one, 20)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", [Traced(), Formed()], ids=["traced", "formed"])
def test_an_objective_without_a_batch_is_refused(way: Any) -> None:
    model, batch = mlp(3, 4, 2), data(8)
    optimizer = BlockHF.martens(blocks.single(model), products=way)
    with pytest.raises((TracingError, FormingError), match="no arguments"):
        optimizer.step(lambda: squares(model)(batch))


@pytest.mark.usefixtures("nothing_is_too_small")
@pytest.mark.parametrize("products", [Auto, Formed])
def test_a_loss_alone_is_refused_in_our_own_words(products: Callable[[], Any]) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF(blocks.by_layer(model), products=products())
    with pytest.raises(ValueError, match="outputs"):
        optimizer.step(lambda batch: squares(model)(batch)[1], data(200))


@pytest.mark.usefixtures("nothing_is_too_small")
def test_a_loaded_state_takes_as_many_samples_where_blocks_are_formed() -> None:
    """What forming costs must not depend on what the process saw before: sizes go by it."""

    def optimizer_for(model: nn.Module) -> BlockHF:
        return BlockHF(blocks.by_layer(model), walk=NoWalk())

    def steps(optimizer: BlockHF, model: nn.Module) -> list[Any]:
        found = []
        for _ in range(4):
            step(optimizer, model, 6000)
            assert optimizer.report is not None
            work = optimizer.report.work
            found.append(
                (work["gradient_batch"], work["forming_flops"], work["flops"] - work["gradient_flops"])
            )
        return found

    straight = mlp(3, 300, 5, 2)
    optimizer = optimizer_for(straight)
    steps(optimizer, straight)
    resumed = copy.deepcopy(straight)
    other = optimizer_for(resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert steps(other, resumed) == steps(optimizer, straight)
    for one, two in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(one, two)


def test_tracing_begins_when_products_have_paid_for_it_also_in_a_resumed_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "_NODE", 40)

    def steps(optimizer: BlockHF, model: nn.Module, number: int) -> list[str]:
        notes = []
        for _ in range(number):
            step(optimizer, model, 8)
            assert optimizer.report is not None
            notes.append(optimizer.report.blocks[0].products.partition(",")[0])
        return notes

    straight = mlp(3, 60, 60, 2)
    optimizer = BlockHF.martens(blocks.by_layer(straight), max_cg_steps=3)
    notes = steps(optimizer, straight, 2)
    resumed = copy.deepcopy(straight)
    other = BlockHF.martens(blocks.by_layer(resumed), max_cg_steps=3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    after = steps(optimizer, straight, 8)
    assert steps(other, resumed, 8) == after
    assert set(notes) == {"double backward: tracing would not pay yet"}
    assert after == sorted(after)  # "double backward" first, "traced" from some step on
    assert after[-1] == "traced"
    for one, two in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.usefixtures("nothing_is_too_small")
@pytest.mark.parametrize("num_positions", [1, 200])
def test_blocks_are_formed_where_a_pass_for_each_output_pays(num_positions: int) -> None:
    model = mlp(3, 4, 4, 4, 2)

    def objective(batch: Any) -> Any:
        outputs = model(batch)
        return outputs, outputs.square().mean()

    optimizer = BlockHF(blocks.by_layer(model))
    inputs = torch.randn(40, num_positions, 3, dtype=torch.float64)
    optimizer.step(objective, inputs[:20])
    assert optimizer.report is not None
    formed = [block.products.startswith("formed") for block in optimizer.report.blocks]
    assert formed == [num_positions == 1] * 4
