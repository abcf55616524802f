"""What a step costs, counted exactly: passes, products, and what of them outlives the step."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from blockhf import (
    Backtracking,
    BlockHF,
    BlockOperator,
    Curvature,
    Evaluation,
    FixedStep,
    ForwardingOperator,
    GaussNewton,
    LevenbergMarquardt,
    blocks,
)
from blockhf.blocks import Block
from optimizer_tasks import Graphs, Task, values

NUM_SAMPLES = 16
NUM_TANHS = 2  # in the model of the task
CHECKS = [6, 6, 12]  # at the first step: whether the losses of two parts add up to that of both together


class CountedTask(Task):
    """A task that keeps count of its forward passes, by their number of samples."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.passes: list[int] = []
        self.model.register_forward_hook(lambda module, args, output: self.passes.append(len(output)))

    def drain(self) -> list[int]:
        passes, self.passes = self.passes, []
        return passes


class Counted(ForwardingOperator):
    """A matrix whose products are counted by block."""

    def __init__(self, operator: BlockOperator, products: Counter[tuple[int, int]]) -> None:
        super().__init__(operator)
        self.num_products = products

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        self.num_products[row, column] += 1
        return super().product(row, column, vector)


class CountedGaussNewton(Curvature):
    """The usual curvature, with its products counted by block."""

    def __init__(self) -> None:
        self.products: Counter[tuple[int, int]] = Counter()

    def at(self, evaluation: Evaluation, blocks: Sequence[Block]) -> BlockOperator:
        return Counted(GaussNewton().at(evaluation, blocks), self.products)

    def drain(self) -> list[int]:
        assert all(row == column for row, column in self.products), "products between blocks are not needed"
        counts = [self.products[index, index] for index in range(len(self.products))]
        self.products.clear()
        return counts


