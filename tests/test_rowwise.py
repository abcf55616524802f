"""Gradients row by row against one backward pass for each row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from blockhf.curvature.rowwise import UnknownUse, row_gradients
from blockhf_lab.lstm import SequenceClassifier

NUM_EQUAL, NUM_SAMPLES = 3, 4


class Scaled(nn.Module):
    """A parameter that multiplies, one that is added, and one in each place of an addcmul."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))
        self.left, self.right = nn.Parameter(torch.randn(1, 5)), nn.Parameter(torch.randn(5))

    def forward(self, inputs: Tensor) -> Tensor:
        scaled = self.gain * torch.tanh(inputs) + self.shift
        return torch.addcmul(scaled, self.left, torch.sin(inputs)) + torch.addcmul(inputs, inputs, self.right)


class Transposed(nn.Module):
    """Matrices on either side of a product, as they are and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(6, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.second.T @ torch.tanh(inputs @ self.first).T).T


class TiedBothWays(nn.Module):
    """A matrix that leads in and, transposed, out again."""

    def __init__(self, num_hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_hidden, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ self.weight.T) @ self.weight


class Steps(nn.Module):
    """A layer at each step of a sequence, with the steps before or behind the samples."""

    def __init__(self, steps_first: bool) -> None:
        super().__init__()
        self.steps_first, self.layer = steps_first, nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.steps_first:
            return torch.tanh(self.layer(inputs.transpose(0, 1).contiguous())).sum(0)
        return torch.tanh(self.layer(inputs)).sum(1)


KNOWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear layers": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)), (5,)),
    "entry by entry": (Scaled, (5,)),
    "transposed": (Transposed, (5,)),
    "tied both ways": (lambda: TiedBothWays(4), (5,)),
    "tied both ways, square": (lambda: TiedBothWays(5), (5,)),
    "steps behind": (lambda: Steps(False), (7, 5)),
    "steps in front": (lambda: Steps(True), (7, 5)),
    "peephole lstm": (lambda: SequenceClassifier(2, 3, hidden_size=4, num_layers=2), (6, 2)),
    "cell": (lambda: Unrolled(), (6, 5)),
}
UNKNOWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer norm": (lambda: nn.LayerNorm(5), (5,)),
    "a part of a parameter": (lambda: Chunked(), (5,)),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten()), (2, 5)),
}


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(5, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        state = inputs.new_zeros(len(inputs), 4)
        for step in inputs.unbind(1):
            state = self.cell(step, state)
        return state


class Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(10, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = self.both.chunk(2)
        return torch.tanh(inputs @ first) @ second


def rows(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = make().double()
    samples = torch.randn(NUM_SAMPLES, *shape, dtype=torch.float64)
    outputs = model(samples.repeat_interleave(NUM_EQUAL, 0))
    return model, outputs, torch.randn_like(outputs)


@pytest.mark.parametrize("name", KNOWN)
def test_gradients_of_rows_equal_a_backward_pass_for_each(name: str) -> None:
    model, outputs, cotangents = rows(*KNOWN[name])
    params = list(model.parameters())
    found = row_gradients([outputs], [cotangents], params, NUM_EQUAL)
    for row in range(len(outputs)):
        expected = torch.autograd.grad(outputs[row], params, cotangents[row], retain_graph=True)
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own[row], other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_use_without_a_rule_is_told(name: str) -> None:
    model, outputs, cotangents = rows(*UNKNOWN[name])
    with pytest.raises(UnknownUse):
        row_gradients([outputs], [cotangents], list(model.parameters()), NUM_EQUAL)


def test_a_parameter_that_is_not_used_has_rows_of_zeros() -> None:
    model, outputs, cotangents = rows(*KNOWN["linear layers"])
    idle = nn.Parameter(torch.ones(2, dtype=torch.float64))
    *_, found = row_gradients([outputs], [cotangents], [*model.parameters(), idle], NUM_EQUAL)
    assert torch.equal(found, torch.zeros(len(outputs), 2, dtype=torch.float64))


def test_steps_cannot_be_told_from_rows_where_no_row_is_repeated() -> None:
    model, outputs, cotangents = rows(*KNOWN["steps behind"])
    with pytest.raises(UnknownUse, match="cannot be told"):
        row_gradients([outputs], [cotangents], list(model.parameters()), 1)
