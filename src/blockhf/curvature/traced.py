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
from dataclasses import dataclass
from typing import Any

import torch

from blockhf.batches import rebuild, tensors_of
from blockhf.curvature.base import Curvature, Products, closeness, disagreement, over_parts
from blockhf.curvature.fisher import MonteCarloFisher
from blockhf.curvature.trace import Trace, TracedPart
from blockhf.fx_graphs import TracingError
from blockhf.linalg import BlockOperator, Described
from blockhf.policy import PolicyState
from blockhf.samples import Part, Samples


@dataclass(frozen=True)
class Traced(Products):
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

    compile: bool = False
    memory_budget: int = 0
    max_traces: int = 8

    def linearize(
        self, curvature: Curvature, samples: Samples, num_products: Sequence[int], state: PolicyState
    ) -> BlockOperator:
        """The matrix; raises ``TracingError`` where the objective cannot be traced."""
        if samples.batch is None:
            raise TracingError("an objective of no arguments has no batch to trace with")
        if isinstance(curvature, MonteCarloFisher):
            raise TracingError("the draws of the Monte-Carlo Fisher are not part of the objective")
        used: list[Trace] = []
        single = len(samples.parts) == 1

        def maker(part: Part) -> Callable[[], BlockOperator]:
            # Checked here and not at the first product, so that a failure is met before CG begins. Of several
            # parts none is held on to: that is for the memory budget to say.
            checked = [self._at(curvature, samples, part, state, check=True)]
            used.append(checked[0].trace)
            if not single:
                checked.clear()
            return lambda: (
                checked.pop() if checked else self._at(curvature, samples, part, state, check=False)
            )

        operator = over_parts(curvature, samples, maker, self.memory_budget)
        return Described(operator, lambda: [used[0].note] * len(samples.blocks))

    def _at(
        self, curvature: Curvature, samples: Samples, part: Part, state: PolicyState, *, check: bool
    ) -> TracedPart:
        traces: dict[Any, Trace] = state.cache.setdefault("traces", {})
        key = _signature(curvature, samples, part)
        trace = traces.pop(key, None)
        known = trace is not None
        if trace is None:
            with samples.ledger.once():
                trace = self._trace(curvature, samples, part)
        traces[key] = trace  # the last used is the last to be forgotten
        if len(traces) > self.max_traces:
            del traces[next(iter(traces))]
        operator, loss = trace.at(samples, part)
        if not check:
            return operator
        num_stale = state.shared.get("num_stale", 0)  # traces in a row
        difference, rounding = closeness(loss, samples.loss(part), trace.eps)
        if difference <= rounding or not bool(loss.isfinite()):
            if known:
                state.shared.pop("num_stale", None)  # none, as in a run that has yet to trace
            return operator
        del traces[key]
        if not known or num_stale >= 3:
            raise TracingError(
                f"the objective's loss differs from the traced one by {difference:.1e}: it depends on "
                "something that changes from call to call besides batch, parameters and buffers"
            )
        state.shared["num_stale"] = num_stale + 1
        return self._at(curvature, samples, part, state, check=check)

    def _trace(self, curvature: Curvature, samples: Samples, part: Part) -> Trace:
        start = time.perf_counter()
        modules = samples.structure.modules
        trace = Trace(curvature, samples.objective, part.batch, samples.blocks, modules)
        trace.compile = self.compile
        operator, _ = trace.at(samples, part)
        reference = curvature.at(samples.evaluate(part, fresh=True), samples.blocks)
        for index, block in enumerate(samples.blocks):
            if off := disagreement(operator, reference, index, block.params[0], eps=trace.eps):
                raise TracingError(f"a traced product of block {block.name!r} is off by {off:.1e}")
        setup = samples.ledger.setup
        setup["tracing"] = setup.get("tracing", 0.0) + time.perf_counter() - start
        return trace


def _signature(curvature: Curvature, samples: Samples, part: Part) -> Any:
    """What a trace holds for; the nesting of the batch and the numbers in it included."""
    tensors = [
        (tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors_of(part.batch)
    ]
    nesting = repr(rebuild(part.batch, ("tensor" for _ in tensors)))  # type: ignore[misc]
    params = tuple(
        (id(p), tuple(p.shape), p.stride(), p.dtype, p.device) for b in samples.blocks for p in b.params
    )
    sizes = tuple(len(block.params) for block in samples.blocks)
    modes = samples.scope
    autocast = tuple(
        (kind, torch.is_autocast_enabled(kind)) for kind in sorted({d.type for d in samples.devices})
    )
    return repr(curvature), tuple(tensors), nesting, params, sizes, modes, autocast
