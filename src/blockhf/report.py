"""What a step did, block by block: a record to print, to log and to test against."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blockhf._torch import peak_memory, reset_peak_memory

_WITHOUT_CG = {"converged": "exact", "step limit": "preconditioner alone"}


@dataclass(frozen=True)
class BlockReport:
    """What conjugate gradients did in one block.

    Attributes:
        name: The block.
        size: Its number of parameters.
        status: Why the solver stopped.
        num_steps: Iterations.
        num_products: Products with the block's matrix.
        residual: Norm of the residual relative to that of the gradient.
        decrease: By how much the block's damped model falls at the full direction.
        damping: The damping of this step.
        norm: Length of the direction.
        coefficient: The share of the direction that was taken; zero in a rejected step.
        products: How the products were made, and why so.
        kind: The class of the module that the block is, where it is one.
    """

    name: str
    size: int
    status: str
    num_steps: int
    num_products: int
    residual: float
    decrease: float
    damping: float
    norm: float
    coefficient: float = 0.0
    products: str = ""
    kind: str = ""

    @property
    def label(self) -> str:
        """The name, with the class of the module where the name is but a number."""
        numbered = self.name.rpartition(".")[2].removeprefix("block").isdigit()
        return f"{self.name}: {self.kind}" if numbered and self.kind else self.name

    def __str__(self) -> str:
        figures = (
            f"residual {self.residual:.1e}, damping {self.damping:.2g}, |d| {self.norm:.3g}, model "
            f"{-self.decrease:+.3g}, taken {self.coefficient:.3g}"
        )
        return f"{self.solved}, {figures}"

    @property
    def solved(self) -> str:
        """How the direction came about: by CG, or without it."""
        if self.num_steps == 0 and self.status in _WITHOUT_CG:
            return _WITHOUT_CG[self.status] if self.norm > 0 else "no gradient"
        return f"{self.num_steps} CG steps, {self.status}"


@dataclass(frozen=True)
class Phase:
    """The cost of one phase of a step; memory is ``None`` where the machine does not tell."""

    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class StepReport:
    """What one step did.

    Attributes:
        step: The number of the step, from 1.
        accepted: Whether the parameters moved.
        reason: Why, or why not.
        loss: The loss before the step, on the gradient batch.
        loss_after: The loss after it, where it is known.
        loss_before: The loss before it, where ``loss_after`` is on other samples than ``loss``.
        compared: Which samples those are, in words.
        predicted: The change of the loss that the quadratic models foretold.
        ratio: Actual over predicted change; near 1 the models are good.
        signal: The slope along the directions on samples that the gradient has not seen, over that on its
            own: 1 without noise.
        blocks: One record per block.
        work: Passes and samples that the step asked of the objective, and floating point operations, of which
            those of checks that a process makes once are not in the total.
        phases: Time and peak memory of each phase.
        warnings: What looks wrong, in sentences; usually nothing.
        hints: What a newcomer may want to know, in sentences; at the first step alone.
        setup: Seconds of this step that later steps do not need again, by what they were spent on.
        spent: What the step was allowed to cost, and why, in words.
        complete: Why the batch is taken for all there is, without noise; empty where it is a sample.
        num_still: How many steps in a row, this one included, have changed next to nothing.
    """

    step: int
    accepted: bool
    reason: str
    loss: float
    loss_after: float | None = None
    loss_before: float | None = None
    compared: str = "held out"
    predicted: float | None = None
    ratio: float | None = None
    signal: float | None = None
    blocks: Sequence[BlockReport] = ()
    work: dict[str, int] = field(default_factory=dict)
    phases: dict[str, Phase] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    hints: Sequence[str] = ()
    setup: dict[str, float] = field(default_factory=dict)
    spent: str = ""
    complete: str = ""
    num_still: int = 0

    @property
    def seconds(self) -> float:
        """Time of the whole step."""
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def num_products(self) -> int:
        """Products of all blocks together."""
        return sum(block.num_products for block in self.blocks)

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts alone, fit for JSON: a number that is not finite is a string."""
        return {**_plain(dataclasses.asdict(self)), "seconds": self.seconds}

    def unusual(self) -> list[str]:
        """What is out of the ordinary, in clauses; usually nothing.

        >>> StepReport(1, True, "first try", 2.0, ratio=0.1).unusual()
        ['the loss fell by 10 % of what the model foretold']
        """
        found = [f"{what} took {seconds:.1f} s, once" for what, seconds in self.setup.items()]
        if self.ratio is not None and self.ratio < 0.25:
            found.append(f"the loss fell by {self.ratio:.0%} of what the model foretold".replace("%", " %"))
        if self.num_still >= STALLED:
            steps = f"{self.num_still} steps in a row"
            found.append(f"stalled: {steps} have lowered the loss by less than {STILL:.0e} of it")
        for status, words in _STATUSES.items():
            if names := [block.label for block in self.blocks if block.status == status]:
                found.append(f"{_listed(names)} {words}")
        return found

    def __str__(self) -> str:
        """The step in one line; below it what is said once."""
        after = "" if self.loss_after is None else f" -> {self.loss_after:.6g}"
        if self.loss_before is not None:
            after = f", {self.compared} {self.loss_before:.6g}{after}"
        num_steps = sum(block.num_steps for block in self.blocks)
        done = [f"{num_steps} CG steps"] if num_steps else []
        for words in _WITHOUT_CG.values():
            if number := sum(block.solved == words for block in self.blocks):
                done.append(f"{number} block{'s' if number > 1 else ''} {words}")
        done.append(self.reason if self.accepted else f"rejected: {self.reason}")
        parts = [f"step {self.step}: loss {self.loss:.6g}{after}", ", ".join(done), f"{self.seconds:.2f} s"]
        lines = ["; ".join([*parts, *self.unusual()])]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines + [f"  hint: {hint}" for hint in self.hints])

    def details(self) -> str:
        """The step block by block, with samples, time and memory; docs/howto/report.md explains the figures.

        >>> print(StepReport(1, True, "fixed step", 2.0, spent="a gradient").details())
        step 1: loss 2; fixed step; 0.00 s
          spent: a gradient
        """
        lines = [str(self)]
        samples = [f"{kind} {self.work[key]:,}" for kind, key in _SAMPLES.items() if key in self.work]
        quality = [f"ratio {self.ratio:.2f}"] if self.ratio is not None else []
        quality += [f"signal {self.signal:.2f}"] if self.signal is not None else []
        times = [
            f"{name} {phase.seconds:.2f} s"
            + ("" if phase.peak_bytes is None else f" / {phase.peak_bytes / 2**20:.0f} MiB")
            for name, phase in self.phases.items()
        ]
        samples += [f"without noise: {self.complete}"] if self.complete else []
        rows = {"samples": samples, "model": quality, "spent": [self.spent] if self.spent else []}
        lines += [f"  {name}: {', '.join(values)}" for name, values in rows.items() if values]
        width = max((len(block.label) for block in self.blocks), default=0)
        ways = {block.products: None for block in self.blocks}
        same = next(iter(ways)) if len(ways) == 1 else ""
        for block in self.blocks:
            own = f"; {block.products}" if block.products and not same else ""
            lines.append(f"  {block.label:<{width}}  {block}{own}")
        lines += [f"  products: {same}"] if same else []
        return "\n".join([*lines, f"  time: {', '.join(times)}"] if times else lines)


