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
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from blockhf.blocks import Block
from blockhf.curvature.fisher import MonteCarloFisher
from blockhf.curvature.outline import outline
from blockhf.curvature.products import Curvature, Noted, PartMatrix, closeness, over_parts
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

_aten = torch.ops.aten
_LONG = 1500
"""Operations from which on only what repeats is compiled."""
_COPIES = (_aten.detach.default, _aten.alias.default)


class TracingError(Exception):
    """The objective cannot be traced; the message says why."""


class Traced:
    """Products by a traced linearization.

    Each trace is checked once against the double backward, on a random vector, and at every step its loss
    is compared with the objective's own. A trace that has gone stale is made anew.

    Args:
        compile: Run the products through ``torch.compile``. The first product of each block then takes
            10 s to minutes; later steps, and later runs on the same machine, reuse what was compiled.
        memory_budget: How many bytes of residuals of micro-batches to keep between products. The default
            keeps none, if the curvature batch has more than one micro-batch.
        max_traces: How many traces, of different shapes or modes, to remember.
    """

    def __init__(self, *, compile: bool = False, memory_budget: int = 0, max_traces: int = 8) -> None:
        self.compile, self.memory_budget, self.max_traces = compile, memory_budget, max_traces
        self._traces: dict[Any, Trace] = {}
        self._num_stale = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_traces": {}}  # traces hold on to the model and are made again

    def linearize(self, curvature: Curvature, problem: Problem, num_products: Sequence[int] = ()) -> Noted:
        """The matrix; raises ``TracingError`` where the objective cannot be traced."""
        if problem.batch is None:
            raise TracingError("an objective of no arguments has no batch to trace with")
        if isinstance(curvature, MonteCarloFisher):
            raise TracingError("the draws of the Monte-Carlo Fisher are not part of the objective")
        used: list[Trace] = []

        def maker(part: Part) -> Callable[[], PartMatrix]:
            fresh = True

            def make() -> PartMatrix:
                nonlocal fresh
                matrix = self._at(curvature, problem, part, check=fresh)
                fresh = False
                used.append(matrix.trace)
                return matrix

            return make

        matrix = over_parts(problem, maker, self.memory_budget)
        return Noted(matrix, lambda: [used[0].note if used else "traced"] * len(problem.blocks))

    def _at(self, curvature: Curvature, problem: Problem, part: Part, *, check: bool) -> _TracedPart:
        key = _signature(curvature, problem, part)
        known = key in self._traces
        if not known:
            self._traces[key] = self._trace(curvature, problem, part)
            if len(self._traces) > self.max_traces:
                del self._traces[next(iter(self._traces))]
        matrix, loss = self._traces[key].at(problem, part)
        if not check:
            return matrix
        difference, rounding = closeness(loss, problem.loss_of(part))
        if difference <= rounding or not bool(loss.isfinite()):
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
        reference = curvature.at(problem.linearizable(part), problem.blocks)
        for index, block in enumerate(problem.blocks):
            vector = torch.sin(torch.arange(block.size, device=block.params[0].device)).to(
                block.params[0].dtype
            )
            expected = reference.product(index, index, vector)
            difference, rounding = closeness(matrix.product(index, index, vector), expected)
            if difference > rounding and bool(expected.isfinite().all()):
                raise TracingError(f"a traced product of block {block.name!r} is off by {difference:.1e}")
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
                return *matrix.product(0, 0, vectors), evaluation.loss.detach()

        try:
            recorded = _record(
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
        self.seconds = 0.0
        self.compile = False

    def at(self, problem: Problem, part: Part) -> tuple[_TracedPart, Tensor]:
        """The matrix on the samples of a part, and the loss there."""
        assert part.start is not None
        params = [param for block in problem.blocks for param in block.params]
        with part.start.replayed():
            residuals, loss = self.residuals(params, part.batch)
        problem.work.num_linearizations += 1
        problem.work.linearized_samples += batch_size(part.batch)
        return _TracedPart(self, problem.blocks, residuals), loss

    def _split(self, recorded: fx.GraphModule, num_fixed: int) -> None:
        graph = recorded.graph
        graph.eliminate_dead_code()
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        vectors = placeholders[num_fixed:]
        dependent = _dependent(graph, vectors)
        outputs: Any = graph.output_node().args[0]
        *products, loss = outputs
        residuals = [
            node
            for node in graph.nodes
            if node not in dependent
            and node.op != "output"
            and any(user in dependent or (user.op == "output" and node in products) for user in node.users)
        ]
        self.fixed = _extract(recorded, placeholders[:num_fixed], [*residuals, loss], dependent, keep=False)
        product = _extract(recorded, [*residuals, *vectors], products, dependent, keep=True)
        if any(map(_is_mutable, product.graph.nodes)):
            product = _functional(product)
        _simplify(product.graph)
        self._product, self._num_residuals = product, len(residuals)
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
            starts = [sum(self._sizes[:i]) for i in range(len(self._sizes) + 1)]
            product = _restrict(
                self._product,
                self._num_residuals,
                rows=range(starts[row], starts[row + 1]),
                columns=range(starts[column], starts[column + 1]),
            )
            self._products[row, column] = (_Compiled if self.compile else _InPlace)(product)
        return self._products[row, column]

    @property
    def note(self) -> str:
        """What the report says of products that are made by this trace."""
        compiled = [product.seconds for product in self._products.values() if isinstance(product, _Compiled)]
        note = f"traced, {self.num_nodes} operations, in {self.seconds:.1f} s"
        return note + (f", compiled in {sum(compiled):.1f} s" if compiled else "")


class _Product:
    """A part of the product's graph: which residuals it reads, and the function itself."""

    def __init__(self, residuals: Sequence[int], function: Callable[..., Any]) -> None:
        self.residuals, self.function = residuals, function

    def __call__(self, residuals: Sequence[Tensor], row: Block, column: Block, vector: Tensor) -> Tensor:
        return row.flatten(self.function(*self.inputs(residuals, column, vector)))

    def inputs(self, residuals: Sequence[Tensor], column: Block, vector: Tensor) -> list[Tensor]:
        return [*(residuals[index] for index in self.residuals), *column.unflatten(vector)]


class _InPlace(_Product):
    """A product that makes little memory of its own and writes straight into the flat result."""

    def __init__(self, product: _Product) -> None:
        assert isinstance(product.function, fx.GraphModule)
        _reuse_memory(product.function.graph)
        _write_results(product.function.graph)
        product.function.recompile()
        super().__init__(product.residuals, product.function)

    def __call__(self, residuals: Sequence[Tensor], row: Block, column: Block, vector: Tensor) -> Tensor:
        result = vector.new_empty(row.size)
        self.function(*self.inputs(residuals, column, vector), *row.unflatten(result))
        return result


class _Compiled(_Product):
    """A product that ``torch.compile`` made faster, or the same product if that fails."""

    def __init__(self, product: _Product) -> None:
        super().__init__(product.residuals, self._compiled(product.function))
        self.plain = product
        self.seconds = 0.0
        self._ready = False

    def __call__(self, residuals: Sequence[Tensor], row: Block, column: Block, vector: Tensor) -> Tensor:
        if self._ready:
            return super().__call__(residuals, row, column, vector)
        start = time.perf_counter()
        try:
            result = super().__call__(residuals, row, column, vector)
        except Exception as error:  # a missing compiler, or whatever else a compiler may say
            warnings.warn(
                f"torch.compile failed ({type(error).__name__}: {str(error).strip().splitlines()[0]}), so "
                "the products run without it. It needs a C++ compiler, e.g. gcc.",
                stacklevel=2,
            )
            self.function = self.plain.function
            result = super().__call__(residuals, row, column, vector)
        self.seconds, self._ready = time.perf_counter() - start, True
        return result

    @staticmethod
    def _compiled(function: Any) -> Callable[..., Any]:
        def compile(module: fx.GraphModule) -> Any:
            return torch.compile(module, dynamic=False)

        return outline(function, compile) if len(function.graph.nodes) > _LONG else compile(function)


class _TracedPart:
    """The matrix on one part of the batch."""

    def __init__(self, trace: Trace, blocks: Sequence[Block], residuals: Sequence[Tensor]) -> None:
        self.trace, self.blocks, self.residuals = trace, blocks, residuals

    @property
    def num_bytes(self) -> int:
        owned = {param.untyped_storage().data_ptr() for block in self.blocks for param in block.params}
        sizes = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in self.residuals
        }
        return sum(size for pointer, size in sizes.items() if pointer not in owned)

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        with torch.no_grad():
            return self.trace.product(row, column)(
                self.residuals, self.blocks[row], self.blocks[column], vector
            )


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
    return repr(curvature), tuple(tensors), nesting, params, sizes, modes, torch.is_autocast_enabled()


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


