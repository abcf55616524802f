"""What a user of ``torch.optim`` may expect of a step, and which batches it takes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockhf import (
    Backtracking,
    FixedStep,
    blocks,
)
from optimizer_tasks import (
    FACTORIES,
    Factory,
    Task,
    dense_loss,
    values,
)

# --- manners of torch.optim ----------------------------------------------------------------------------


def test_step_returns_the_detached_loss_at_the_starting_point(factory: Factory) -> None:
    task = Task()
    expected = dense_loss(task, task.batch)
    optimizer = factory(blocks.single(task.model))
    loss = optimizer.step(task.objective, task.batch)
    assert torch.equal(loss, expected)
    assert loss.shape == ()
    assert not loss.requires_grad
    assert optimizer.report.loss == float(loss)
    if optimizer.search.evaluates:
        assert optimizer.report.loss_after == pytest.approx(float(dense_loss(task, task.batch)), rel=1e-14)
    else:
        assert optimizer.report.loss_after is None


def test_step_neither_reads_nor_writes_grad(factory: Factory) -> None:
    task, twin = Task(), Task()
    grads = [torch.full_like(param, torch.nan) for param in task.model.parameters()]
    for param, grad in zip(task.model.parameters(), grads, strict=True):
        param.grad = grad
    factory(blocks.single(task.model), max_cg_steps=3).step(task.objective, task.batch)
    factory(blocks.single(twin.model), max_cg_steps=3).step(twin.objective, twin.batch)
    assert torch.equal(values(task.model), values(twin.model))
    assert all(p.grad is grad for p, grad in zip(task.model.parameters(), grads, strict=True))
    assert all(grad.isnan().all() for grad in grads)
    assert all(param.grad is None for param in twin.model.parameters())


def test_zero_grad_clears_what_direction_wrote(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.by_layer(task.model), max_cg_steps=3)
    optimizer.direction(task.objective, task.batch)
    assert all(param.grad is not None for param in task.model.parameters())
    optimizer.zero_grad()
    assert all(param.grad is None for param in task.model.parameters())


@pytest.mark.parametrize(
    "search", [Backtracking(), FixedStep(evaluates=True)], ids=["Backtracking", "FixedStep"]
)
def test_parameters_stay_the_same_tensors_in_the_same_storage(factory: Factory, search: Any) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 1))
    model = model.to(memory_format=torch.channels_last)
    inputs = torch.randn(4, 2, 3, 3)

    def objective(batch: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(batch)
        return outputs, (outputs - 1).square().mean()

    def places() -> list[tuple[int, int, tuple[int, ...]]]:
        return [(id(p), p.data_ptr(), p.stride()) for p in model.parameters()]

    before, start = places(), values(model)
    optimizer = factory(blocks.by_layer(model), search=search, damping=1.0, max_cg_steps=3)
    for _ in range(2):
        optimizer.step(objective, inputs)
        assert optimizer.report.accepted
    assert places() == before
    assert not torch.equal(values(model), start)
    assert all(param.is_leaf and param.requires_grad for param in model.parameters())


def test_hooks_run_around_the_step_and_see_the_report(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.by_layer(task.model), max_cg_steps=3)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append(opt.report))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(opt.report))
    losses = [float(optimizer.step(task.objective, task.batch)) for _ in range(2)]
    assert [report and report.loss for report in seen] == [None, losses[0], losses[0], losses[1]]
    assert [report and report.step for report in seen] == [None, 1, 1, 2]


@pytest.mark.parametrize(("method", "curvature_batch_size"), [("step", 7), ("direction", None)])
def test_a_step_without_grad_mode_is_a_step(
    factory: Factory, curvature_batch_size: int | None, method: str
) -> None:
    task, twin = Task(), Task()
    optimizer, other = (
        factory(blocks.by_layer(each.model), max_cg_steps=3, curvature_batch_size=curvature_batch_size)
        for each in (task, twin)
    )
    for _ in range(2):
        getattr(other, method)(twin.objective, twin.batch)
        with torch.no_grad():
            getattr(optimizer, method)(task.objective, task.batch)
            assert not torch.is_grad_enabled()
        assert torch.equal(values(task.model), values(twin.model))


def test_state_is_shaped_like_the_parameters(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.single(task.model), max_cg_steps=3, warm_start=0.95)
    optimizer.step(task.objective, task.batch)
    for param in task.model.parameters():
        assert optimizer.state[param]["direction"].shape == param.shape
        assert optimizer.state[param]["step"] == 1


def test_without_a_warm_start_no_solution_is_kept(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.single(task.model), max_cg_steps=3, warm_start=0.0)
    optimizer.step(task.objective, task.batch)
    assert all(set(state) == {"step"} for state in optimizer.state.values())


class Writes:
    """Files under /proc that Python opens for writing, whether it may or not."""

    def __init__(self) -> None:
        self.paths: list[str] | None = None
        sys.addaudithook(self._note)  # for as long as the process lives

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if self.paths is not None and event == "open":
            path, _, flags = args
            if str(path).startswith("/proc") and flags & (os.O_WRONLY | os.O_RDWR):
                self.paths.append(str(path))

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[str]]:
        self.paths = found = []
        try:
            yield found
        finally:
            self.paths = None


@cache
def writes() -> Writes:
    return Writes()


def test_memory_is_not_measured_unless_asked_for(factory: Factory) -> None:
    """To measure it, the process' peak is reset, for all who read it."""
    task = Task()
    optimizer = factory(blocks.by_layer(task.model), max_cg_steps=3)
    with writes().watched() as written:
        optimizer.step(task.objective, task.batch)
        optimizer.direction(task.objective, task.batch)
    assert written == []
    assert all(phase.peak_bytes is None for phase in optimizer.report.phases.values())


