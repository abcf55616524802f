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
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from blockhf.blocks import Block
from blockhf.curvature.fisher import MonteCarloFisher
from blockhf.curvature.joins import join
from blockhf.curvature.outline import outline
from blockhf.curvature.products import (
    Curvature,
    Noted,
    PartMatrix,
    closeness,
    disagreement,
    inner,
    over_parts,
)
from blockhf.curvature.rewrites import (
    TracingError,
    dependent_on,
    extract,
    functional,
    hoist,
    is_mutable,
    record,
    restrict,
    reuse_memory,
    simplify,
    write_results,
)
from blockhf.flops import Meter, entries_besides, flops_of_graph
from blockhf.objective import (
    Evaluation,
    Objective,
    Part,
    Problem,
    batch_size,
    evaluate,
    rebuild,
    tensors_of,
    twice_differentiable,
)
from blockhf.operators import gram_by_products

_LONG = 1500
"""Operations from which on only what repeats is compiled."""

_DENSE = 600
"""Multiplications and additions for each entry that anything else writes, from which on a CPU has nothing to
gain from compiling: nearly all of its time goes to matrix products, which compiling leaves as they are."""


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

    def _at(self, curvature: Curvature, problem: Problem, part: Part, *, check: bool) -> _TracedPart:
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


class Trace:
    """The map ``v -> G v`` of one curvature, for batches of one shape.

    Args:
        curvature: Which matrix.
        objective: The user's function.
        batch: A batch of the shape to trace for; its values do not matter.
        blocks: The blocks.
        modules: The modules that the objective calls; they own the blocks' parameters.
    """

    def __init__(
        self,
        curvature: Any,
        objective: Objective,
        batch: Any,
        blocks: Sequence[Block],
        modules: Iterable[nn.Module],
    ) -> None:
        self._host = Host(modules)
        self._names = self._host.owners([param for block in blocks for param in block.params])
        self._sizes = [len(block.params) for block in blocks]
        num_params, num_buffers = sum(self._sizes), len(self._host.named())
        num_inputs = len(list(tensors_of(batch)))

        def whole(params: Any, buffers: Any, inputs: Any, vectors: Any) -> Any:
            params = [param.detach().requires_grad_() for param in params]
            stand_ins = {name: params[index] for name, index in self._names.items()}
            stand_ins.update(zip(self._host.named(), buffers, strict=True))
            with twice_differentiable():
                evaluation: Evaluation = functional_call(
                    self._host,
                    stand_ins,
                    (lambda: evaluate(objective, rebuild(batch, inputs)),),
                    tie_weights=False,
                )
                matrix = curvature.at(evaluation, [_Pieces("all", tuple(params))])
                tangents, curved = matrix.halves(0, vectors) if hasattr(matrix, "halves") else ((), ())
                products = matrix.way_back(0, curved) if tangents else matrix.product(0, 0, vectors)
                self._num_halves = len(tangents)
                return *products, *tangents, *curved, evaluation.loss.detach()

        try:
            recorded = record(
                whole,
                [param.detach() for block in blocks for param in block.params],
                list(self._host.named().values()),
                list(tensors_of(batch)),
                [torch.empty_like(param) for block in blocks for param in block.params],
            )
        except ValueError:
            raise
        except Exception as error:  # whatever an operation without a rule for tracing may raise
            raise TracingError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
        self._split(recorded, num_params + num_buffers + num_inputs)
        self._products: dict[tuple[int, int], _Product] = {}
        self._halves: dict[int, _Product] = {}
        self.seconds = 0.0
        self.compile = False
        self._on_cpu = all(param.device.type == "cpu" for block in blocks for param in block.params)

    def at(self, problem: Problem, part: Part) -> tuple[_TracedPart, Tensor]:
        """The matrix on the samples of a part, and the loss there."""
        assert part.start is not None
        params = [param for block in problem.blocks for param in block.params]
        with part.start.replayed():
            residuals, loss = self.residuals(params, part.batch)
        problem.work.num_linearizations += 1
        problem.work.linearized_samples += batch_size(part.batch)
        problem.meter.add("linearization", self._fixed_flops)
        return _TracedPart(self, problem.blocks, residuals, problem.meter), loss

    def _split(self, recorded: fx.GraphModule, num_fixed: int) -> None:
        graph = recorded.graph
        graph.eliminate_dead_code()
        if not any(map(is_mutable, graph.nodes)):
            simplify(graph)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        vectors = placeholders[num_fixed:]
        dependent = dependent_on(graph, vectors)
        outputs: Any = graph.output_node().args[0]
        *products, loss = outputs
        residuals = [
            node
            for node in graph.nodes
            if node not in dependent
            and node.op != "output"
            and any(user in dependent or (user.op == "output" and node in products) for user in node.users)
        ]
        self.fixed = extract(recorded, placeholders[:num_fixed], [*residuals, loss], dependent, keep=False)
        product = extract(recorded, [*residuals, *vectors], products, dependent, keep=True)
        if any(map(is_mutable, product.graph.nodes)):
            product = functional(product)
        simplify(product.graph)
        join(product.graph, len(residuals))
        self._num_residuals = hoist(self.fixed, product, len(residuals))
        self._product, self._fixed_flops = product, flops_of_graph(self.fixed.graph)
        self.num_nodes = len(graph.nodes)

    def residuals(self, params: Sequence[Tensor], batch: Any) -> tuple[list[Tensor], Tensor]:
        """Run the fixed part: what the products need, and the loss."""
        buffers = [buffer.clone() for buffer in self._host.named().values()]
        with torch.no_grad():
            *residuals, loss = self.fixed(*(param.detach() for param in params), *buffers, *tensors_of(batch))
        return residuals, loss

    def product(self, row: int, column: int) -> _Product:
        """The function from residuals and a column's vector to a row's product."""
        if (row, column) not in self._products:
            product = self._restricted(self._pieces(row), column)
            self._products[row, column] = (_Compiled if self._compiles(product) else _InPlace)(product)
        return self._products[row, column]

    @property
    def has_halves(self) -> bool:
        """Whether the matrix is of the form ``Jᵀ H J``."""
        return self._num_halves > 0

    def halves(self, column: int) -> _Product:
        """The function from residuals and a column's vector to ``J v`` and ``H J v``."""
        if column not in self._halves:
            first = sum(self._sizes)
            product = self._restricted(range(first, first + 2 * self._num_halves), column)
            self._halves[column] = _Compiled(product) if self._compiles(product) else product
        return self._halves[column]

    def _compiles(self, product: _Product) -> bool:
        if not self.compile:
            return False
        assert isinstance(product.function, fx.GraphModule)
        is_dense = product.flops > _DENSE * entries_besides(product.function.graph)
        return not (is_dense and self._on_cpu)

    def _restricted(self, results: range, column: int) -> _Product:
        return _Product(*restrict(self._product, self._num_residuals, results, self._pieces(column)))

    def _pieces(self, block: int) -> range:
        start = sum(self._sizes[:block])
        return range(start, start + self._sizes[block])

    @property
    def note(self) -> str:
        """What the report says of products that are made by this trace."""
        compiled = [product.seconds for product in self._products.values() if isinstance(product, _Compiled)]
        note = f"traced, {self.num_nodes} operations, in {self.seconds:.1f} s"
        if compiled:
            return f"{note}, compiled in {sum(compiled):.1f} s"
        left_plain = self.compile and self._products
        return f"{note}, not compiled, as it is matrix products" if left_plain else note


