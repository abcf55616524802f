"""Laws that hold for every network: linear, symmetric, nonnegative, and what damping adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from blockhf import BlockOperator, DoubleBackward, GaussNewton, Samples
from blockhf.blocks import Block
from blockhf.linalg import Damped, DiagonalBlock

LAWS = settings(max_examples=40, deadline=None, derandomize=True, database=None)

ACTIVATIONS = [nn.Tanh, nn.ReLU, nn.GELU, nn.Softplus]

# Each is convex in the outputs; targets are made from standard normal numbers.
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squares": F.mse_loss,
    "cross entropy": lambda z, t: F.cross_entropy(z, t.argmax(1)),
    "soft cross entropy": lambda z, t: F.cross_entropy(z, t.softmax(1)),
    "binary cross entropy": lambda z, t: F.binary_cross_entropy_with_logits(z, t.sigmoid()),
    "poisson": lambda z, t: F.poisson_nll_loss(z, t.abs()),
    "log cosh": lambda z, t: torch.log(torch.cosh(z - t)).mean(),
}


@dataclass
class Case:
    """A random network with its Gauss-Newton matrix, and vectors for each block."""

    seed: int
    widths: list[int]
    activation: type[nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    num_samples: int

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        layers: list[nn.Module] = []
        for inputs, outputs in zip(self.widths[:-1], self.widths[1:], strict=True):
            layers += [nn.Linear(inputs, outputs), self.activation()]
        self.model = nn.Sequential(*layers[:-1]).double()
        x = torch.randn(self.num_samples, self.widths[0], dtype=torch.float64)
        t = torch.randn(self.num_samples, self.widths[-1], dtype=torch.float64)
        self.blocks = [
            Block(name, tuple(layer.parameters()))
            for name, layer in self.model.named_children()
            if isinstance(layer, nn.Linear)
        ]

        def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            outputs = self.model(batch[0])
            return outputs, self.loss(outputs, batch[1])

        samples = Samples(objective, (x, t), self.blocks)
        self.matrix: BlockOperator = DoubleBackward().operator(GaussNewton(), samples)

    def vectors(self) -> list[Tensor]:
        return [torch.randn(block.size, dtype=torch.float64) for block in self.blocks]

    def product(self, vectors: list[Tensor]) -> list[Tensor]:
        """The whole matrix times a vector of all blocks."""
        return [
            torch.stack([self.matrix.product(i, j, vector) for j, vector in enumerate(vectors)]).sum(0)
            for i in range(len(vectors))
        ]


CASES = st.builds(
    Case,
    seed=st.integers(0, 10_000),
    widths=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    activation=st.sampled_from(ACTIVATIONS),
    loss=st.sampled_from(list(LOSSES.values())),
    num_samples=st.integers(1, 5),
)


def dot(left: list[Tensor], right: list[Tensor]) -> float:
    return float(torch.cat(left) @ torch.cat(right))


@LAWS
@given(case=CASES, a=st.floats(-3, 3), b=st.floats(-3, 3))
def test_gauss_newton_is_linear(case: Case, a: float, b: float) -> None:
    u, v = case.vectors(), case.vectors()
    combined = case.product([a * x + b * y for x, y in zip(u, v, strict=True)])
    for both, x, y in zip(combined, case.product(u), case.product(v), strict=True):
        torch.testing.assert_close(both, a * x + b * y, rtol=1e-9, atol=1e-11)


@LAWS
@given(case=CASES)
def test_gauss_newton_is_symmetric_block_by_block(case: Case) -> None:
    u, v = case.vectors(), case.vectors()
    for i in range(len(u)):
        for j in range(len(v)):
            there, back = u[i] @ case.matrix.product(i, j, v[j]), v[j] @ case.matrix.product(j, i, u[i])
            torch.testing.assert_close(there, back, rtol=1e-9, atol=1e-11)


@LAWS
@given(case=CASES)
def test_gauss_newton_of_a_convex_loss_is_nonnegative(case: Case) -> None:
    v = case.vectors()
    assert dot(v, case.product(v)) >= -1e-12 * dot(v, v)
    for i, own in enumerate(v):
        assert float(own @ case.matrix.product(i, i, own)) >= -1e-12 * float(own @ own)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gauss_newton_is_not_zero_on_the_networks_of_these_laws(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    case = Case(0, [3, 4, 2], nn.Tanh, loss, 5)
    v = case.vectors()
    assert dot(v, case.product(v)) > 1e-3


def test_gauss_newton_of_a_concave_loss_is_not_nonnegative() -> None:
    case = Case(0, [2, 3, 2], nn.Tanh, lambda z, t: -F.mse_loss(z, t), 4)
    v = case.vectors()
    assert dot(v, case.product(v)) < 0


@LAWS
@given(case=CASES, damping=st.floats(0, 10))
def test_damping_adds_its_multiple_of_the_vector(case: Case, damping: float) -> None:
    for i, v in enumerate(case.vectors()):
        operator = DiagonalBlock(case.matrix, i)
        torch.testing.assert_close(
            Damped(operator, damping) @ v - operator @ v, damping * v, rtol=1e-9, atol=1e-10
        )


@LAWS
@given(case=CASES)
def test_a_block_of_a_network_goes_to_a_vector_and_back(case: Case) -> None:
    for block, v in zip(case.blocks, case.vectors(), strict=True):
        assert torch.equal(block.flatten(block.unflatten(v)), v)
        before = block.values()
        block.assign_(v)
        assert torch.equal(block.values(), v)
        block.assign_(before)
        assert all(map(torch.equal, block.unflatten(before), block.params))
