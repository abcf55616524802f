"""A doctor for one's own model: what fits, what does not and what to do about it, and what a step costs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from blockhf.curvature import Curvature, GaussNewton
from blockhf.curvature.linearize import as_block
from blockhf.examination import Examination, Finding
from blockhf.isolation import RandomState
from blockhf.objective import Objective, Reduction
from blockhf.samples import Samples


@dataclass(frozen=True)
class CheckReport:
    """What ``blockhf.check`` found.

    Attributes:
        findings: In the order in which they were looked at.
        figures: Costs and sizes by their names, e.g. ``"product_in_gradients"``.
    """

    findings: tuple[Finding, ...]
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def problems(self) -> list[Finding]:
        """Those that ask for something to be done."""
        return [finding for finding in self.findings if finding.is_problem]

    def on(self, topic: str) -> list[Finding]:
        """The findings on one topic."""
        return [finding for finding in self.findings if finding.topic == topic]

    def __str__(self) -> str:
        number = len(self.problems)
        ending = f"Marked with !: {number} of {len(self.findings)}." if number else "Nothing has to be done."
        return "\n".join([*map(str, self.findings), ending])


def check(
    objective: Objective,
    batch: Any = None,
    groups: Sequence[Mapping[str, Any]] = (),
    *,
    curvature: Curvature | None = None,
    reduction: Reduction = "mean",
) -> CheckReport:
    """Look at an objective before it is trained: what will not work, and what a step will cost.

    Parameters, buffers and random numbers are afterwards as they were. It takes about as long as a few steps,
    and as a trace.

    Args:
        objective: As for ``BlockHF.step``.
        batch: A batch as it will be passed to ``step``.
        groups: The blocks, as from ``blocks.by_module(model)``.
        curvature: Which matrix; ``GaussNewton()`` by default.
        reduction: As for ``BlockHF``.

    Example:
        >>> from torch import nn
        >>> from blockhf import blocks
        >>> model, inputs = nn.Linear(2, 1), torch.eye(2)
        >>> def objective(batch):
        ...     outputs = model(batch)
        ...     return outputs, outputs.abs().mean()  # a loss without curvature
        >>> print(check(objective, inputs, blocks.by_layer(model)).problems[0].remedy.partition(",")[0])
        Return what comes before it as outputs
    """
    blocks = [as_block(index, group) for index, group in enumerate(groups)]
    if not blocks:
        raise ValueError("There are no groups. Pass the blocks, e.g. blocks.by_layer(model).")
    start = RandomState(sorted({block.params[0].device for block in blocks}, key=str))
    samples = Samples(objective, batch, blocks, reduction=reduction)
    examination = Examination(samples, groups, curvature or GaussNewton())
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say is found here
            for look in examination.looks:
                if not examination.is_over:
                    examination.findings += look()
    finally:
        start.restore()
    return CheckReport(tuple(examination.findings), examination.figures)
