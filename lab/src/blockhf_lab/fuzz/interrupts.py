"""Steps that end at a random line of the library, and what they leave behind."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

import torch

import blockhf
from blockhf_lab.fuzz import policies
from blockhf_lab.fuzz.cases import CLEAR, Broken, Run, Verdict
from blockhf_lab.fuzz.problems import draw_problem
from blockhf_lab.fuzz.states import Snapshot, differs

LIBRARY = str(Path(blockhf.__file__).parent)

AIMED = {
    "commit",
    "assign_",
    "visit_",
    "frozen",
    "close",
    "protect",
    "losses_at",
    "_away",
    "move_to",
    "refresh_statistics",
    "replayed",
    "restore",
    "twice_differentiable",
    "update",
    "_average",
    "_finish",
    "_isolate",
    "_called",
    "__enter__",
    "__exit__",
}
"""Functions that write parameters, buffers, flags, hooks or state: every other interrupt ends one of them."""


class Interrupter:
    """Counts the library's lines, or raises ``KeyboardInterrupt`` at one of them.

    Args:
        at: The number of the event to raise at; ``None`` only counts.
        opcodes: Whether every operation of the interpreter counts, and not only each line.
    """

    def __init__(self, at: int | None = None, *, opcodes: bool = False) -> None:
        self.at, self.opcodes = at, opcodes
        self.num_events = 0
        self.aimed: list[int] = []
        self.where = ""
        self._known: dict[CodeType, bool] = {}

    def __enter__(self) -> Interrupter:
        self._outside = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._outside)

    def _called(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if code not in self._known:
            self._known[code] = code.co_filename.startswith(LIBRARY)
        if not self._known[code]:
            return None
        if self.opcodes:
            frame.f_trace_opcodes = True
        return self._reached

    def _reached(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == ("opcode" if self.opcodes else "line"):
            if frame.f_code.co_name in AIMED:
                self.aimed.append(self.num_events)
            if self.num_events == self.at:
                sys.settrace(None)
                name = Path(frame.f_code.co_filename).relative_to(LIBRARY)
                self.where = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
                raise KeyboardInterrupt
            self.num_events += 1
        return self._reached


def run_interrupt(rng: Random) -> Verdict:
    """Interrupt a step of a random case."""
    problem = draw_problem(rng)
    factory, options = policies.draw_factory(rng), policies.draw_options(rng, problem)
    if isinstance(options["products"], blockhf.Traced) and rng.random() < 0.7:
        options["products"] = blockhf.Auto()  # tracing has many lines, and few of them write anything
    verdict = Verdict(problem.words | policies.words(factory, options))
    seed, num_before = rng.getrandbits(40), rng.randint(0, 2)
    try:
        runs = [prepared(copy.deepcopy(problem), factory, options, num_before, seed) for _ in range(2)]
        verdict.run("interrupt", lambda: verdict.words.update(outcome=interrupt(rng, *runs)))
    except CLEAR as error:
        verdict.refusals.append(f"interrupt: {type(error).__name__}: {error}")
    if "outcome" not in verdict.words and verdict.findings:
        verdict.words["outcome"] = "finding"
    return verdict


def prepared(problem: Any, factory: str, options: dict[str, Any], num_before: int, seed: int) -> Run:
    """A run after some steps, the same each time."""
    run = Run.make(problem, problem.model, factory, options)
    torch.manual_seed(seed)
    for _ in range(num_before):
        run.step()
    return run


def interrupt(rng: Random, run: Run, twin: Run) -> str:
    """Interrupt a step of a run whose twin makes it undisturbed.

    Returns:
        Whether the step was undone, or had already been made as a whole.
    """
    random, opcodes = torch.get_rng_state(), rng.random() < 0.3
    with Interrupter(opcodes=opcodes) as counted:
        loss = twin.step()
    after = twin.snapshot()
    torch.set_rng_state(random)
    before = run.snapshot()
    aimed = counted.aimed and rng.random() < 0.5
    at = rng.choice(counted.aimed) if aimed else rng.randrange(counted.num_events)
    interrupter = Interrupter(at, opcodes=opcodes)
    try:
        with interrupter:
            run.step()
    except KeyboardInterrupt:
        pass
    else:
        return "not reached"
    left = run.snapshot()
    if changed := before.changed(left):
        if not after.changed(left, "report"):
            return "made as a whole"
        raise Broken(f"interrupted at {interrupter.where}: {', '.join(changed)} not as before")
    run.number -= 1
    _check_next(run, after, loss, interrupter.where)
    return "undone"


def _check_next(run: Run, after: Snapshot, loss: Any, where: str) -> None:
    again = run.step()
    changed = after.changed(run.snapshot(), "report")
    if changed or differs(loss, again):
        raise Broken(
            f"after an interrupt at {where} the next step has another {', '.join(changed) or 'loss'}"
        )
