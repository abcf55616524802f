"""The objective on some samples: its parts, their weights, their random numbers, and what they cost."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockhf.batches import Share, batch_size
from blockhf.blocks import Block
from blockhf.ledger import Ledger
from blockhf.samples import Samples, Structures
from buffers import assert_buffers, buffers
from regression import Regression, batch_norm, dropout, point_of

# --- parts -------------------------------------------------------------------------------------------


def test_the_parts_cover_the_batch_in_order_and_weigh_what_they_hold() -> None:
    samples = Regression(micro_batch_size=3).samples
    assert torch.equal(torch.cat([part.batch["x"] for part in samples.parts]), samples.batch["x"])
    assert [batch_size(part.batch) for part in samples.parts] == [3, 3, 1]
    assert [part.weight for part in samples.parts] == [3 / 7, 3 / 7, 1 / 7]
    assert [part.place for part in samples.parts] == [0, 3, 6]
    assert [part.weight for part in Regression(micro_batch_size=3, reduction="sum").samples.parts] == [
        1,
        1,
        1,
    ]


def test_a_batch_that_fits_is_passed_on_as_it_is() -> None:
    samples = Regression(micro_batch_size=7).samples
    assert samples.parts[0].batch is samples.batch


def test_fewer_samples_stand_for_the_whole_batch() -> None:
    task = Regression(micro_batch_size=3)
    mean = task.front(4)
    assert [batch_size(part.batch) for part in mean.parts] == [3, 1]
    assert [part.weight for part in mean.parts] == [3 / 4, 1 / 4]
    total = Regression(micro_batch_size=3, reduction="sum").front(4)
    assert [part.weight for part in total.parts] == [7 / 4, 7 / 4]
    assert torch.equal(mean.parts[1].batch["x"], task.batch["x"][3:4])


def test_other_samples_may_be_of_any_number() -> None:
    other = {"x": torch.zeros(9, 3).double(), "y": torch.zeros(9, 2).double(), "scale": 1.0}
    samples = Regression(reduction="sum").other(other)
    assert samples.num_samples == 9
    (part,) = samples.parts
    assert part.batch is other
    assert part.weight == 7 / 9


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_the_parts_of_all_processes_weigh_together_what_one_would(
    reduction: str, micro_batch_size: int | None
) -> None:
    whole = Regression(reduction=reduction)
    expected = float(whole.objective(whole.batch)[1].detach())
    counts, ends = [4, 2, 1], [4, 6, 7]
    total = 0.0
    for place, (count, end) in enumerate(zip(counts, ends, strict=True)):
        own = {key: v[end - count : end] if key in "xy" else v for key, v in whole.batch.items()}
        samples = Samples(
            whole.objective,
            own,
            whole.blocks,
            share=Share.of(counts, place),
            reduction=reduction,  # type: ignore[arg-type]
            micro_batch_size=micro_batch_size,
        )
        assert samples.parts[0].place == end - count
        total += sum(part.weight * float(samples.loss(part)) for part in samples.parts)
    assert total == pytest.approx(expected)


def test_a_share_of_nothing_weighs_nothing() -> None:
    task = Regression()
    samples = Samples(task.objective, task.batch, task.blocks, share=Share.of([0, 7], 0))
    assert [part.weight for part in samples.parts] == [0.0]


# --- random numbers ----------------------------------------------------------------------------------


def test_a_part_draws_afresh_once_and_the_same_numbers_ever_after() -> None:
    torch.manual_seed(0)
    w = torch.ones(1, requires_grad=True)
    samples = Samples(lambda: (w * torch.rand(())).sum(), None, [Block("w", (w,))])
    (part,) = samples.parts
    first = samples.run(part).loss
    between = torch.get_rng_state()
    torch.rand(9)
    moved = torch.get_rng_state()
    assert samples.run(part).loss == first
    assert samples.evaluate(part).loss == first
    assert samples.loss(part) == first
    assert torch.equal(torch.get_rng_state(), moved)
    torch.manual_seed(0)
    torch.rand(())
    assert torch.equal(torch.get_rng_state(), between)  # as if no one had watched


def test_dropout_is_the_same_in_the_gradient_and_the_curvature() -> None:
    task = dropout(micro_batch_size=3)
    task.point.gradient()
    losses = [task.samples.run(part).loss.item() for part in task.samples.parts]
    curvature = task.front(7)
    assert [curvature.evaluate(part).loss.item() for part in curvature.parts] == losses


def test_parts_beyond_those_they_are_like_draw_as_the_last_of_them() -> None:
    task = dropout(micro_batch_size=7)
    task.point.gradient()
    other = Samples(
        task.objective, task.batch, task.blocks, micro_batch_size=3, like=task.samples.parts
    )  # fmt: skip
    for part in other.parts:
        other.run(part)
    assert all(part.start is task.samples.parts[0].start for part in other.parts)


def test_where_the_parts_they_are_like_have_not_run_they_draw_afresh() -> None:
    task = dropout()
    curvature = task.front(7)
    loss = curvature.evaluate(curvature.parts[0]).loss
    assert curvature.evaluate(curvature.parts[0], fresh=True).loss == loss


# --- evaluations -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [3, 7])
@pytest.mark.parametrize("micro_batch_size", [None, 4])
def test_samples_are_linearized_part_by_part_and_counted(number: int, micro_batch_size: int | None) -> None:
    task = Regression(micro_batch_size=micro_batch_size)
    task.point.gradient()
    samples = task.front(number)
    for part in samples.parts:
        samples.evaluate(part)
    work = task.samples.ledger.work
    assert work.num_linearizations == len(samples.parts)
    assert work.linearized_samples == number


def test_an_evaluation_that_was_kept_is_handed_over_once() -> None:
    task = Regression()
    point_of(task.samples, keeps_graph=True).gradient()
    (part,) = task.samples.parts
    evaluation = task.samples.evaluate(part)
    assert task.samples.ledger.work.num_linearizations == 0
    torch.autograd.grad(evaluation.loss, evaluation.outputs, create_graph=True)  # its graph is still there
    task.samples.evaluate(part)
    assert task.samples.ledger.work.num_linearizations == 1


def test_a_fresh_evaluation_leaves_the_one_that_was_kept() -> None:
    task = Regression()
    point_of(task.samples, keeps_graph=True).gradient()
    (part,) = task.samples.parts
    fresh = task.samples.evaluate(part, fresh=True)
    assert task.samples.evaluate(part) is not fresh
    assert task.samples.ledger.work.num_linearizations == 1


def test_what_is_released_is_gone() -> None:
    task = Regression()
    point_of(task.samples, keeps_graph=True).gradient()
    kept = weakref.ref(task.samples._evaluation)  # type: ignore[arg-type]
    task.samples.release()
    assert kept() is None


def test_evaluations_write_into_no_buffer() -> None:
    task = batch_norm()
    before = buffers(task.model)
    (part,) = task.samples.parts
    task.samples.evaluate(part)
    task.samples.loss(part)
    task.samples.forward_flops()
    assert_buffers(task.model, before)


def test_a_loss_alone_builds_no_graph() -> None:
    graphs: list[bool] = []
    w = torch.ones(2, requires_grad=True)

    def objective() -> Tensor:
        graphs.append((w * 2).requires_grad)
        return (w**2).sum()

    samples = Samples(objective, None, [Block("w", (w,))])
    assert not samples.loss(samples.parts[0]).requires_grad
    samples.evaluate(samples.parts[0])
    assert graphs == [False, True]


def test_attention_can_be_differentiated_twice_where_it_is_linearized() -> None:
    w = torch.randn(1, 1, 4, 8, requires_grad=True)

    def objective() -> tuple[Tensor, Tensor]:
        outputs = F.scaled_dot_product_attention(w, w, w)
        return outputs, outputs.square().sum()

    samples = Samples(objective, None, [Block("w", (w,))])
    point_of(samples).gradient()
    evaluation = samples.evaluate(samples.parts[0])
    (slope,) = torch.autograd.grad(evaluation.loss, w, create_graph=True)
    assert torch.autograd.grad(slope.sum(), w)[0].isfinite().all()


# --- structure and cost ------------------------------------------------------------------------------


def test_the_structure_is_known_without_a_gradient_and_costs_no_more_than_a_check() -> None:
    task = Regression()
    structure = task.samples.structure
    assert (structure.num_outputs, structure.is_known) == (2, True)
    assert set(structure.modules) == set(task.model.modules())
    nodes = structure.num_nodes
    assert task.samples.ledger.summary()["flops"] == 0
    task.point.gradient()
    assert (task.samples.structure.num_nodes, task.samples.structure.num_outputs) == (nodes, 2)


def test_a_forward_pass_is_counted_once_and_under_checks() -> None:
    task = Regression()
    flops = task.samples.forward_flops()
    assert flops == 2 * 7 * (3 * 4 + 4 * 2)
    assert task.samples.forward_flops() == flops
    assert task.samples.ledger.totals == {"checks": flops}


def counted(structures: Structures, ledger: Ledger, task: Regression) -> dict[str, int]:
    structure, scope = structures.of(task.objective)
    ledger.begin(scope)
    samples = Samples(task.objective, task.batch, task.blocks, ledger=ledger, structure=structure)
    point_of(samples).gradient()
    return dict(ledger.totals)


def test_a_count_is_made_anew_where_modes_or_trainable_parameters_change() -> None:
    """As after a resumption, in which nothing is known: a count must not be that of another state."""
    task, ledger, structures = Regression(), Ledger(), Structures()
    counted(structures, ledger, task)
    whole = counted(structures, ledger, task)
    for param in task.model[0].parameters():
        param.requires_grad_(False)
    task.blocks = task.blocks[1:]
    part = counted(structures, ledger, task)
    assert part["gradient"] < whole["gradient"]
    fresh = counted(Structures(), Ledger(), task)
    assert part == fresh


def test_only_the_last_objectives_are_remembered() -> None:
    structures = Structures(limit=2)
    models = [nn.Linear(1, 1) for _ in range(3)]
    first, _ = structures.of(models[0].forward)
    structures.of(models[1].forward)
    assert structures.of(models[0].forward)[0] is first  # used again
    structures.of(models[2].forward)
    assert structures.of(models[0].forward)[0] is first
    assert len(structures._known) == 2
