"""The paper's recurrent network: stacked LSTM layers with peepholes that classify a sequence."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

PATTERNS = {"bottom": r"^lstm\.layers\.0\.", "middle": r"^lstm\.layers\.1\.", "top": ""}
"""Which parameters are in which of the paper's three blocks; the top one also holds the head."""


class PeepholeLayer(nn.Module):
    r"""One LSTM layer whose gates see the cell through peepholes (Gers, Schraudolph & Schmidhuber, 2002).

    .. math::
        i_t &= \sigma(W_i x_t + U_i h_{t-1} + p_i \odot c_{t-1} + b_i) \\
        f_t &= \sigma(W_f x_t + U_f h_{t-1} + p_f \odot c_{t-1} + b_f) \\
        c_t &= f_t \odot c_{t-1} + i_t \odot \tanh(W_c x_t + U_c h_{t-1} + b_c) \\
        o_t &= \sigma(W_o x_t + U_o h_{t-1} + p_o \odot c_t + b_o) \\
        h_t &= o_t \odot \tanh(c_t)

    The parameters of the gates are stacked in the order i, f, c, o, which is that of ``nn.LSTM``. The
    weights of each gate are drawn as Glorot & Bengio (2010) have it, the peepholes as the diagonal of a
    square matrix; the biases start at zero.

    Args:
        input_size: Number of features of a time step.
        hidden_size: Number of cells.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.input_weight = nn.Parameter(torch.empty(4 * hidden_size, input_size))
        self.hidden_weight = nn.Parameter(torch.empty(4 * hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(4 * hidden_size))
        # A column each, to be spread over the samples. The first two are those of input and forget gate.
        self.entry_peepholes = nn.Parameter(torch.empty(2, hidden_size, 1))
        self.output_peephole = nn.Parameter(torch.empty(hidden_size, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.input_weight, self.hidden_weight):
            for gate in weight.detach().chunk(4):
                nn.init.xavier_uniform_(gate)
        nn.init.zeros_(self.bias)
        bound = math.sqrt(6 / (self.hidden_size + self.hidden_size))
        nn.init.uniform_(self.entry_peepholes, -bound, bound)
        nn.init.uniform_(self.output_peephole, -bound, bound)

    def forward(self, inputs: Tensor) -> Tensor:
        """The hidden states ``(hidden_size, T, N)`` for inputs ``(input_size, T, N)``, from a zero state.

        The samples come last, so that each gate of a step is one piece of memory. Within a step there is
        one matrix product; the one with the inputs is made for all steps at once.
        """
        size, (steps, samples) = self.hidden_size, inputs.shape[1:]
        projected = torch.addmm(self.bias.unsqueeze(1), self.input_weight, inputs.flatten(1))
        hidden = cell = inputs.new_zeros(size, samples)
        states = []
        for from_inputs in projected.reshape(4 * size, steps, samples).unbind(1):
            gates = torch.addmm(from_inputs, self.hidden_weight, hidden)
            entries, candidate, output = torch.split(gates, [2 * size, size, size])
            entries = torch.addcmul(entries.reshape(2, size, samples), self.entry_peepholes, cell)
            enter, forget = torch.sigmoid(entries).unbind(0)
            cell = torch.addcmul(forget * cell, enter, torch.tanh(candidate))
            output = torch.sigmoid(torch.addcmul(output, self.output_peephole, cell))
            hidden = output * torch.tanh(cell)
            states.append(hidden)
        return torch.stack(states, dim=1)


class PeepholeLSTM(nn.Module):
    """A stack of LSTM layers with peepholes, each a submodule of ``layers``.

    Args:
        input_size: Number of features of a time step.
        hidden_size: Number of cells of each layer.
        num_layers: Number of layers.

    Example:
        >>> PeepholeLSTM(input_size=3, hidden_size=5, num_layers=2)(torch.zeros(4, 7, 3)).shape
        torch.Size([4, 7, 5])
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            PeepholeLayer(hidden_size if index else input_size, hidden_size) for index in range(num_layers)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """The last layer's hidden states ``(N, T, hidden_size)`` for inputs ``(N, T, input_size)``."""
        states = inputs.permute(2, 1, 0)
        for layer in self.layers:
            states = layer(states)
        return states.permute(2, 1, 0)


class SequenceClassifier(nn.Module):
    """Logits from the last hidden state of the last layer; the defaults are the paper's.

    The paper has a block for each layer, the top one with the head:

    >>> from blockhf import blocks
    >>> model = SequenceClassifier(input_size=1, num_classes=10)
    >>> [len(group["params"]) for group in blocks.by_pattern(model, PATTERNS)]
    [5, 5, 7]

    Args:
        input_size: Number of features of a time step.
        num_classes: Number of logits.
        hidden_size: Number of cells of each layer.
        num_layers: Number of layers.
    """

    def __init__(self, input_size: int, num_classes: int, hidden_size: int = 10, num_layers: int = 3) -> None:
        super().__init__()
        self.lstm = PeepholeLSTM(input_size, hidden_size, num_layers)
        self.head = nn.Linear(hidden_size, num_classes)
        nn.init.xavier_uniform_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits ``(N, num_classes)`` for inputs ``(N, T, input_size)``."""
        logits: Tensor = self.head(self.lstm(inputs)[:, -1])
        return logits