STILL = 1e-5
"""A step that lowers the loss by no more than this share of it has changed next to nothing."""

STALLED = 10
"""After so many of them in a row the report speaks of a stall."""

_SAMPLES = {"gradient": "gradient_batch", "curvature": "curvature_batch", "held out": "held_out_batch"}
_STATUSES = {
    "no influence": "has no influence on the outputs",
    "nonpositive curvature": "met curvature that is not positive",
}


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"block{'s' if len(names) > 1 else ''} {shown}"


class Stopwatch:
    """Measures the phases of a step, one after the other; an empty phase tells what is in memory now."""

    def __init__(self, device: torch.device, *, memory: bool) -> None:
        self.phases: dict[str, Phase] = {}
        self._peak = _Peak(device) if memory else None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._peak is not None:
            self._peak.reset()
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.phases[name] = Phase(seconds, None if self._peak is None else self._peak.read())


class _Peak:
    """Peak memory since the last reset: of the device if it keeps count, else of the process on Linux."""

    _RESET = Path("/proc/self/clear_refs")
    _STATUS = Path("/proc/self/status")

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            if self.device.type == "cpu":
                self._RESET.write_text("5")
            else:
                reset_peak_memory(self.device)

    def read(self) -> int | None:
        with contextlib.suppress(OSError, RuntimeError):
            if self.device.type != "cpu":
                return peak_memory(self.device)
            found = re.search(r"VmHWM:\s+(\d+) kB", self._STATUS.read_text())
            return None if found is None else int(found[1]) * 1024
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
