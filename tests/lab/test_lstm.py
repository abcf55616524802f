"""The peephole LSTM of the experiments against torch's LSTM and against its equations."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from blockhf_lab.lstm import PeepholeLayer, PeepholeLSTM, SequenceClassifier

NUM_SAMPLES, NUM_STEPS, INPUT_SIZE, HIDDEN_SIZE = 4, 5, 3, 2


def model_and_inputs() -> tuple[PeepholeLSTM, Tensor]:
    torch.manual_seed(0)
    model = PeepholeLSTM(INPUT_SIZE, HIDDEN_SIZE, num_layers=2).double()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    return model, torch.randn(NUM_SAMPLES, NUM_STEPS, INPUT_SIZE, dtype=torch.float64)


def test_without_peepholes_it_is_the_lstm_of_torch() -> None:
    model, inputs = model_and_inputs()
    reference = nn.LSTM(INPUT_SIZE, HIDDEN_SIZE, num_layers=2, batch_first=True).double()
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            layer.entry_peepholes.zero_()
            layer.output_peephole.zero_()
            getattr(reference, f"weight_ih_l{index}").copy_(layer.input_weight)
            getattr(reference, f"weight_hh_l{index}").copy_(layer.hidden_weight)
            getattr(reference, f"bias_ih_l{index}").copy_(layer.bias)
            getattr(reference, f"bias_hh_l{index}").zero_()
    torch.testing.assert_close(model(inputs), reference(inputs)[0])


def test_it_follows_its_equations() -> None:
    model, inputs = model_and_inputs()
    states = inputs
    for layer in model.layers:
        states = torch.stack([hidden_states(layer, sequence) for sequence in states])
    torch.testing.assert_close(model(inputs), states)


def hidden_states(layer: PeepholeLayer, sequence: Tensor) -> Tensor:
    """Those of one sample, gate by gate and as the docstring has them."""
    W_i, W_f, W_c, W_o = layer.input_weight.chunk(4)
    U_i, U_f, U_c, U_o = layer.hidden_weight.chunk(4)
    b_i, b_f, b_c, b_o = layer.bias.chunk(4)
    p_i, p_f = layer.entry_peepholes.squeeze(2)
    p_o = layer.output_peephole.squeeze(1)
    h = c = torch.zeros(HIDDEN_SIZE, dtype=torch.float64)
    states = []
    for x in sequence:
        i = torch.sigmoid(W_i @ x + U_i @ h + p_i * c + b_i)
        f = torch.sigmoid(W_f @ x + U_f @ h + p_f * c + b_f)
        c = f * c + i * torch.tanh(W_c @ x + U_c @ h + b_c)
        o = torch.sigmoid(W_o @ x + U_o @ h + p_o * c + b_o)
        h = o * torch.tanh(c)
        states.append(h)
    return torch.stack(states)


def test_weights_start_as_glorot_has_it_and_biases_at_zero() -> None:
    torch.manual_seed(0)
    layer = PeepholeLayer(30, 50)
    bounds = {
        "input_weight": math.sqrt(6 / (30 + 50)),
        "hidden_weight": math.sqrt(6 / (50 + 50)),
        "entry_peepholes": math.sqrt(6 / (50 + 50)),
        "output_peephole": math.sqrt(6 / (50 + 50)),
    }
    for name, bound in bounds.items():
        largest = layer.get_parameter(name).abs().max().item()
        assert 0.9 * bound < largest <= bound, name
    assert not layer.bias.any()
    assert not SequenceClassifier(1, 10).head.bias.any()


def test_the_classifier_has_the_size_of_the_paper() -> None:
    model = SequenceClassifier(input_size=1, num_classes=10)
    sizes = [sum(param.numel() for param in layer.parameters()) for layer in model.lstm.layers]
    assert sizes == [4 * 10 * (1 + 10 + 1) + 30, 4 * 10 * (10 + 10 + 1) + 30, 4 * 10 * (10 + 10 + 1) + 30]
    assert model(torch.zeros(6, 49, 1)).shape == (6, 10)


def test_the_classifier_reads_the_last_state_of_the_last_layer() -> None:
    torch.manual_seed(0)
    model = SequenceClassifier(input_size=2, num_classes=3)
    inputs = torch.randn(4, 6, 2)
    torch.testing.assert_close(model(inputs), model.head(model.lstm(inputs)[:, -1]))