def test_memory_that_is_measured_is_reset_in_each_phase(factory: Factory) -> None:
    """Else the test above could not fail."""
    task = Task()
    optimizer = factory(blocks.by_layer(task.model), measure_memory=True)
    with writes().watched() as written:
        optimizer.step(task.objective, task.batch)
    assert written == ["/proc/self/clear_refs"] * len(optimizer.report.phases)


# --- batches -------------------------------------------------------------------------------------------


NESTINGS: dict[str, tuple[Any, Any]] = {
    "dict": (lambda x, y: {"image": x, "label": y}, lambda batch: (batch["image"], batch["label"])),
    "list of dict": (
        lambda x, y: [x, {"label": y, "scale": 1.0}],
        lambda batch: (batch[0], batch[1]["label"]),
    ),
    "tuple of list": (lambda x, y: (x, [y, None]), lambda batch: (batch[0], batch[1][0])),
}


@pytest.mark.parametrize("micro_batch_size", [None, 9])
@pytest.mark.parametrize(
    ("factory", "pack", "unpack"),
    [
        pytest.param(factory, *nesting, id=f"{name}-{kind}")
        for name, factory in FACTORIES.items()
        for kind, nesting in NESTINGS.items()
        if name == "default" or kind == "list of dict"
    ],
)
def test_a_batch_may_be_any_nesting(
    factory: Factory, pack: Any, unpack: Any, micro_batch_size: int | None
) -> None:
    task, twin = Task("cross_entropy"), Task("cross_entropy")
    options = {"max_cg_steps": 2, "curvature_batch_size": 7, "micro_batch_size": micro_batch_size}
    optimizer, other = (
        factory(blocks.by_layer(task.model), **options),
        factory(blocks.by_layer(twin.model), **options),
    )
    for _ in range(2):
        optimizer.step(lambda batch: task.objective(unpack(batch)), pack(*task.batch))
        other.step(twin.objective, twin.batch)
    assert torch.equal(values(task.model), values(twin.model))


def test_a_curvature_batch_without_a_batch_is_an_error(factory: Factory) -> None:
    task = Task()
    optimizer = factory(blocks.single(task.model))
    with pytest.raises(ValueError, match="A curvature batch was given without a gradient batch"):
        optimizer.step(lambda: task.objective(task.batch), curvature_batch=task.batch)