class Operations(TorchDispatchMode):
    """Counts the operations that are run, forward and backward alike."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def assert_report_agrees(optimizer: BlockHF, passes: list[int], products: list[int]) -> None:
    """The work in the report is the work that was counted, but for checks."""
    report = optimizer.report
    assert report is not None
    work = report.work
    assert work["gradient_samples"] + work["linearized_samples"] + work["evaluated_samples"] == sum(passes)
    assert [block.num_products for block in report.blocks] == products
    assert report.num_products == sum(products)


# --- passes and products ------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", [blocks.single, blocks.by_layer], ids=["one block", "three blocks"])
def test_a_step_of_the_paper_costs_a_gradient_a_linearization_and_its_products(partition: Any) -> None:
    task, curvature, k = CountedTask(), CountedGaussNewton(), 5
    groups = partition(task.model)
    optimizer = BlockHF.paper(
        groups, damping=0.01, max_cg_steps=k, curvature_batch_size=6, curvature=curvature
    )
    for step in range(3):
        optimizer.step(task.objective, task.batch)
        passes, products = task.drain(), curvature.drain()
        assert passes == [NUM_SAMPLES, 6]
        assert products == [k + 1] * len(groups), "a look at the first step, and then a warm start"
        assert_report_agrees(optimizer, passes, [k if step == 0 else k + 1] * len(groups))
        assert ("checks_flops" in optimizer.report.work) == (step == 0)
        work = {name: value for name, value in optimizer.report.work.items() if "flops" not in name}
        assert work == {
            "num_gradients": 1,
            "gradient_samples": NUM_SAMPLES,
            "num_linearizations": 1,
            "linearized_samples": 6,
            "num_evaluations": 0,
            "evaluated_samples": 0,
            "gradient_batch": NUM_SAMPLES,
            "curvature_batch": 6,
            "held_out_batch": 0,
        }


def test_a_step_of_the_paper_without_a_warm_start_costs_no_product_more() -> None:
    task, curvature = CountedTask(), CountedGaussNewton()
    optimizer = BlockHF.paper(
        blocks.by_layer(task.model), damping=0.01, max_cg_steps=5, warm_start=0.0, curvature=curvature
    )
    for num_checks in (1, 0, 0):
        optimizer.step(task.objective, task.batch)
        assert curvature.drain() == [5 + num_checks] * 3


@pytest.mark.parametrize("size", [None, NUM_SAMPLES, 1000])
def test_curvature_on_the_whole_batch_shares_the_pass_of_the_gradient(size: int | None) -> None:
    task = CountedTask()
    optimizer = BlockHF.paper(blocks.by_layer(task.model), damping=0.01, curvature_batch_size=size)
    optimizer.step(task.objective, task.batch)
    assert task.drain() == [NUM_SAMPLES]
    assert optimizer.report.work["num_linearizations"] == 0
    assert optimizer.report.work["curvature_batch"] == NUM_SAMPLES


def test_a_closure_is_called_once_and_once_more_for_each_evaluation() -> None:
    task = CountedTask()
    optimizer = BlockHF.martens(blocks.by_layer(task.model), curvature_batch_size=3)
    optimizer.step(lambda: task.objective(task.batch))
    assert optimizer.report.accepted
    assert task.drain() == [NUM_SAMPLES] * (1 + optimizer.report.work["num_evaluations"])


@pytest.mark.parametrize("max_cg_steps", [1, 7])
def test_products_run_no_forward_operation(max_cg_steps: int) -> None:
    """Counted below autograd, where nothing can hide: tanh itself runs in forward passes alone."""
    task = CountedTask()
    optimizer = BlockHF.paper(
        blocks.by_layer(task.model), damping=0.01, max_cg_steps=max_cg_steps, curvature_batch_size=6
    )
    with Operations() as operations:
        optimizer.step(task.objective, task.batch)
    assert operations.counts["tanh"] == 2 * NUM_TANHS
    assert operations.counts["tanh_backward"] > 2 * NUM_TANHS, "but products do run backward"
    assert operations.counts["mse_loss"] == 2


def test_each_product_costs_the_same_operations() -> None:
    counts = []
    for max_cg_steps in (1, 2, 3):
        task = Task()
        optimizer = BlockHF.paper(blocks.single(task.model), damping=0.01, max_cg_steps=max_cg_steps)
        with Operations() as operations:
            optimizer.step(task.objective, task.batch)
        counts.append(operations.counts)
    assert counts[1]["mm"] > counts[0]["mm"]
    assert counts[2] - counts[1] == counts[1] - counts[0]


# The search, the learning rate, and the number of tries, or None for any number above one.
SEARCHES: dict[str, tuple[Any, float, int | None]] = {
    "a fixed step": (FixedStep(), 0.1, 0),
    "a fixed step with a look": (FixedStep(evaluates=True), 0.1, 1),
    "backtracking that likes its first try": (Backtracking(), 0.1, 1),
    "backtracking that has to shrink": (Backtracking(), 10.0, None),
    "backtracking that gives up": (Backtracking(max_tries=3), 1e6, 3),
}


@pytest.mark.parametrize(("search", "lr", "expected"), SEARCHES.values(), ids=SEARCHES.keys())
@pytest.mark.parametrize("micro_batch_size", [None, 6])
def test_a_search_costs_a_forward_pass_for_each_try(
    search: Any, lr: float, expected: int | None, micro_batch_size: int | None
) -> None:
    task = CountedTask()
    optimizer = BlockHF.martens(
        blocks.by_layer(task.model),
        lr=lr,
        damping=0.01,
        max_cg_steps=4,
        search=search,
        curvature_batch_size=5,
        micro_batch_size=micro_batch_size,
    )
    optimizer.step(task.objective, task.batch)
    passes = task.drain()
    gradient = [NUM_SAMPLES] if micro_batch_size is None else [6, 6, 4]
    num_evaluations = optimizer.report.work["num_evaluations"]
    assert passes == [*gradient, 5, *(CHECKS if micro_batch_size else []), *gradient * num_evaluations]
    assert optimizer.report.work["evaluated_samples"] == NUM_SAMPLES * num_evaluations
    assert num_evaluations > 1 if expected is None else num_evaluations == expected


def test_micro_batches_cost_a_linearization_of_each_part_for_each_product() -> None:
    """The price of the bound on memory: a part's graph is gone when the next one comes."""
    task, curvature = CountedTask(), CountedGaussNewton()
    optimizer = BlockHF.paper(
        blocks.by_layer(task.model),
        damping=0.01,
        max_cg_steps=3,
        curvature_batch_size=10,
        micro_batch_size=6,
        curvature=curvature,
    )
    for num_products, checks, num_checks in ((3, CHECKS, 1), (4, [], 0)):
        optimizer.step(task.objective, task.batch)
        passes, products = task.drain(), curvature.drain()
        gradient, looks, rest = [6, 6, 4], [*checks, *[6, 4] * 3 * num_checks], [6, 4] * 3 * num_products
        assert passes == [*gradient, *looks, *rest]
        assert products == [2 * (num_products + num_checks)] * 3, "one per part"
        assert_report_agrees(optimizer, [*gradient, *rest], [num_products] * 3)
        assert optimizer.report.work["num_gradients"] == 1
        assert optimizer.report.work["num_linearizations"] == 2 * 3 * num_products


