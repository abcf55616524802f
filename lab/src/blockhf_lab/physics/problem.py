"""What the tasks without noise have in common: points of several kinds in one batch, residuals, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from blockhf_lab.tasks import Batch, Preset, Samples, Task

DTYPE = torch.float64


class Kind(NamedTuple):
    """Points that have one kind of residual.

    Attributes:
        points: Their coordinates, a row for each.
        values: What is prescribed there: a right-hand side, a boundary value, a measurement.
        weight: Of the mean square of their residuals in the loss.
    """

    points: Tensor
    values: Tensor
    weight: float = 1.0


class View(NamedTuple):
    """Where a solution is drawn: points on a line or on a grid of rows and columns.

    Attributes:
        points: Row by row.
        shape: ``(points,)``, or rows and columns.
        extent: Of the drawn coordinates: left, right, bottom and top.
        labels: Of the axes.
    """

    points: Tensor
    shape: tuple[int, ...]
    extent: tuple[float, float, float, float]
    labels: tuple[str, str]


@dataclass(frozen=True, eq=False, kw_only=True)
class PhysicsTask(Task):
    """A task whose outputs are residuals.

    A batch has the points, and for each its kind's number, its prescribed value, and its scale, which makes
    the mean over all points a weighted sum of the means over the kinds.

    Attributes:
        residuals: Of a model at points: those of each kind, in the order of the kinds.
        solution: The exact solution, or a reference.
        view: Where to draw it.
        equation: For people.
    """

    residuals: Callable[[nn.Module, Tensor, Tensor], Sequence[Tensor]]
    solution: Callable[[Tensor], Tensor]
    view: Callable[[], View]
    equation: str

    def objective(self, model: nn.Module) -> Callable[[Batch], tuple[Tensor, Tensor]]:
        """Residuals and half their mean square."""

        def evaluate(batch: Batch) -> tuple[Tensor, Tensor]:
            points, (kinds, values, scales) = batch[0], batch[1].unbind(1)
            own = self.residuals(model, points, values)
            residual = own[0]
            for index, other in enumerate(own[1:], start=1):
                residual = torch.where(kinds == index, other, residual)
            residual = scales * residual
            return residual, residual.square().mean() / 2

        return evaluate

    @torch.no_grad()
    def train_metrics(self, model: nn.Module, samples: Samples) -> dict[str, float]:
        """The loss on all points."""
        return {"loss": float(self.objective(model)(samples.take(slice(None)))[1])}

    @torch.no_grad()
    def test_metrics(self, model: nn.Module, samples: Samples) -> dict[str, float]:
        """The relative L2 error on the test points."""
        exact = samples.targets[:, 0]
        off = predict(model, samples.inputs) - exact
        return {"error": float(torch.linalg.vector_norm(off) / torch.linalg.vector_norm(exact))}


@torch.no_grad()
def predict(model: nn.Module, points: Tensor) -> Tensor:
    """The first output of a model at points."""
    found: Tensor = model.value(points)  # type: ignore[operator]
    return found[:, 0]


def batch(kinds: Sequence[Kind]) -> Samples:
    """All points as samples; means over any of them are means over the kinds, in expectation."""
    total = sum(len(kind.points) for kind in kinds)
    targets = [
        torch.stack(
            [
                torch.full_like(kind.values, index),
                kind.values,
                torch.full_like(kind.values, (kind.weight * total / len(kind.points)) ** 0.5),
            ],
            dim=1,
        )
        for index, kind in enumerate(kinds)
    ]
    return Samples(torch.cat([kind.points for kind in kinds]), torch.cat(targets))


def test_samples(points: Tensor, solution: Callable[[Tensor], Tensor]) -> Samples:
    """Points to be tested at."""
    return Samples(points, solution(points)[:, None])


test_samples.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test


def grid(*axes: Tensor) -> Tensor:
    """All combinations of coordinates, the first slowest."""
    return torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")], dim=1)


def line(low: float, high: float, number: int) -> Tensor:
    """Evenly spaced numbers, both ends included."""
    return torch.linspace(low, high, number, dtype=DTYPE)


def middles(number: int) -> Tensor:
    """The middles of equal parts of [0, 1]."""
    return (torch.arange(number, dtype=DTYPE) + 0.5) / number


def sobol(number: int, low: Sequence[float], high: Sequence[float], seed: int = 0) -> Tensor:
    """Scrambled Sobol points in a box."""
    engine = torch.quasirandom.SobolEngine(len(low), scramble=True, seed=seed)  # type: ignore[no-untyped-call]
    unit = engine.draw(number, dtype=DTYPE)
    start, stop = torch.tensor(low, dtype=DTYPE), torch.tensor(high, dtype=DTYPE)
    return start + (stop - start) * unit


def space_time(low: float, high: float, end: float, rows: int = 101, columns: int = 101) -> View:
    """A picture of x upwards and t to the right."""
    points = grid(line(low, high, rows), line(0, end, columns))
    return View(points, (rows, columns), (0, end, low, high), ("t", "x"))


def make(
    name: str,
    preset: str,
    *,
    kinds: Sequence[Kind],
    test_points: Callable[[], Tensor],
    solution: Callable[[Tensor], Tensor],
    seconds: tuple[int, int] = (10, 30),
    kind: type[PhysicsTask] = PhysicsTask,
    **options: Any,
) -> PhysicsTask:
    """A task of these kinds of points; ``seconds`` are the budgets of the quick preset and of the others."""
    samples = batch(kinds)
    budget = f"{seconds[0] if preset == 'quick' else seconds[1]}s"
    return kind(
        name=name,
        preset=cast(Preset, preset),
        load=lambda folder: (samples, test_samples(test_points(), solution)),
        loss=_no_loss,
        metric="error",
        large_batch=len(samples),
        race_batch=len(samples),
        num_evaluated=len(samples),
        curvature_batches=(),
        adam_batches=(len(samples),),
        recipe={},
        budget=budget,
        race_search=budget,
        race_budget=budget,
        threads=1,
        is_complete=True,
        solution=solution,
        **options,
    )


def _no_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    raise TypeError("A task in physics has no loss of outputs and targets; take its objective.")
