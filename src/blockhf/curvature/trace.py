"""A recorded map from vectors to products, split into what is fixed within a step and what is not."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from blockhf.batches import batch_size, rebuild, tensors_of
from blockhf.blocks import Block
from blockhf.curvature.base import Curvature, JacobianForm, coarsest, inner
from blockhf.curvature.host import Host
from blockhf.curvature.reasons import in_words
from blockhf.curvature.rewrites import extract, functional, hoist, record, restrict, simplify, write_results
from blockhf.flops import entries_besides, flops_of_graph
from blockhf.fx_graphs import TracingError, dependent_on, is_mutable, reuse_memory
from blockhf.isolation import twice_differentiable
from blockhf.ledger import Ledger
from blockhf.linalg import BlockOperator
from blockhf.objective import Evaluation, Objective, evaluate
from blockhf.samples import Part, Samples
from blockhf.scalars import read

if TYPE_CHECKING:
    from blockhf.compile.fused import Compiled

_DENSE = 600
"""Multiplications and additions for each entry that anything else writes, from which on a CPU has nothing to
gain from compiling: nearly all of its time goes to matrix products, which compiling leaves as they are."""


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
        curvature: Curvature,
        objective: Objective,
        batch: Any,
        blocks: Sequence[Block],
        modules: Iterable[nn.Module],
    ) -> None:
        self._host = Host(modules)
        self._names = self._host.owners([param for block in blocks for param in block.params])
        self._sizes = [len(block.params) for block in blocks]
        recorded = self._record(curvature, objective, batch, blocks)
        values = [node.meta.get("val") for node in recorded.graph.nodes]
        tensors = [value for value in values if isinstance(value, Tensor)]
        if any(not isinstance(size, int) for value in tensors for size in value.shape):
            raise TracingError("the sizes of its tensors depend on their values, as with masks and nonzero()")
        self.eps = coarsest(tensors)
        self._split(recorded, sum(self._sizes) + len(self._host.named()) + len(list(tensors_of(batch))))
        self._products: dict[tuple[int, int], Product] = {}
        self._halves: dict[int, Product] = {}
        self.compile = False
        self._on_cpu = all(param.device.type == "cpu" for block in blocks for param in block.params)

    def _record(
        self, curvature: Curvature, objective: Objective, batch: Any, blocks: Sequence[Block]
    ) -> fx.GraphModule:
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
                vector: Any = _Vector(vectors)
                tangents: Sequence[Tensor] = ()
                curved: Sequence[Tensor] = ()
                if isinstance(matrix, JacobianForm):
                    tangents, curved = matrix.halves(0, vector)
                    products = matrix.way_back(0, curved)
                else:
                    products = matrix.product(0, 0, vector)
                self._halves_like = [(half.shape, half.dtype, half.device) for half in (*tangents, *curved)]
                return *products, *tangents, *curved, evaluation.loss.detach()

        try:
            return record(
                whole,
                [param.detach() for block in blocks for param in block.params],
                list(self._host.named().values()),
                list(tensors_of(batch)),
                [torch.empty_like(param) for block in blocks for param in block.params],
            )
        except Exception as error:  # whatever an operation without a rule for tracing may raise
            raise TracingError(in_words(error)) from error

    def fingerprint(self) -> int:
        """A number that changes with the operations and with the numbers and tensors that are constants."""
        code = "\n".join(f"{own.op} {own.target} {own.args} {own.kwargs}" for own in self.fixed.graph.nodes)
        constants = read([own.detach().float().sum() for own in self.fixed.buffers()])
        return zlib.crc32(f"{code}{constants}".encode())

    def at(self, samples: Samples, part: Part) -> tuple[TracedPart, Tensor]:
        """The matrix on the samples of a part, and the loss there."""
        with samples.start_of(part).replayed():
            residuals, loss = self.residuals(samples.params, part.batch)
        ledger = samples.ledger
        ledger.work.num_linearizations += 1
        ledger.work.linearized_samples += batch_size(part.batch)
        ledger.add("linearization", self._fixed_flops)
        return TracedPart(self, samples.blocks, residuals, ledger), loss

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
        # It pays uncompiled too: an unrolled recurrence is left with half of its matrix products.
        from blockhf.compile.batch_small_matmuls import batch_small_matmuls

        batch_small_matmuls(product.graph, len(residuals))
        self._num_residuals = hoist(self.fixed, product, len(residuals))
        self._product, self._fixed_flops = product, flops_of_graph(self.fixed.graph)
        self.num_nodes = len(graph.nodes)

    def residuals(self, params: Sequence[Tensor], batch: Any) -> tuple[list[Tensor], Tensor]:
        """Run the fixed part: what the products need, and the loss."""
        buffers = [buffer.clone() for buffer in self._host.named().values()]
        with torch.no_grad():
            *residuals, loss = self.fixed(*(param.detach() for param in params), *buffers, *tensors_of(batch))
        return residuals, loss

    def product(self, row: int, column: int) -> Product:
        """The function from residuals and a column's vector to a row's product."""
        if (row, column) not in self._products:
            product = self._restricted(self._pieces(row), column)
            self._products[row, column] = (
                self._compile(product) if self._compiles(product) else _InPlace(product)
            )
        return self._products[row, column]

    def whole(self, residuals: Sequence[Tensor], everything: Block, vector: Tensor) -> Tensor:
        """The product of all blocks together, of which those of single blocks are parts."""
        results = self._product(*residuals, *everything.unflatten(vector))
        return everything.flatten(results[: sum(self._sizes)])

    @property
    def has_halves(self) -> bool:
        """Whether the matrix is of the form ``Jᵀ H J``."""
        return bool(self._halves_like)

    def halves(self, column: int) -> Product:
        """The function from residuals and a column's vector to ``J v`` and ``H J v``."""
        if column not in self._halves:
            first = sum(self._sizes)
            product = self._restricted(range(first, first + len(self._halves_like)), column)
            self._halves[column] = self._compile(product) if self._compiles(product) else product
        return self._halves[column]

    def with_zeros(self, halves: Sequence[Tensor | None]) -> list[Tensor]:
        """Tensors of zeros where an output does not depend on the block."""
        return [
            torch.zeros(shape, dtype=dtype, device=device) if half is None else half
            for half, (shape, dtype, device) in zip(halves, self._halves_like, strict=True)
        ]

    def _compiles(self, product: Product) -> bool:
        if not self.compile:
            return False
        is_dense = product.flops > _DENSE * entries_besides(product.recorded.graph)
        return not (is_dense and self._on_cpu)

    def _compile(self, product: Product) -> Product:
        from blockhf.compile.fused import Compiled

        return Product(product.residuals, Compiled(product.recorded), product.flops)

    def _restricted(self, results: range, column: int) -> Product:
        return Product(*restrict(self._product, self._num_residuals, results, self._pieces(column)))

    def _pieces(self, block: int) -> range:
        start = sum(self._sizes[:block])
        return range(start, start + self._sizes[block])

    @property
    def note(self) -> str:
        """What the report says of products that are made by this trace."""
        compiled = [product.compiled.seconds for product in self._products.values() if product.compiled]
        note = f"traced, {self.num_nodes} operations"
        if compiled:
            return f"{note}, compiled in {sum(compiled):.1f} s"
        left_plain = self.compile and self._products
        return f"{note}, not compiled, as it is matrix products" if left_plain else note