def _record(function: Callable[..., Any], *arguments: Any) -> fx.GraphModule:
    """The operations of a function, recorded on tensors without data."""
    record = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)
    graph_module: fx.GraphModule = record(*arguments)
    return graph_module


def _dependent(graph: fx.Graph, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes whose values depend on ``sources``, through values or through memory they write to."""
    dependent = set(sources)
    while True:
        before = len(dependent)
        for node in graph.nodes:
            if node.op not in ("placeholder", "output") and not dependent.isdisjoint(node.all_input_nodes):
                dependent.add(node)
                if _is_mutable(node):
                    for written in _written(node):
                        dependent.update(_memory(written))
        if len(dependent) == before:
            return dependent


def _is_mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation writes to."""
    names = {
        arg.name: i
        for i, arg in enumerate(_schema(node).arguments)
        if arg.alias_info and arg.alias_info.is_write
    }
    values = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for name, i in names.items()]
    return [value for value in values if isinstance(value, fx.Node)]


def _memory(node: fx.Node) -> list[fx.Node]:
    """``node`` and what it is a view of, up to where the memory was made."""
    chain = [node]
    while chain[-1].op == "call_function":
        schema = getattr(chain[-1].target, "_schema", None)
        if schema is None or not schema.arguments or schema.arguments[0].alias_info is None:
            break
        base = chain[-1].args[0]
        if not isinstance(base, fx.Node):
            break
        chain.append(base)
    if chain[-1].op == "placeholder":
        raise TracingError(f"{node.target} writes into an input of the model")
    return chain


