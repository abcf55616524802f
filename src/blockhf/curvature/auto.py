"""The choice between the ways to a product, block by block.

The choice goes by counted multiplications, never by the clock: the same run makes the same choice again, so
a resumed run continues bit for bit.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from blockhf.batches import batch_size
from blockhf.curvature.base import Curvature, Products
from blockhf.curvature.double_backward import DoubleBackward
from blockhf.curvature.formed import Formed, num_bytes
from blockhf.curvature.gauss_newton import GaussNewton
from blockhf.curvature.jacobian import FormingError
from blockhf.curvature.traced import Traced
from blockhf.fx_graphs import TracingError
from blockhf.ledger import GRADIENT, PRODUCT
from blockhf.linalg import BlockOperator, DenseBlocks, Described, ForwardingOperator
from blockhf.policy import PolicyState
from blockhf.samples import Samples

_NODE = 400_000
"""What a node of the loss's graph costs in a product besides its operations: time for so many of them."""

_FORMING = 7
"""How many times that forming costs at each node, under ``vmap``."""

_MOST_SHAPES = 16
"""Shapes of batches for which products are added up; the oldest is forgotten."""

LONGEST_GRAPH = 1000
"""Nodes of the loss's graph up to which tracing takes seconds; unrolled recurrences have more.

They are traced only where ``compile=True`` says that the run is long.
"""


@dataclass(frozen=True)
class Auto(Products):
    """Forms small blocks, and multiplies with the others by double backward at first and by a trace later.

    Blocks are formed where that takes less time than their CG steps, by multiplications and by what an
    operation costs besides them, and where their matrices fit into the memory that ``Formed()`` has. The
    multiplications of a forward pass are counted once for each shape of the batch. Tracing takes seconds, and
    saves about a quarter of each product from then on: it is done when the products so far would have paid
    for it. Where the objective cannot be traced, one warning says why, and products are by double backward
    from then on. The report has the choice and its reason.

    Args:
        compile: As for ``Traced``.
        memory_budget: As for ``Traced``.
    """

    compile: bool = False
    memory_budget: int = 0

    def linearize(
        self, curvature: Curvature, samples: Samples, num_products: Sequence[int], state: PolicyState
    ) -> BlockOperator:
        if samples.batch is None:
            return self._by_double_backward(curvature, samples, "no batch to trace with")

        stored: dict[int, Tensor] = {}
        small = self._worth_forming(curvature, samples, num_products, state)
        if small:
            try:
                stored = dict(zip(small, Formed().form(curvature, samples, small, state), strict=True))
            except FormingError as error:
                state.shared["no_forming"] = f" (cannot be formed: {error})"
        others = cache(lambda: self._products(curvature, samples, num_products, state))
        wanted = any(number for index, number in enumerate(num_products) if index not in stored)
        if wanted:
            others()

        def describe() -> list[str]:
            refused = state.shared.get("no_forming", "")
            return [
                f"formed, {block.size} x {block.size}: cheaper than {num_products[index]} products"
                if index in stored
                else (others().note(index) if wanted else "no products") + refused
                for index, block in enumerate(samples.blocks)
            ]

        return Described(DenseBlocks(stored, others), describe)

    def _products(
        self, curvature: Curvature, samples: Samples, num_products: Sequence[int], state: PolicyState
    ) -> BlockOperator:
        reason = state.shared.get("no_tracing", "")
        num_nodes = samples.structure.num_nodes
        if not reason and num_nodes > LONGEST_GRAPH and not self.compile:
            reason = f"tracing a graph of {num_nodes} nodes takes long; compile=True asks for it"
        if not reason and PRODUCT * _gradient_flops(samples) < _NODE * num_nodes and not self.compile:
            reason = "too small for tracing to pay"
        if not reason and not self._worth_tracing(samples, num_products, state):
            operator = self._by_double_backward(curvature, samples, "tracing would not pay yet")
            return _Spending(operator, samples, state)
        if not reason:
            try:
                traced = Traced(self.compile, self.memory_budget)
                return traced.linearize(curvature, samples, num_products, state)
            except TracingError as error:
                reason = state.shared["no_tracing"] = str(error)
                operator = self._by_double_backward(curvature, samples, reason)  # or else the user's mistake
                warnings.warn(
                    f"This objective cannot be traced: {error}. Products are by double backward instead. To "
                    "have it so without a warning, pass products=DoubleBackward().",
                    stacklevel=2,
                )
                return operator
        return self._by_double_backward(curvature, samples, reason)

    def _by_double_backward(self, curvature: Curvature, samples: Samples, reason: str) -> BlockOperator:
        operator = DoubleBackward(self.memory_budget).operator(curvature, samples)
        return Described(operator, lambda: [f"double backward: {reason}"] * len(samples.blocks))

    @staticmethod
    def _worth_forming(
        curvature: Curvature, samples: Samples, num_products: Sequence[int], state: PolicyState
    ) -> list[int]:
        if "no_forming" in state.shared or not isinstance(curvature, GaussNewton):
            return []
        gradient = _gradient_flops(samples)
        num_outputs = samples.structure.num_outputs
        rows = samples.num_samples * num_outputs
        # Jacobians take a pass for each output, whichever blocks are formed; one block must be worth it.
        passes = gradient * num_outputs + _FORMING * _NODE * samples.structure.num_nodes
        small, gains, room = [], [0.0], Formed().memory_budget
        for index, block in enumerate(samples.blocks):
            gain = PRODUCT * gradient * num_products[index] - (2 * rows + block.size / 3) * block.size**2
            if gain > 0 and num_bytes(block) <= room:
                small.append(index)
                gains.append(gain)
                room -= num_bytes(block)
        return small if passes < max(gains) else []

    def _worth_tracing(self, samples: Samples, num_products: Sequence[int], state: PolicyState) -> bool:
        """Whether a quarter of what products cost by double backward, so far and now, pays for tracing."""
        if self.compile:
            return True
        num_nodes, num_blocks = samples.structure.num_nodes, len(samples.blocks)
        price = _NODE * (20_000 + num_nodes * (500 + 30 * num_blocks))
        key = _shapes(samples)
        spent = sum(state.blocks.get(block.name, {}).get("spent", {}).get(key, 0) for block in samples.blocks)
        # Of a small block more products are asked for than are made: as many as an exact solution is worth.
        wanted = num_blocks * min(num_products)
        product = PRODUCT * _gradient_flops(samples) / 2  # from the middle of the network
        product += _NODE * num_nodes * len(samples.parts)
        return bool(spent + wanted * product >= 4 * price)