class Product:
    """A part of the product's graph: which residuals it reads, and the function, recorded or compiled."""

    def __init__(
        self, residuals: Sequence[int], function: fx.GraphModule | Compiled, flops: int | None = None
    ) -> None:
        self.residuals, self.function = residuals, function
        self.flops = flops_of_graph(self.recorded.graph) if flops is None else flops

    @property
    def recorded(self) -> fx.GraphModule:
        """The graph, of a product that is not compiled."""
        assert isinstance(self.function, fx.GraphModule)
        return self.function

    @property
    def compiled(self) -> Compiled | None:
        return None if isinstance(self.function, fx.GraphModule) else self.function

    def __call__(self, residuals: Sequence[Tensor], row: Block, column: Block, vector: Tensor) -> Tensor:
        return row.flatten(self.results(residuals, column, vector))

    def results(self, residuals: Sequence[Tensor], column: Block, vector: Tensor) -> Sequence[Any]:
        results: Sequence[Any] = self.function(*self.inputs(residuals, column, vector))
        return results

    def inputs(self, residuals: Sequence[Tensor], column: Block, vector: Tensor) -> list[Tensor]:
        return [*(residuals[index] for index in self.residuals), *column.unflatten(vector)]


class _InPlace(Product):
    """A product that makes little memory of its own and writes straight into the flat result."""

    def __init__(self, product: Product) -> None:
        super().__init__(product.residuals, product.function, product.flops)
        reuse_memory(self.recorded.graph)
        write_results(self.recorded.graph)
        self.recorded.recompile()

    def __call__(self, residuals: Sequence[Tensor], row: Block, column: Block, vector: Tensor) -> Tensor:
        result = vector.new_empty(row.size)
        self.function(*self.inputs(residuals, column, vector), *row.unflatten(result))
        return result


class TracedPart(BlockOperator):
    """The matrix on one part of the batch."""

    def __init__(
        self, trace: Trace, blocks: Sequence[Block], residuals: Sequence[Tensor], ledger: Ledger
    ) -> None:
        self.trace, self.blocks, self.residuals, self.ledger = trace, blocks, residuals, ledger

    @property
    def sizes(self) -> Sequence[int]:
        return [block.size for block in self.blocks]

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
        self.ledger.add("product", function.flops)
        with torch.no_grad():
            return function(self.residuals, self.blocks[row], self.blocks[column], vector)

    def whole(self, vector: Tensor) -> Tensor:
        """The product of all blocks together with one vector of all of them."""
        everything = Block("all", tuple(param for block in self.blocks for param in block.params))
        with torch.no_grad():
            return self.trace.whole(self.residuals, everything, vector)

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        if not self.trace.has_halves:  # as with the Hessian
            return super().gram(columns, vectors)
        return inner([self._halves(*pair) for pair in zip(columns, vectors, strict=True)])

    def _halves(self, column: int, vector: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        function = self.trace.halves(column)
        self.ledger.add("gram", function.flops)
        with torch.no_grad():
            results = self.trace.with_zeros(function.results(self.residuals, self.blocks[column], vector))
        return results[: len(results) // 2], results[len(results) // 2 :]


class _Pieces(Block):
    """A block whose vector stays in pieces, one per parameter, so that they can be told apart."""

    def unflatten(self, vector: Any) -> Any:
        return vector

    def flatten(self, tensors: Sequence[Tensor | None]) -> Any:
        pairs = zip(self.params, tensors, strict=True)
        return _Vector([torch.zeros_like(param) if tensor is None else tensor for param, tensor in pairs])


class _Vector:
    """A vector in pieces, with the arithmetic of a vector, so that a curvature can add up products."""

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.pieces)

    def __add__(self, other: _Vector) -> _Vector:
        return _Vector([a + b for a, b in zip(self.pieces, other.pieces, strict=True)])

    def __sub__(self, other: _Vector) -> _Vector:
        return self + -1 * other

    def __mul__(self, number: float | Tensor) -> _Vector:
        return _Vector([piece * number for piece in self.pieces])

    __rmul__ = __mul__