def _schema(node: fx.Node) -> Any:
    return node.target._schema  # type: ignore[union-attr]


def _extract(
    source: fx.GraphModule,
    inputs: Sequence[fx.Node],
    outputs: Sequence[Any],
    dependent: set[fx.Node],
    *,
    keep: bool,
) -> fx.GraphModule:
    """Those nodes that are dependent (or are not), as a function of ``inputs``."""
    graph, copies = fx.Graph(), {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in source.graph.nodes:
        if node not in copies and node.op not in ("placeholder", "output") and (node in dependent) == keep:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] if isinstance(node, fx.Node) else node for node in outputs])
    graph.eliminate_dead_code()
    return fx.GraphModule(source, graph)


def _functional(module: fx.GraphModule) -> fx.GraphModule:
    """The same function without operations that write into their arguments."""
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    functional: fx.GraphModule = make_fx(functionalize(module, remove="mutations"))(*values)
    functional.graph.eliminate_dead_code()
    return functional


def _join_selected(graph: fx.Graph) -> None:
    """Put slices together at once that autograd adds up one by one.

    The derivative of a slice is a tensor of zeros around it, so that of the T slices of an unrolled
    recurrence is a sum of T full tensors. Where the slices are different ones, that is their stack.
    """
    for node in reversed(list(graph.nodes)):
        if node.target is not _aten.add.Tensor or any(user.target is _aten.add.Tensor for user in node.users):
            continue
        leaves = _summands(node)
        slices: list[Any] = [
            leaf for leaf in leaves if getattr(leaf, "target", None) is _aten.select_backward.default
        ]
        if len(slices) < 3:
            continue
        sizes: Any = slices[0].args[1]
        dim: int = slices[0].args[2] % len(sizes)
        place = {leaf.args[3] % sizes[dim]: leaf for leaf in slices}
        same = all((leaf.args[1], leaf.args[2] % len(sizes)) == (sizes, dim) for leaf in slices)
        if same and len(place) == len(slices) == sizes[dim]:
            with graph.inserting_before(node):
                stack = graph.call_function(
                    _aten.stack.default, ([place[index].args[0] for index in range(sizes[dim])], dim)
                )
                for other in (leaf for leaf in leaves if leaf not in slices):
                    stack.meta = dict(node.meta)
                    stack = graph.call_function(_aten.add.Tensor, (stack, other))
            stack.meta = dict(node.meta)
            node.replace_all_uses_with(stack)
    graph.eliminate_dead_code()