def test_a_curvature_batch_that_fits_into_a_micro_batch_is_linearized_once() -> None:
    task = CountedTask()
    optimizer = BlockHF.paper(
        blocks.by_layer(task.model), damping=0.01, curvature_batch_size=6, micro_batch_size=6
    )
    optimizer.step(task.objective, task.batch)
    assert task.drain() == [6, 6, 4, 6, *CHECKS]
    optimizer.step(task.objective, task.batch)
    assert task.drain() == [6, 6, 4, 6]


def test_running_statistics_cost_a_forward_pass_over_the_curvature_s_samples() -> None:
    task = CountedTask(model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    optimizer = BlockHF.paper(blocks.by_layer(task.model), damping=0.1, curvature_batch_size=6)
    for is_training in (True, False):
        task.model.train(is_training)
        optimizer.step(task.objective, task.batch)
        assert task.drain() == [NUM_SAMPLES, 6, *([6] if is_training else [])]


def test_direction_costs_what_a_fixed_step_costs() -> None:
    task, curvature = CountedTask(), CountedGaussNewton()
    optimizer = BlockHF.martens(
        blocks.by_layer(task.model), cg_rtol=0.0, max_cg_steps=5, curvature_batch_size=6, curvature=curvature
    )
    for num_products, num_checks in ((5, 1), (6, 0)):
        optimizer.direction(task.objective, task.batch)
        passes, products = task.drain(), curvature.drain()
        assert passes == [NUM_SAMPLES, 6]
        assert products == [num_products + num_checks] * 3
        assert_report_agrees(optimizer, passes, [num_products] * 3)


def test_a_step_from_a_non_finite_loss_costs_the_gradient_alone() -> None:
    task, curvature = CountedTask(), CountedGaussNewton()
    optimizer = BlockHF.martens(blocks.by_layer(task.model), curvature_batch_size=6, curvature=curvature)
    optimizer.step(lambda batch: (None, task.objective(batch)[1] * torch.nan), task.batch)
    assert task.drain() == [NUM_SAMPLES]
    assert curvature.drain() == []
    assert optimizer.report.work["num_linearizations"] == 0
    assert optimizer.report.blocks == ()


# --- memory -------------------------------------------------------------------------------------------


STYLES: dict[str, Callable[[nn.Module], BlockHF]] = {
    "default": lambda model: BlockHF.martens(blocks.by_layer(model)),
    "default on a part": lambda model: BlockHF.martens(blocks.by_layer(model), curvature_batch_size=6),
    "paper": lambda model: BlockHF.paper(blocks.by_layer(model), damping=0.01, max_cg_steps=4),
    "micro-batches": lambda model: BlockHF.martens(
        blocks.by_layer(model), max_cg_steps=4, micro_batch_size=6, curvature_batch_size=10
    ),
    "rejected by the search": lambda model: BlockHF.martens(blocks.by_layer(model), lr=1e6),
}
all_styles = pytest.mark.parametrize("make", STYLES.values(), ids=STYLES.keys())


@all_styles
def test_no_graph_survives_a_step(make: Callable[[nn.Module], BlockHF]) -> None:
    task = Task()
    optimizer = make(task.model)
    graphs = Graphs()
    with graphs.watch(task.model):
        for _ in range(2):
            loss = optimizer.step(task.objective, task.batch)
            graphs.assert_gone()
    assert loss.grad_fn is None


def test_no_graph_survives_directions() -> None:
    task = Task()
    optimizer = BlockHF.martens(blocks.by_layer(task.model))
    graphs = Graphs()
    with graphs.watch(task.model):
        optimizer.direction(task.objective, task.batch)
        graphs.assert_gone()


@pytest.mark.parametrize("where", ["loss", "gradient", "curvature"])
def test_no_graph_survives_a_step_that_meets_a_non_finite_value(where: str) -> None:
    task = Task()

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs, loss = task.objective(batch)
        if where == "loss":
            return outputs, loss * torch.nan
        if where == "gradient":
            return outputs, loss + (outputs - outputs.detach()).square().sum().sqrt()
        return outputs, loss + (outputs - outputs.detach()).pow(1.5).sum()

    optimizer = BlockHF.martens(blocks.by_layer(task.model))
    graphs = Graphs()
    with graphs.watch(task.model):
        optimizer.step(objective, task.batch)
        graphs.assert_gone()
    assert optimizer.report.reason == f"the {where} is not finite"


class Boom(Exception):
    pass


@pytest.mark.parametrize("call", [1, 2, 3], ids=["in the gradient", "in the curvature", "in the search"])
def test_no_graph_survives_an_exception_in_the_objective(call: int) -> None:
    task = Task()
    calls = 0

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        result = task.objective(batch)
        calls += 1
        if calls == call:
            raise Boom
        return result

    optimizer = BlockHF.martens(blocks.by_layer(task.model), curvature_batch_size=6)
    graphs = Graphs()
    with graphs.watch(task.model):
        with contextlib.suppress(Boom):
            optimizer.step(objective, task.batch)
        graphs.assert_gone()
    assert calls == call


@pytest.mark.parametrize("curvature_batch_size", [None, 6])
@pytest.mark.parametrize("search", [FixedStep(evaluates=True), Backtracking()], ids=["fixed", "backtracking"])
def test_a_search_runs_when_all_graphs_are_gone_and_makes_none(
    search: Any, curvature_batch_size: int | None
) -> None:
    task, graphs = Task(), Graphs()
    home = values(task.model)
    tried = []

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        if not torch.equal(values(task.model), home):
            graphs.assert_gone()
            outputs, loss = task.objective(batch)
            tried.append(loss.requires_grad)
            inputs = batch[0].clone().requires_grad_()
            assert torch.autograd.grad(task.model(inputs).sum(), inputs)[0].any(), "derivatives still work"
            return outputs, loss
        return task.objective(batch)

    optimizer = BlockHF.martens(
        blocks.by_layer(task.model), search=search, curvature_batch_size=curvature_batch_size
    )
    with graphs.watch(task.model):
        optimizer.step(objective, task.batch)
    assert tried == [False] * optimizer.report.work["num_evaluations"]
    assert tried


def live_tensors() -> tuple[int, int]:
    """Number and bytes of all tensors that Python knows of."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return len(tensors), sum(storages.values())


@pytest.mark.parametrize(
    ("damping", "micro_batch_size"),
    [(0.01, None), (LevenbergMarquardt(), 6)],
    ids=["constant damping", "adaptive damping, micro-batches"],
)
def test_after_20_steps_no_more_tensors_live_than_after_5(damping: Any, micro_batch_size: int | None) -> None:
    task = Task("cross_entropy")
    optimizer = BlockHF.martens(
        blocks.by_layer(task.model),
        damping=damping,
        max_cg_steps=2,
        search=Backtracking(),
        curvature_batch_size=8,
        micro_batch_size=micro_batch_size,
    )
    seen = {}
    for step in range(1, 21):
        optimizer.step(task.objective, task.batch)
        if step in (5, 20):
            seen[step] = live_tensors()
    assert seen[20] == seen[5]
    assert seen[5][0] >= 2 * len(list(task.model.parameters()))


def peak(num_samples: int, *, gradient_only: bool, **options: Any) -> int:
    """The most bytes that graphs held at a time during a step."""
    task = Task(num_samples=num_samples)
    optimizer = BlockHF.martens(blocks.by_layer(task.model), max_cg_steps=1, **options)

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs, loss = task.objective(batch)
        return outputs, loss * torch.nan if gradient_only else loss

    graphs = Graphs()
    with graphs.watch(task.model):
        optimizer.step(objective, task.batch)
    assert optimizer.report.accepted != gradient_only
    return graphs.peak_bytes


@pytest.mark.parametrize("gradient_only", [True, False], ids=["gradient", "whole step"])
def test_with_micro_batches_the_graphs_of_one_part_are_in_memory_at_a_time(gradient_only: bool) -> None:
    one_part = peak(4, gradient_only=gradient_only)
    assert peak(16, gradient_only=gradient_only, micro_batch_size=4) <= 1.1 * one_part
    assert peak(16, gradient_only=gradient_only) > 3 * one_part, "without them, all are"
    assert peak(64, gradient_only=gradient_only, micro_batch_size=4) <= 1.1 * one_part