class _Product:
    """A part of the product's graph: which residuals it reads, and the function itself."""

    def __init__(self, residuals: Sequence[int], function: Callable[..., Any], flops: int = 0) -> None:
        self.residuals, self.function = residuals, function
        self.flops = flops_of_graph(function.graph) if isinstance(function, fx.GraphModule) else flops

    def __call__(self, residuals: Sequence[Tensor], row: Block, column: Block, vector: Tensor) -> Tensor:
        return row.flatten(self.results(residuals, column, vector))

    def results(self, residuals: Sequence[Tensor], column: Block, vector: Tensor) -> Sequence[Any]:
        results: Sequence[Any] = self.function(*self.inputs(residuals, column, vector))
        return results

    def inputs(self, residuals: Sequence[Tensor], column: Block, vector: Tensor) -> list[Tensor]:
        return [*(residuals[index] for index in self.residuals), *column.unflatten(vector)]


class _InPlace(_Product):
    """A product that makes little memory of its own and writes straight into the flat result."""

    def __init__(self, product: _Product) -> None:
        assert isinstance(product.function, fx.GraphModule)
        reuse_memory(product.function.graph)
        write_results(product.function.graph)
        product.function.recompile()
        self.residuals, self.function, self.flops = product.residuals, product.function, product.flops

    def __call__(self, residuals: Sequence[Tensor], row: Block, column: Block, vector: Tensor) -> Tensor:
        result = vector.new_empty(row.size)
        self.function(*self.inputs(residuals, column, vector), *row.unflatten(result))
        return result


