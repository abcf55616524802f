"""What an unrolled loop leaves behind is joined, and the product stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from blockhf import GaussNewton
from blockhf.blocks import Block
from blockhf.compile import batch_small_matmuls as room
from blockhf.compile.batch_small_matmuls import batch_small_matmuls
from blockhf.curvature.rewrites import hoist
from blockhf.curvature.trace import Trace
from blockhf.fx_graphs import dependent_on

aten = torch.ops.aten
STEPS, SAMPLES, FEATURES, CELLS = 7, 50, 2, 3


class SamplesLast(nn.Module):
    """A plain recurrent network with a sample per column; its head reads the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Parameter(torch.randn(CELLS, FEATURES))
        self.recurrent = nn.Parameter(torch.randn(CELLS, CELLS))
        self.bias = nn.Parameter(torch.randn(CELLS))
        self.head = nn.Linear(CELLS, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.permute(2, 1, 0)
        entries = torch.addmm(self.bias.unsqueeze(1), self.entry, inputs.flatten(1)).view(CELLS, STEPS, -1)
        state, states = inputs.new_zeros(CELLS, inputs.shape[2]), []
        for entry in entries.unbind(1):
            state = torch.tanh(torch.addmm(entry, self.recurrent, state))
            states.append(state)
        return self.head(torch.stack(states, dim=1).permute(2, 1, 0)[:, -1])


class SamplesFirst(nn.Module):
    """The same with a sample per row, and with an output for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.recurrent = nn.Linear(FEATURES, CELLS), nn.Linear(CELLS, CELLS, bias=False)
        self.head = nn.Linear(CELLS, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        state, states = inputs.new_zeros(inputs.shape[0], CELLS), []
        for entry in self.entry(inputs.transpose(0, 1)).unbind(0):
            state = torch.tanh(entry + self.recurrent(state))
            states.append(state)
        return self.head(torch.stack(states)).mean(0)


def traced_product(
    network: type[nn.Module], monkeypatch: pytest.MonkeyPatch, *, joined: bool = True
) -> tuple[fx.Graph, Tensor]:
    """The graph of the product of a network's only block, and a product."""
    torch.manual_seed(0)
    model = network().double()
    batch = torch.randn(SAMPLES, STEPS, FEATURES, dtype=torch.float64), torch.randint(2, (SAMPLES,))

    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, F.cross_entropy(outputs, batch[1])

    if not joined:
        monkeypatch.setattr(room, "batch_small_matmuls", lambda graph, num_fixed: None)
    block = Block("all", tuple(model.parameters()))
    trace = Trace(GaussNewton(), objective, batch, [block], model.modules())
    residuals, _ = trace.residuals(block.params, batch)
    assert len(residuals) == trace._num_residuals
    product = trace._restricted(range(len(block.params)), 0)
    assert isinstance(product.function, fx.GraphModule)
    with torch.no_grad():
        return product.function.graph, product(residuals, block, block, torch.randn(block.size).double())


def count(graph: fx.Graph, *targets: Any) -> int:
    return sum(node.target in targets for node in graph.nodes)


@pytest.mark.parametrize("network", [SamplesLast, SamplesFirst])
def test_joined_products_are_the_same(network: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    _, joined = traced_product(network, monkeypatch)
    _, plain = traced_product(network, monkeypatch, joined=False)
    torch.testing.assert_close(joined, plain, rtol=1e-12, atol=1e-14)


def test_of_each_step_only_the_recurrence_itself_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = traced_product(SamplesLast, monkeypatch)
    plain, _ = traced_product(SamplesLast, monkeypatch, joined=False)
    # A step's tangent comes from the one before, its cotangent from the one after. Besides there are the
    # weights' tangents, all in one product, and their cotangents, and the head's four products.
    assert count(graph, aten.mm.default) <= 2 * (STEPS - 1) + 1 + 1 + 4
    assert count(plain, aten.mm.default) >= 4 * (STEPS - 1) + 4
    assert count(graph, aten.select_backward.default) == 1, "the head's"


def test_only_what_depends_on_the_vector_is_left_in_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = traced_product(SamplesLast, monkeypatch)
    vectors = [node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("vectors")]
    assert len(vectors) == 5
    dependent = dependent_on(graph, vectors)
    assert all(node in dependent for node in graph.nodes if node.op == "call_function")


def rewritten(function: Callable[..., Any], num_fixed: int, *arguments: Tensor) -> fx.Graph:
    """The graph of a linear function, joined; what that computes is checked against the function itself."""
    module = make_fx(function, tracing_mode="fake")(*arguments)
    batch_small_matmuls(module.graph, num_fixed)
    module.recompile()
    for one, other in zip(module(*arguments), function(*arguments), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert one.is_contiguous() == other.is_contiguous()
    return module.graph


def matrices(*shapes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("left", [True, False])
def test_products_with_several_fixed_matrices_become_one(left: bool) -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, rest: Tensor, vector: Tensor) -> list[Tensor]:
        return [rest + (vector @ fixed if left else fixed @ vector) for fixed in (a, b, c)]

    shapes = [(2, 5), (2, 5), (2, 5), (3, 5), (3, 2)] if left else [(5, 2), (5, 2), (5, 2), (5, 3), (2, 3)]
    assert count(rewritten(function, 4, *matrices(*shapes)), aten.mm.default) == 1


@pytest.mark.parametrize("left", [True, False])
def test_a_sum_of_products_becomes_one_if_its_factors_are_side_by_side_anyway(left: bool) -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, *vectors: Tensor) -> list[Tensor]:
        pairs = zip((a, b, c), vectors, strict=True)
        first, second, third = (vector @ fixed if left else fixed @ vector for fixed, vector in pairs)
        return [first + second + third, torch.stack(vectors, dim=1 if left else 0)]

    shapes = [(5, 2)] * 3 + [(3, 5)] * 3 if left else [(2, 5)] * 3 + [(5, 3)] * 3
    assert count(rewritten(function, 3, *matrices(*shapes)), aten.mm.default) == 1


def test_a_sum_of_products_whose_factors_would_have_to_be_copied_is_left_alone() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, *vectors: Tensor) -> list[Tensor]:
        return [vectors[0] @ a + vectors[1] @ b + vectors[2] @ c]

    assert count(rewritten(function, 3, *matrices(*[(5, 2)] * 3, *[(3, 5)] * 3)), aten.mm.default) == 3


@pytest.mark.parametrize("left", [True, False])
def test_tangents_of_several_weights_and_a_bias_become_one_product(left: bool) -> None:
    def function(a: Tensor, b: Tensor, one: Tensor, other: Tensor, bias: Tensor) -> list[Tensor]:
        products = (one @ a, other @ b) if left else (a @ one, b @ other)
        return [products[0] + bias.expand(products[0].shape) + products[1]]

    shapes = (
        [(2, 90), (3, 90), (4, 2), (4, 3), (4, 1)] if left else [(90, 2), (90, 3), (2, 4), (3, 4), (1, 4)]
    )
    graph = rewritten(function, 2, *matrices(*shapes))
    assert count(graph, aten.mm.default) == 1
    assert count(graph, aten.add.Tensor) == 0


@pytest.mark.parametrize("left", [True, False])
def test_cotangents_of_several_weights_and_a_bias_become_one_product(left: bool) -> None:
    def function(a: Tensor, b: Tensor, vector: Tensor) -> list[Tensor]:
        if left:
            return [vector @ a, vector.sum([1], keepdim=True), vector @ b]
        return [a @ vector, vector.sum([0], keepdim=True), b @ vector]

    shapes = [(90, 2), (90, 3), (4, 90)] if left else [(2, 90), (3, 90), (90, 4)]
    graph = rewritten(function, 2, *matrices(*shapes))
    assert count(graph, aten.mm.default) == 1
    assert count(graph, aten.sum.dim_IntList) == 0


def test_a_summand_that_comes_twice_counts_twice() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, *vectors: Tensor) -> list[Tensor]:
        first, second, third = vectors[0] @ a, vectors[1] @ b, vectors[2] @ c
        return [first + second + third + first, torch.stack(vectors, dim=1)]

    rewritten(function, 3, *matrices(*[(5, 2)] * 3, *[(3, 5)] * 3))


