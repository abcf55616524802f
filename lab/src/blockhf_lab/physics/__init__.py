"""Losses without noise: differential equations, an inverse problem, and fits. Each task is a small file.

All points belong to each update. A task's objective returns residuals, one for each point, and half their
mean square; its test is the relative L2 error against an exact or independently computed solution.

>>> sorted(TASKS)[:3]
['allen-cahn', 'burgers', 'curve-fit']
"""

from collections.abc import Callable, Mapping

from blockhf_lab.physics import (
    allen_cahn,
    burgers,
    curve_fit,
    heat,
    inverse,
    multiscale,
    poisson2d,
    poisson5d,
)
from blockhf_lab.physics.problem import PhysicsTask, View

TASKS: Mapping[str, Callable[[str], PhysicsTask]] = {
    "poisson2d": poisson2d.task,
    "poisson5d": poisson5d.task,
    "heat": heat.task,
    "burgers": burgers.task,
    "allen-cahn": allen_cahn.task,
    "multiscale": multiscale.task,
    "inverse": inverse.task,
    "curve-fit": curve_fit.task,
}
"""The tasks by name. A preset changes the budget alone: all are small, and none needs data."""

__all__ = ["TASKS", "PhysicsTask", "View"]