class _Compiled(_Product):
    """A product that was compiled, or the same product as it is if that fails."""

    def __init__(self, product: _Product) -> None:
        super().__init__(product.residuals, self._compiled(product.function), product.flops)
        self.plain = product
        self.seconds = 0.0
        self._ready = False

    def results(self, residuals: Sequence[Tensor], column: Block, vector: Tensor) -> Sequence[Any]:
        if self._ready:
            return super().results(residuals, column, vector)
        start = time.perf_counter()
        try:
            result = super().results(residuals, column, vector)
        except Exception as error:  # a missing compiler, or whatever else a compiler may say
            warnings.warn(
                f"Compiling failed ({type(error).__name__}: {str(error).strip().splitlines()[0]}), so "
                "the products run without it. It needs a C++ compiler, e.g. gcc.",
                stacklevel=2,
            )
            self.function = self.plain.function
            result = super().results(residuals, column, vector)
        self.seconds, self._ready = time.perf_counter() - start, True
        if isinstance(self.function, nn.Module):
            for module in self.function.modules():
                if isinstance(module, _Fused):
                    module.is_checked = True
        return result

    @staticmethod
    def _compiled(function: Any) -> Callable[..., Any]:
        if len(function.graph.nodes) <= _LONG:
            return _Fused(function)
        outlined = outline(function, _Fused)
        reuse_memory(outlined.graph)
        outlined.recompile()
        return outlined


class _Fused(nn.Module):
    """A recorded graph as the compiler behind ``torch.compile`` makes it, for inputs like the first ones.

    Dynamo, which comes before it there, would only record what is recorded already, and would ask at each
    call whether the inputs are still alike. That is what a trace holds for, so it is asked until the whole
    product has run once, and then no more.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self._recorded = (module,)  # not as a submodule
        self._compiled: Callable[..., Any] | None = None
        self._layouts: list[Any] = []
        self.is_checked = False

    def forward(self, *inputs: Tensor) -> Any:
        if not self.is_checked:
            layouts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in inputs]
            if self._compiled is None:
                from torch._inductor import compile  # takes a second to import

                self._compiled = compile(self._recorded[0], list(inputs), _options(inputs))
                self._layouts = layouts
            if layouts != self._layouts:
                raise RuntimeError(
                    "a piece of the graph got inputs of another layout than it was compiled for"
                )
        assert self._compiled is not None
        return self._compiled(*inputs)


def _options(inputs: Sequence[Tensor]) -> dict[str, Any]:
    """What the compiler should do otherwise than by default.

    It need not ask for sizes and strides at each call either. And on a CPU it turns a matrix product that is
    added to something into one that is accumulated in a copy of it, although the sum would be fused with
    what comes next.
    """
    on_cpu = all(tensor.device.type == "cpu" for tensor in inputs)
    return {"size_asserts": False, **({"pattern_matcher": False} if on_cpu else {})}


class _TracedPart:
    """The matrix on one part of the batch."""

    def __init__(
        self, trace: Trace, blocks: Sequence[Block], residuals: Sequence[Tensor], meter: Meter
    ) -> None:
        self.trace, self.blocks, self.residuals, self.meter = trace, blocks, residuals, meter

    @property
    def num_bytes(self) -> int:
        owned = {param.untyped_storage().data_ptr() for block in self.blocks for param in block.params}
        sizes = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in self.residuals
        }
        return sum(size for pointer, size in sizes.items() if pointer not in owned)

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        function = self.trace.product(row, column)
        self.meter.add("product", function.flops)
        with torch.no_grad():
            return function(self.residuals, self.blocks[row], self.blocks[column], vector)

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        if not self.trace.has_halves:  # as with the Hessian
            return gram_by_products(self, columns, vectors)
        return inner([self._halves(*pair) for pair in zip(columns, vectors, strict=True)])

    def _halves(self, column: int, vector: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        function = self.trace.halves(column)
        self.meter.add("gram", function.flops)
        with torch.no_grad():
            results = function.results(self.residuals, self.blocks[column], vector)
        return results[: len(results) // 2], results[len(results) // 2 :]


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


class Host(nn.Module):
    """Holds modules, so that ``functional_call`` can lend them other parameters and buffers."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        for index, module in enumerate(modules):
            self.add_module(str(index), module)

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()

    def named(self) -> Mapping[str, Tensor]:
        """The buffers that the modules own themselves."""
        return {
            f"{index}.{name}": buffer
            for index, module in self._modules.items()
            if module is not None
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def owners(self, params: Sequence[Tensor]) -> dict[str, int]:
        """Under which names the modules own which of the parameters."""
        position = {param: index for index, param in enumerate(params)}
        names = {
            f"{index}.{name}": position[param]
            for index, module in self._modules.items()
            if module is not None
            for name, param in module._parameters.items()
            if param in position
        }
        if missing := len(set(position.values()) - set(names.values())):
            raise TracingError(f"{missing} parameters are owned by no module that the objective calls")
        return names


class _Pieces(Block):
    """A block whose vector stays in pieces, one per parameter, so that they can be told apart."""

    def unflatten(self, vector: Any) -> Any:
        return vector

    def flatten(self, tensors: Sequence[Tensor | None]) -> Any:
        return [
            torch.zeros_like(param) if tensor is None else tensor
            for param, tensor in zip(self.params, tensors, strict=True)
        ]
