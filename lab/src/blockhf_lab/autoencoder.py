"""The paper's first experiment: a deep autoencoder of handwritten digits.

The network is that of Hinton & Salakhutdinov (2006) and Martens (2010): 784-1000-500-250-30 and its
mirror image, with tanh between the layers. The code and the output are linear. ``encoder`` and
``decoder`` are submodules, so ``blocks.by_module(model)`` gives the paper's two blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor, nn

SIZES = (784, 1000, 500, 250, 30)
"""Units of the paper's layers, from the picture to the code."""


class Autoencoder(nn.Module):
    """An encoder to a small code, and a decoder back.

    Weights are drawn from Glorot's uniform distribution, biases are zero: the default of Lasagne, which
    the paper used. The draw is that of torch's global generator; ``torch.manual_seed`` fixes it.

    Args:
        sizes: Units of the layers, from the picture to the code; the decoder mirrors them.

    Example:
        >>> import torch
        >>> model = Autoencoder((16, 8, 2))
        >>> pictures = torch.rand(5, 16)
        >>> model.encoder(pictures).shape, model(pictures).shape
        (torch.Size([5, 2]), torch.Size([5, 16]))
    """

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(f"sizes is {tuple(sizes)}, but must be at least two positive numbers of units.")
        self.encoder = _layers(sizes)
        self.decoder = _layers(sizes[::-1])

    def forward(self, pictures: Tensor) -> Tensor:
        reconstruction: Tensor = self.decoder(self.encoder(pictures))
        return reconstruction


def reconstruction_error(outputs: Tensor, pictures: Tensor) -> Tensor:
    """Squared error, summed over the pixels and averaged over the pictures, as the paper reports it."""
    return (outputs - pictures).square().sum(dim=1).mean()


def objective(model: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What the optimizer minimizes: a batch of pictures to the reconstructions and their error."""

    def evaluate(pictures: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(pictures)
        return outputs, reconstruction_error(outputs, pictures)

    return evaluate


def _layers(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers of these sizes with tanh between them, and none after the last."""
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in itertools.pairwise(sizes):
        linear = nn.Linear(num_inputs, num_outputs)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])
