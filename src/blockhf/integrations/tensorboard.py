"""TensorBoard: the numbers of a report as curves."""

from __future__ import annotations

from typing import Any

from blockhf.integrations import scalars
from blockhf.report import StepReport


def write_report(writer: Any, report: StepReport, prefix: str = "blockhf/") -> None:
    """Add a step's numbers to a ``SummaryWriter``.

    Args:
        writer: Anything with ``add_scalar(name, value, step)``.
        report: ``optimizer.report``.
        prefix: What the names begin with.
    """
    for name, value in scalars(report, prefix).items():
        writer.add_scalar(name, value, report.step)
