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
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockhf.batches import rebuild, tensors_of
from blockhf.blocks import Block
from blockhf.curvature.base import Curvature, Products, closeness, over_parts, probe
from blockhf.curvature.fisher import MonteCarloFisher
from blockhf.curvature.reasons import in_words
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
            self._compare_with_saved(trace, _kind(key), state)
        traces[key] = trace  # the last used is the last to be forgotten
        if len(traces) > self.max_traces:
            del traces[next(iter(traces))]
        operator, loss = trace.at(samples, part)
        if not check:
            return operator
        difference, rounding = closeness(loss, samples.loss(part), trace.eps)
        if difference <= rounding or not bool(loss.isfinite()):
            if known:
                state.shared.pop("num_stale", None)  # none, as in a run that has yet to trace
            return operator
        del traces[key]
        if not known:
            raise TracingError(_CHANGES)
        _count_stale(state)
        return self._at(curvature, samples, part, state, check=check)

    def _compare_with_saved(self, trace: Trace, kind: str, state: PolicyState) -> None:
        """Find out, in a run that is resumed, whether the trace of before would have become stale.

        That trace is gone, but what it consisted of has been saved: numbers that the objective takes from
        elsewhere are part of it.
        """
        saved: dict[str, int] = state.shared.get("traced", {})
        made: set[str] = state.cache.setdefault("made", set())  # here, so that nothing saved is asked
        now = trace.fingerprint()
        others = [(other, own) for other, own in saved.items() if other != kind]
        state.shared["traced"] = dict([*others, (kind, now)][-self.max_traces :])
        is_first = kind in saved and kind not in made
        made.add(kind)
        if is_first and saved[kind] == now:
            state.shared.pop("num_stale", None)
        elif is_first:
            _count_stale(state)

    def _trace(self, curvature: Curvature, samples: Samples, part: Part) -> Trace:
        start = time.perf_counter()
        modules = samples.structure.modules
        trace = Trace(curvature, samples.objective, part.batch, samples.blocks, modules)
        trace.compile = self.compile
        try:
            operator, _ = trace.at(samples, part)
            self._check(curvature, samples, part, operator)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # oneDNN's LSTM can be recorded, but not run from the record
            raise TracingError(f"the recorded operations do not run: {in_words(error)}") from error
        setup = samples.ledger.setup
        setup["tracing"] = setup.get("tracing", 0.0) + time.perf_counter() - start
        return trace

    @staticmethod
    def _check(curvature: Curvature, samples: Samples, part: Part, operator: TracedPart) -> None:
        """Compare with the double backward: all blocks jointly, and the first and the last by themselves.

        What is recorded is one graph for all blocks, of which those of single blocks are parts.
        """
        blocks, eps = samples.blocks, operator.trace.eps
        mixed = len({(param.dtype, param.device) for param in samples.params}) > 1  # no one vector holds them
        alone = sorted({0, len(blocks) - 1}) if len(blocks) > 1 and not mixed else range(len(blocks))
        compared = [blocks[index] for index in alone]
        if len(alone) < len(blocks):
            compared.append(Block("all", tuple(samples.params)))
        reference = curvature.at(samples.evaluate(part, fresh=True), compared)
        for place, (index, block) in enumerate(zip(alone, compared, strict=False)):
            vector = probe(block)
            found, expected = operator.product(index, index, vector), reference.product(place, place, vector)
            _compare(block, found, expected, eps)
        if len(compared) > len(alone):
            vector = probe(compared[-1])
            sizes = [block.size for block in blocks]
            whole = reference.product(len(alone), len(alone), vector)
            size = float(torch.linalg.vector_norm(whole))
            pieces = zip(
                blocks, torch.split(operator.whole(vector), sizes), torch.split(whole, sizes), strict=True
            )
            for block, found, expected in pieces:
                _compare(block, found, expected, eps, size)


_CHANGES = (
    "the objective's loss differs from the recorded one: it depends on something that changes from call to "
    "call besides batch, parameters and buffers"
)


def _count_stale(state: PolicyState) -> None:
    """Count traces in a row that did not hold any more; a fourth is one too many."""
    number = state.shared.get("num_stale", 0)
    if number >= 3:
        raise TracingError(_CHANGES)
    state.shared["num_stale"] = number + 1


def _kind(key: Any) -> str:
    """What a trace is for, the same in another process: without the identities of parameters and modules."""
    curvature, tensors, nesting, params, sizes, _, autocast = key
    shapes = [rest for _, *rest in params]
    return str(zlib.crc32(repr((curvature, tensors, nesting, shapes, sizes, autocast)).encode()))


def _compare(block: Block, found: Tensor, expected: Tensor, eps: float, size: float = 0.0) -> None:
    off, bound = closeness(found, expected, eps, size)
    if off > bound and bool(expected.isfinite().all()):
        raise TracingError(f"a traced product of block {block.name!r} is off by {off:.1e}")


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
