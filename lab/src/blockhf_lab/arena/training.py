"""One run of the arena: a task, an optimizer, a seed, and a record of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from blockhf import BlockHF, blocks, flops
from blockhf_lab.arena.base import Batch, Data, Objective, Task, evaluate, take
from blockhf_lab.optimizers import MULTIPLY, Spec

GROWTH = 1.1
"""A run is evaluated when its CPU seconds have grown by this factor: targets count as reached that late."""
_COUNTED_STEPS = 20  # after the first; SOAP does its dearest work in each tenth
_FIRST = 0.01  # of the budget, before which nothing is evaluated


@dataclass(frozen=True)
class Point:
    """Where a run was evaluated: updates, GE (none where nothing is counted), CPU seconds, and the loss."""

    update: int
    ge: float | None
    seconds: float
    loss: float


def batches(
    samples: Batch, size: int | None, seed: int, order: Callable[[Batch], Batch] | None = None
) -> Iterator[Batch]:
    """Batches without end, in an order of their own in each epoch; all samples in their own order if none.

    ``order`` then puts the samples of each in another order.
    """
    number = len(samples[0])
    if size is None or size >= number:
        samples = samples if order is None else order(samples)
        while True:
            yield samples
    generator = torch.Generator().manual_seed(seed)
    while True:
        places = torch.randperm(number, generator=generator)
        for start in range(0, number - size + 1, size):
            batch = take(samples, places[start : start + size])
            yield batch if order is None else order(batch)


def unit_flops(task: Task, model: nn.Module, data: Data) -> float:
    """Counted operations of one GE, the gradient on the larger of the peers' batches."""
    batch = take(data.train, slice(8))
    with sdpa_kernel(SDPBackend.MATH), flops.Counter() as counter:
        _, loss = task.loss(model, batch)
        torch.autograd.grad(loss, [param for param in model.parameters() if param.requires_grad])
    return float(counter.flops / len(batch[0]) * task.batches[-1])


class Method:
    """An optimizer at work on a model."""

    def __init__(self, task: Task, spec: Spec, model: nn.Module, data: Data) -> None:
        self.task, self.spec = task, spec
        self.objective: Objective = task.objective(model)
        self.optimizer: Optimizer = spec.bare(model, task.groups)
        self._flops = unit_flops(task, model, data)
        self._own_flops: list[int] = []

    @property
    def batch_size(self) -> int | None:
        """Samples of an update; none for all."""
        if "batch" in self.spec.options:
            return int(self.spec.options["batch"])
        return self.task.own_batch if self.spec.is_second_order else self.task.batches[-1]

    @property
    def num_updates(self) -> int:
        """How often the last update moved the parameters: as often as a walk has small steps."""
        report = self.optimizer.report if isinstance(self.optimizer, BlockHF) else None
        return 1 if report is None else report.work.get("small_steps", 1)

    def update(self, batch: Batch) -> float | None:
        """One update; returns its cost in GE, or none where nothing is counted."""
        if isinstance(self.optimizer, BlockHF):
            self.optimizer.step(self.objective, batch)
            assert self.optimizer.report is not None
            return self.optimizer.report.work["flops"] / self._flops if self._flops else None
        num_gradients = 0

        def closure() -> Tensor:
            nonlocal num_gradients
            num_gradients += 1
            self.optimizer.zero_grad()
            _, loss = self.objective(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        share = len(batch[0]) / self.task.batches[-1]
        if self.spec.name in MULTIPLY:
            closure()
            own = self._counted_step()
            return share + own / self._flops if self._flops else share
        self.optimizer.step(closure)  # type: ignore[arg-type]
        return num_gradients * share

    def _counted_step(self) -> float:
        """A step, and the operations of its own; counted in the first ones alone, as counting takes time."""
        if len(self._own_flops) > _COUNTED_STEPS:
            self.optimizer.step()
            return sum(self._own_flops[1:]) / _COUNTED_STEPS
        with flops.Counter() as counter:
            self.optimizer.step()
        self._own_flops.append(int(counter.flops))
        return self._own_flops[-1]


def warm_up(spec: Spec) -> None:
    """Make a step on a toy, so that what is imported and set up at first use is on no optimizer's clock."""
    model = nn.Linear(3, 2)
    batch = torch.randn(32, 3), torch.randn(32, 2)

    def objective(batch: Batch) -> tuple[Tensor, Tensor]:
        outputs: Tensor = model(batch[0])
        return outputs, (outputs - batch[1]).square().mean()

    def closure() -> Tensor:
        loss = objective(batch)[1]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    optimizer = spec.bare(model, blocks.single)
    if isinstance(optimizer, BlockHF):
        optimizer.step(objective, batch)
    else:
        closure()
        optimizer.step(closure if spec.name == "lbfgs" else None)  # type: ignore[arg-type]


def train(
    task: Task,
    data: Data,
    spec: Spec,
    seed: int,
    seconds: float,
    *,
    growth: float = GROWTH,
    stop_at: float | None = None,
    on_point: Callable[[Point, Method], None] | None = None,
) -> dict[str, Any]:
    """Train within CPU seconds of updates, and evaluate now and then, off the clock.

    Args:
        task: The task.
        data: Its samples.
        spec: The optimizer.
        seed: Of the model and of the order of the samples.
        seconds: CPU seconds of updates.
        growth: Of the CPU seconds from one evaluation to the next; 1 evaluates after each step.
        stop_at: A loss at which the run ends.
        on_point: Is told of each evaluation.

    Returns:
        The run's record: its name, status, and points.
    """
    warm_up(spec)
    model = task.model(seed)
    points = [Point(0, 0.0, 0.0, evaluate(task, model, data.evaluated))]
    status, used, ge, update = "finished", 0.0, 0.0, 0
    due = _FIRST * seconds if growth > 1 else 0.0
    method = Method(task, spec, model, data)
    stream = batches(data.train, method.batch_size, seed, task.order)
    while used < seconds:
        batch = next(stream)
        before = time.process_time()
        try:
            cost = method.update(batch)
        except (RuntimeError, ValueError) as error:
            status = f"failed: {str(error).splitlines()[0][:200]}"
            break
        used += time.process_time() - before
        update, ge = update + method.num_updates, math.nan if cost is None else ge + cost
        if used < due and used < seconds:
            continue
        loss = evaluate(task, model, data.evaluated)
        due = used * growth
        points.append(Point(update, None if math.isnan(ge) else ge, used, loss))
        if on_point is not None:
            on_point(points[-1], method)
        if not math.isfinite(loss):
            status = "diverged"
            break
        if stop_at is not None and loss <= stop_at:
            status = "reached"
            break
    test = None if data.test is None else evaluate(task, model, data.test)
    return {
        "task": task.name,
        "optimizer": str(spec),
        "seed": seed,
        "budget": seconds,
        "status": status,
        "num_params": sum(param.numel() for param in model.parameters()),
        "source": data.source,
        "test": test,
        "points": [_rounded(point) for point in points],
    }


def _rounded(point: Point) -> list[float | None]:
    """Update, GE, seconds and loss with as many digits as say something."""
    values = (point.ge, point.seconds, point.loss)
    return [point.update, *(None if value is None else float(f"{value:.5g}") for value in values)]