def _summands(node: fx.Node) -> list[Any]:
    """What a chain of sums adds up, if nothing else reads the sums on the way."""
    summands: list[Any] = []
    todo = [node]
    while todo:
        current = todo.pop()
        if current.kwargs:
            return []
        for source in current.args:
            if isinstance(source, fx.Node) and source.target is _aten.add.Tensor and len(source.users) == 1:
                todo.append(source)
            else:
                summands.append(source)
    return summands


def _simplify(graph: fx.Graph) -> None:
    """Drop copies that serve autograd alone and what is computed twice, and join slices."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source: Any = node.args[0] if node.args else None
        if node.target is _aten.t.default and source.target is _aten.t.default:
            source = source.args[0]  # transposed twice
        elif node.target not in _COPIES:
            source = None
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node
    _join_selected(graph)
    graph.eliminate_dead_code()


def _restrict(module: fx.GraphModule, num_residuals: int, rows: range, columns: range) -> _Product:
    """The part of the product that leads from some pieces of the vector to some pieces of the result."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node | None] = {}  # None is a tensor of zeros
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(placeholders):
        is_zero = index >= num_residuals and index - num_residuals not in columns
        if is_zero:
            copies[node] = None
        else:
            copies[node] = copy = graph.placeholder(node.name)
            copy.meta = dict(node.meta)
    linear = set(placeholders[num_residuals:])  # the nodes that depend on the vector, linearly
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        inputs = [source for source in node.all_input_nodes if source in linear]
        if inputs:
            linear.add(node)
        if inputs and all(copies[source] is None for source in inputs):
            copies[node] = None
        else:
            copies[node] = _copy(graph, node, copies)
    results = module.graph.output_node().args[0]
    graph.output([copies[results[index]] for index in rows])  # type: ignore[index]
    graph.eliminate_dead_code()
    used = []
    for index, node in enumerate([node for node in graph.nodes if node.op == "placeholder"]):
        if index < num_residuals:
            if node.users:
                used.append(index)
            else:
                graph.erase_node(node)
    return _Product(used, fx.GraphModule(module, graph))


_IN_PLACE = {
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.sub.Tensor: _aten.sub_.Tensor,
    _aten.mul.Tensor: _aten.mul_.Tensor,
    _aten.mul.Scalar: _aten.mul_.Scalar,
    _aten.div.Scalar: _aten.div_.Scalar,
}
_INTO = {
    _aten.tanh_backward.default: _aten.tanh_backward.grad_input,
    _aten.sigmoid_backward.default: _aten.sigmoid_backward.grad_input,
    _aten.threshold_backward.default: _aten.threshold_backward.grad_input,
}