def test_what_relies_on_the_layout_of_memory_is_left_alone() -> None:
    def function(a: Tensor, vector: Tensor) -> list[Tensor]:
        return [(a @ vector).t().as_strided((4,), (1,))]

    graph = rewritten(function, 1, *matrices((2, 5), (5, 2)))
    assert count(graph, aten.t.default) == 1


def test_large_products_of_one_matrix_are_left_alone() -> None:
    def function(a: Tensor, b: Tensor, vector: Tensor) -> list[Tensor]:
        return [vector @ a, vector @ b]

    assert count(rewritten(function, 2, *matrices((4, 5), (4, 5), (6, 4))), aten.mm.default) == 2


def test_slices_of_zeros_are_not_added() -> None:
    def function(total: Tensor, vector: Tensor) -> list[Tensor]:
        whole = aten.select_backward(vector, [3, 4, 2], 1, -1).permute(2, 1, 0)
        return [total + whole.select(1, place) for place in range(4)]

    graph = rewritten(function, 1, *matrices((2, 3), (3, 2)))
    assert count(graph, aten.add.Tensor) == 1


def test_what_is_fixed_moves_to_the_fixed_part_and_unread_residuals_are_dropped() -> None:
    a, b, vector = matrices((2, 2), (2, 2), (2, 2))
    fixed = make_fx(lambda a, b: [a + 1, b + 1, a - b, a.sum()], tracing_mode="fake")(a, b)
    product = make_fx(lambda a, b, c, v: [(a @ b) * v + b], tracing_mode="fake")(a, b, a, vector)
    expected = product(a + 1, b + 1, a - b, vector)
    assert hoist(fixed, product, 3) == 2
    *residuals, last = fixed(a, b)
    assert len(residuals) == 2
    assert torch.equal(last, a.sum())
    assert torch.equal(product(*residuals, vector)[0], expected[0])
    assert count(product.graph, aten.mm.default) == 0


def test_two_draws_for_the_same_tensor_stay_two(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    inputs = torch.randn(40, 3, dtype=torch.float64)

    def objective(inputs: Tensor) -> tuple[Tensor, Tensor]:
        outputs = F.dropout(model(inputs)) - F.dropout(model(inputs))
        return outputs, outputs.square().mean()

    block = Block("all", tuple(model.parameters()))
    trace = Trace(GaussNewton(), objective, inputs, [block], model.modules())
    _, loss = trace.residuals(block.params, inputs)
    assert loss > 0


@pytest.mark.parametrize("network", [SamplesLast, SamplesFirst])
def test_no_node_is_moved_to_where_it_is(network: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of torch warn of that."""
    append = fx.Node.append

    def checked(self: fx.Node, other: fx.Node) -> None:
        assert self.next is not other
        append(self, other)

    monkeypatch.setattr(fx.Node, "append", checked)
    traced_product(network, monkeypatch)
