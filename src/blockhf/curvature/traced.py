"""Products by a traced linearization: trace once, run the fixed part once a step, multiply often.

The whole map ``v -> G v``, objective included, is recorded as one graph of tensor operations, on tensors
without data. What does not depend on ``v`` (the forward pass, the derivatives of the activations, random
draws) becomes the *fixed* part; it runs once a step and leaves residuals. What depends on ``v`` becomes the
*product*. It is linear in ``v``, which makes the products of single blocks easy to find: the other blocks'
share of ``v`` is zero, and an operation whose inputs are all zero is zero as well.

A trace holds for as long as shapes, types, modes and parameters are the same. Numbers that the objective
takes from elsewhere are part of the trace, so each step compares the loss with the objective's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from blockhf.curvature.fisher import MonteCarloFisher
from blockhf.curvature.products import Curvature, Noted, PartMatrix, closeness, disagreement, over_parts
from blockhf.curvature.trace import Trace, TracedPart
from blockhf.fx_graphs import TracingError
from blockhf.objective import Part, Problem, rebuild, tensors_of


class Traced:
    """Products by a traced linearization.

    Each trace is checked once against the double backward, on one vector, and at every step its loss
    is compared with the objective's own. A trace that has gone stale is made anew; where that happens too
    often in a row, the objective cannot be traced.

    Args:
        compile: Run the products through torch's compiler. The first product of each block then takes 10 s
            to a minute; later steps, and later runs on the same machine, reuse what was compiled. What is
            little else than matrix products is left as it is on a CPU, where compiling made it slower.
        memory_budget: How many bytes of residuals of micro-batches to keep between products. The default
            keeps none, if the curvature batch has more than one micro-batch.
        max_traces: How many traces, of different shapes or modes, to remember.
    """

    def __init__(self, *, compile: bool = False, memory_budget: int = 0, max_traces: int = 8) -> None:
        self.compile, self.memory_budget, self.max_traces = compile, memory_budget, max_traces
        self._traces: dict[Any, Trace] = {}
        self._num_stale = 0  # traces in a row

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_traces": {}}  # traces hold on to the model and are made again

    def linearize(self, curvature: Curvature, problem: Problem, num_products: Sequence[int] = ()) -> Noted:
        """The matrix; raises ``TracingError`` where the objective cannot be traced."""
        if problem.batch is None:
            raise TracingError("an objective of no arguments has no batch to trace with")
        if isinstance(curvature, MonteCarloFisher):
            raise TracingError("the draws of the Monte-Carlo Fisher are not part of the objective")
        used: list[Trace] = []
        single = len(problem.curvature_parts()) == 1

        def maker(part: Part) -> Callable[[], PartMatrix]:
            # Checked here and not at the first product, so that a failure is met before CG begins. Of several
            # parts none is held on to: that is for the memory budget to say.
            checked = [self._at(curvature, problem, part, check=True)]
            used.append(checked[0].trace)
            if not single:
                checked.clear()
            return lambda: checked.pop() if checked else self._at(curvature, problem, part, check=False)

        matrix = over_parts(problem, maker, self.memory_budget)
        return Noted(matrix, lambda: [used[0].note] * len(problem.blocks))

    def _at(self, curvature: Curvature, problem: Problem, part: Part, *, check: bool) -> TracedPart:
        key = _signature(curvature, problem, part)
        trace = self._traces.pop(key, None)
        known = trace is not None
        if trace is None:
            with problem.meter.once():
                trace = self._trace(curvature, problem, part)
        self._traces[key] = trace  # the last used is the last to be forgotten
        if len(self._traces) > self.max_traces:
            del self._traces[next(iter(self._traces))]
        matrix, loss = trace.at(problem, part)
        if not check:
            return matrix
        difference, rounding = closeness(loss, problem.loss_of(part))
        if difference <= rounding or not bool(loss.isfinite()):
            if known:
                self._num_stale = 0
            return matrix
        del self._traces[key]
        if not known or self._num_stale >= 3:
            raise TracingError(
                f"the objective's loss differs from the traced one by {difference:.1e}: it depends on "
                "something that changes from call to call besides batch, parameters and buffers"
            )
        self._num_stale += 1
        return self._at(curvature, problem, part, check=check)

    def _trace(self, curvature: Curvature, problem: Problem, part: Part) -> Trace:
        start = time.perf_counter()
        trace = Trace(curvature, problem.objective, part.batch, problem.blocks, problem.modules)
        trace.compile = self.compile
        matrix, _ = trace.at(problem, part)
        reference = curvature.at(problem.linearizable(part, fresh=True), problem.blocks)
        for index, block in enumerate(problem.blocks):
            if off := disagreement(matrix, reference, index, block.size, block.params[0]):
                raise TracingError(f"a traced product of block {block.name!r} is off by {off:.1e}")
        trace.seconds = time.perf_counter() - start
        return trace


def _signature(curvature: Curvature, problem: Problem, part: Part) -> Any:
    """What a trace holds for; the nesting of the batch and the numbers in it included."""
    tensors = [
        (tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors_of(part.batch)
    ]
    nesting = repr(rebuild(part.batch, ("tensor" for _ in tensors)))  # type: ignore[misc]
    params = tuple(
        (id(p), tuple(p.shape), p.stride(), p.dtype, p.device) for b in problem.blocks for p in b.params
    )
    sizes = tuple(len(block.params) for block in problem.blocks)
    modes = tuple((id(module), module.training) for module in problem.modules)
    autocast = tuple(
        (kind, torch.is_autocast_enabled(kind)) for kind in sorted({d.type for d in problem.devices})
    )
    return repr(curvature), tuple(tensors), nesting, params, sizes, modes, autocast