def _reuse_memory(graph: fx.Graph) -> None:
    """Let operations write into inputs that nobody else needs, and matrix products add to their sum.

    Only memory that an operation inside the graph made for its own result, and that has no other user, is
    written to, so neither residuals nor the vector change.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.kwargs:
            continue
        if node.target is _aten.add.Tensor:
            for total, product in (node.args, node.args[::-1]):
                if (
                    _is_spare(product, node)
                    and product.target is _aten.mm.default
                    and _same_shape(total, node)
                ):
                    spare = _is_spare(total, node)
                    node.target = _aten.addmm_.default if spare else _aten.addmm.default
                    node.args = (total, *product.args)
                    graph.erase_node(product)
                    break
        if node.target in _IN_PLACE and _is_spare(node.args[0], node):
            node.target = _IN_PLACE[node.target]
        elif node.target is _aten.add.Tensor and _is_spare(node.args[1], node):
            node.target, node.args = _aten.add_.Tensor, node.args[::-1]
        elif node.target in _INTO and _is_spare(node.args[0], node):
            node.target, node.kwargs = _INTO[node.target], {"grad_input": node.args[0]}


def _write_results(graph: fx.Graph) -> None:
    """Let the graph write its results into tensors that it is given as its last arguments."""
    output = graph.output_node()
    results: Any = output.args[0]
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        targets = [graph.placeholder(f"result{index}") for index in reversed(range(len(results)))][::-1]
    for target, result in zip(targets, results, strict=True):
        single = isinstance(result, fx.Node) and list(result.users) == [output] and results.count(result) == 1
        if result is None:
            with graph.inserting_before(output):
                graph.call_function(_aten.zero_.default, (target,))
        elif single and result.target is _aten.mm.default:
            result.target, result.kwargs = _aten.mm.out, {"out": target}
        else:
            with graph.inserting_before(output):
                graph.call_function(_aten.copy_.default, (target, result))
    output.args = ((),)


def _is_spare(value: Any, user: fx.Node) -> bool:
    """Whether ``value`` is memory of its own that only ``user`` reads, and fits the user's result."""
    if not isinstance(value, fx.Node) or value.op != "call_function" or list(value.users) != [user]:
        return False
    schema = getattr(value.target, "_schema", None)
    if schema is None or len(schema.returns) != 1:
        return False
    fresh = schema.returns[0].alias_info is None or schema.is_mutable
    return fresh and user.all_input_nodes.count(value) == 1 and _alike(value, user)


def _copy(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node | None]) -> fx.Node:
    """A copy of ``node``; zeros vanish from sums and are made where an operation needs them."""
    if node.target is _aten.add.Tensor and not node.kwargs:
        left, right = node.args
        if isinstance(left, fx.Node) and isinstance(right, fx.Node):
            for zero, other in ((left, right), (right, left)):
                kept = copies[other]
                if copies[zero] is None and kept is not None and _alike(other, node):
                    return kept

    def materialized(source: fx.Node) -> fx.Node:
        copy = copies[source]
        if copy is not None:
            return copy
        value = source.meta["val"]
        options = {"dtype": value.dtype, "device": value.device}
        if value.is_contiguous():
            zeros = graph.call_function(_aten.zeros.default, (list(value.shape),), options)
        else:
            memory = (list(value.shape), list(value.stride()))
            empty = graph.call_function(_aten.empty_strided.default, memory, options)
            zeros = graph.call_function(_aten.zeros_like.default, (empty,))
        zeros.meta["val"] = value
        return zeros

    return graph.node_copy(node, materialized)


def _same_shape(value: Any, other: fx.Node) -> bool:
    return isinstance(value, fx.Node) and bool(value.meta["val"].shape == other.meta["val"].shape)


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether one tensor can stand for the other, in memory too: a view may come next."""
    a, b = one.meta["val"], other.meta["val"]
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride())
