"""Small tanh networks that know their derivatives by the coordinates.

Derivatives go forward through the layers together with the value (forward Laplacian: Li et al., 2023), which
is cheaper than two backward passes for each coordinate, for every optimizer alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Jet(NamedTuple):
    """A function and its derivatives at points.

    Attributes:
        value: ``(points, outputs)``.
        slopes: ``(coordinates, points, outputs)``, the first derivatives.
        second: ``(points, outputs)``, a sum of pure second derivatives with fixed coefficients.
    """

    value: Tensor
    slopes: Tensor
    second: Tensor


class JetNetwork(nn.Module):
    """A tanh network in float64; calling it gives a jet, ``value`` the value alone. Weights are torch's draw.

    Args:
        widths: Units of the layers, from the features to the output.
        coefficients: One for each coordinate: ``second`` is the sum of them times the second derivatives.
        features: The jets of what the first layer gets; the coordinates themselves if there are none.

    Example:
        >>> net = JetNetwork((2, 8, 1), (1.0, 1.0))  # second is the Laplacian
        >>> jet = net(torch.rand(5, 2, dtype=torch.float64))
        >>> jet.value.shape, jet.slopes.shape, jet.second.shape
        (torch.Size([5, 1]), torch.Size([2, 5, 1]), torch.Size([5, 1]))
    """

    def __init__(
        self,
        widths: Sequence[int],
        coefficients: Sequence[float],
        features: Callable[[Tensor, Tensor], Jet] | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(a, b, dtype=torch.float64) for a, b in itertools.pairwise(widths)
        )
        self.coefficients: Tensor
        self.register_buffer(
            "coefficients", torch.tensor(coefficients, dtype=torch.float64), persistent=False
        )
        self.features = _coordinates if features is None else features

    def forward(self, points: Tensor) -> Jet:
        value, slopes, second = self.features(points, self.coefficients)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            if index > 0:
                value = torch.tanh(value)
                slope = 1 - value.square()
                bent = (self.coefficients[:, None, None] * slopes.square()).sum(0)
                second = slope * (second - 2 * value * bent)
                slopes = slope * slopes
            value = layer(value)
            slopes, second = F.linear(slopes, layer.weight), F.linear(second, layer.weight)
        return Jet(value, slopes, second)

    def value(self, points: Tensor) -> Tensor:
        """The value alone, ``(points, outputs)``."""
        value = self.features(points, self.coefficients).value
        for index, layer in enumerate(self.layers):
            value = layer(value if index == 0 else torch.tanh(value))
        return value


class ValueNetwork(JetNetwork):
    """The same for regression: calling it gives the value."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__(widths, (0.0,) * widths[0])

    def forward(self, points: Tensor) -> Tensor:  # type: ignore[override]
        return self.value(points)


def _coordinates(points: Tensor, coefficients: Tensor) -> Jet:
    number = points.shape[1]
    eye = torch.eye(number, dtype=points.dtype, device=points.device)
    return Jet(points, eye[:, None, :].expand(number, len(points), number), torch.zeros_like(points))


def periodic(points: Tensor, coefficients: Tensor) -> Jet:
    """The features cos πx, sin πx and t of points (x, t): functions of them have period 2 in x."""
    x, t = points[:, 0] * torch.pi, points[:, 1]
    c, s = torch.cos(x), torch.sin(x)
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    slopes = torch.stack(
        [
            torch.stack([-torch.pi * s, torch.pi * c, zero], dim=1),
            torch.stack([zero, zero, one], dim=1),
        ]
    )
    second = -coefficients[0] * torch.pi**2 * torch.stack([c, s, zero], dim=1)
    return Jet(torch.stack([c, s, t], dim=1), slopes, second)