class _Spending(ForwardingOperator):
    """A matrix whose products by double backward are added up, for as long as tracing has not paid."""

    def __init__(self, operator: BlockOperator, samples: Samples, state: PolicyState) -> None:
        super().__init__(operator)
        self._samples, self._state = samples, state

    def product(self, row: int, column: int, vector: Tensor) -> Tensor:
        with self._spending([column]):
            return super().product(row, column, vector)

    def products(self, row: int, column: int, vectors: Tensor) -> Tensor:
        return BlockOperator.products(self, row, column, vectors)

    def gram(self, columns: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        with self._spending(columns):
            return super().gram(columns, vectors)

    @contextlib.contextmanager
    def _spending(self, columns: Sequence[int]) -> Iterator[None]:
        samples, ledger = self._samples, self._samples.ledger
        before = ledger.total
        yield
        if ledger.is_once:  # a resumed run does it again
            return
        nodes = _NODE * samples.structure.num_nodes * len(samples.parts)
        cost = nodes + (ledger.total - before) // len(columns)
        key = _shapes(samples)
        for column in columns:
            spent = self._state.of(samples.blocks[column].name).setdefault("spent", {})
            spent[key] = spent.get(key, 0) + cost
            if len(spent) > _MOST_SHAPES:
                del spent[next(iter(spent))]


def _shapes(samples: Samples) -> str:
    """What a trace is made for, in words that another process understands."""
    return f"{samples.parts[0].shapes} of {samples.num_samples}"


def _gradient_flops(samples: Samples) -> float:
    """Operations of a gradient on all samples: by this step's, or else by a forward pass."""
    counted, number = samples.ledger.totals.get("gradient", 0), samples.ledger.work.gradient_samples
    if not counted:
        counted, number = GRADIENT * samples.forward_flops(), batch_size(samples.parts[0].batch)
    return counted / number * samples.num_samples
