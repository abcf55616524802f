"""Repetitions in a graph are found, and what is made of them is the same function."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch._inductor
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from blockhf import GaussNewton
from blockhf.blocks import Block
from blockhf.compile import fused
from blockhf.compile import repeated_regions as room
from blockhf.compile.repeated_regions import outline
from blockhf.curvature import trace
from blockhf.curvature.trace import Trace
from blockhf_lab.lstm import SequenceClassifier


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_SHORTEST_PERIOD", 40)


def recurrence(state: Tensor, weight: Tensor, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    total = torch.zeros_like(state)
    for given in inputs:
        for _ in range(12):
            state = torch.tanh(state @ weight) + given
        total = total + state.sin()
    return state, total


def recorded(num_steps: int) -> tuple[fx.GraphModule, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    state, weight, *inputs = (
        torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(num_steps + 2)
    )
    module = make_fx(lambda s, w, *i: recurrence(s, w, list(i)), tracing_mode="fake")(state, weight, *inputs)
    return module, [state, weight, *inputs]


def test_each_kind_of_piece_is_compiled_once() -> None:
    module, arguments = recorded(10)
    compiled: list[fx.GraphModule] = []

    def compile(piece: fx.GraphModule) -> fx.GraphModule:
        compiled.append(piece)
        return piece

    outlined = outline(module, compile)
    num_operations = sum(node.op == "call_function" for node in module.graph.nodes)
    num_calls = sum(node.op == "call_module" for node in outlined.graph.nodes)
    assert len(compiled) <= 2
    assert num_calls >= 4
    inside = sum(node.op == "call_function" for node in compiled[0].graph.nodes)
    assert num_calls * inside > num_operations / 2
    for one, other in zip(outlined(*arguments), module(*arguments), strict=True):
        assert torch.equal(one, other)


def test_a_graph_that_does_not_repeat_stays_as_it_is() -> None:
    module, arguments = recorded(2)
    outlined = outline(module, lambda piece: pytest.fail("nothing is to be compiled"))
    assert len(outlined.graph.nodes) == len(module.graph.nodes)
    for one, other in zip(outlined(*arguments), module(*arguments), strict=True):
        assert torch.equal(one, other)


def test_cuts_cover_the_sequence_without_gaps_and_a_disturbance_is_a_piece_of_its_own() -> None:
    sequence = [0, 1, 2] * 80
    assert room._repetition(sequence, 0) == (48, 5)  # 42 would leave ten turns, 45 five
    disturbed = [*sequence, 7, *sequence]
    cuts = room._cut(disturbed)
    assert cuts[0][0] == 0
    assert cuts[-1][1] == len(disturbed)
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(cuts))
    assert sum(stop - start == 48 for start, stop in cuts) == 10


class Unrolled:
    """The product of the paper's LSTM, on fewer steps and samples."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = SequenceClassifier(1, 3).double()
        batch = torch.rand(5, 14, 1, dtype=torch.float64), torch.randint(3, (5,))

        def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            outputs = model(batch[0])
            return outputs, F.cross_entropy(outputs, batch[1])

        self.block = Block("all", tuple(model.parameters()))
        self.trace = Trace(GaussNewton(), objective, batch, [self.block], model.modules())
        self.residuals, _ = self.trace.residuals(self.block.params, batch)
        self.vector = torch.randn(self.block.size, dtype=torch.float64)

    def __call__(self, product: Any) -> Tensor:
        with torch.no_grad():
            result: Tensor = product(self.residuals, self.block, self.block, self.vector)
        return result


def test_the_outlined_product_of_an_unrolled_lstm_is_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    unrolled = Unrolled()
    monkeypatch.setattr(trace, "_InPlace", lambda product: product)  # as for compiling
    product = unrolled.trace.product(0, 0)
    kinds: list[fx.GraphModule] = []

    def compile(piece: fx.GraphModule) -> fx.GraphModule:
        kinds.append(piece)
        return piece

    expected = unrolled(product)
    assert isinstance(product.function, fx.GraphModule)
    product.function = outline(product.function, compile)
    assert 1 <= len(kinds) <= 8
    assert torch.equal(unrolled(product), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_the_compiled_product_of_an_unrolled_lstm_is_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_LONG", 100)
    unrolled = Unrolled()
    expected = unrolled(unrolled.trace.product(0, 0))
    unrolled.trace._products.clear()
    unrolled.trace.compile = True
    compiled = unrolled.trace.product(0, 0)
    assert compiled.compiled is not None
    pieces = [module for module in compiled.compiled.function.modules() if isinstance(module, fused.Fused)]
    assert pieces
    assert not any(piece.is_checked for piece in pieces)
    for _ in range(3):
        torch.testing.assert_close(unrolled(compiled), expected, rtol=1e-10, atol=1e-12)
    assert all(piece.is_checked for piece in pieces)


def test_a_piece_that_gets_inputs_of_another_layout_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "compile", lambda module, *_: module)
    piece = fused.Fused(make_fx(lambda x: x + 1)(torch.zeros(2, 3)))
    piece(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="another layout"):
        piece(torch.ones(3, 2).t())
