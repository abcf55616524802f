"""The models of the problems, as functions of parameters and places."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Model = Callable[[Tensor, Tensor], Tensor]


def _gauss(b: Tensor, x: Tensor) -> Tensor:
    first = b[2] * torch.exp(-(((x - b[3]) / b[4]) ** 2))
    second = b[5] * torch.exp(-(((x - b[6]) / b[7]) ** 2))
    return b[0] * torch.exp(-b[1] * x) + first + second


def _lanczos(b: Tensor, x: Tensor) -> Tensor:
    return sum((b[i] * torch.exp(-b[i + 1] * x) for i in (0, 2, 4)), start=torch.zeros_like(x))


def _rational(num_above: int) -> Model:
    """A polynomial of so many coefficients over one that begins with 1."""

    def model(b: Tensor, x: Tensor) -> Tensor:
        above = sum((b[i] * x**i for i in range(num_above)), start=torch.zeros_like(x))
        below = sum((b[num_above + i] * x ** (i + 1) for i in range(num_above - 1)), start=torch.ones_like(x))
        return above / below

    return model


def _chwirut(b: Tensor, x: Tensor) -> Tensor:
    return torch.exp(-b[0] * x) / (b[1] + b[2] * x)


def _enso(b: Tensor, x: Tensor) -> Tensor:
    def wave(period: Tensor | float, c: Tensor, s: Tensor) -> Tensor:
        angle = 2 * math.pi * x / period
        return c * torch.cos(angle) + s * torch.sin(angle)

    return b[0] + wave(12.0, b[1], b[2]) + wave(b[3], b[4], b[5]) + wave(b[6], b[7], b[8])


def _saturation(b: Tensor, x: Tensor) -> Tensor:
    return b[0] * (1 - torch.exp(-b[1] * x))


MODELS: dict[str, Model] = {
    "Bennett5": lambda b, x: b[0] * (b[1] + x) ** (-1 / b[2]),
    "BoxBOD": _saturation,
    "Chwirut1": _chwirut,
    "Chwirut2": _chwirut,
    "DanWood": lambda b, x: b[0] * x ** b[1],
    "Eckerle4": lambda b, x: b[0] / b[1] * torch.exp(-0.5 * ((x - b[2]) / b[1]) ** 2),
    "ENSO": _enso,
    "Gauss1": _gauss,
    "Gauss2": _gauss,
    "Gauss3": _gauss,
    "Hahn1": _rational(4),
    "Kirby2": _rational(3),
    "Lanczos1": _lanczos,
    "Lanczos2": _lanczos,
    "Lanczos3": _lanczos,
    "MGH09": lambda b, x: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
    "MGH10": lambda b, x: b[0] * torch.exp(b[1] / (x + b[2])),
    "MGH17": lambda b, x: b[0] + b[1] * torch.exp(-x * b[3]) + b[2] * torch.exp(-x * b[4]),
    "Misra1a": _saturation,
    "Misra1b": lambda b, x: b[0] * (1 - (1 + b[1] * x / 2) ** -2),
    "Misra1c": lambda b, x: b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5),
    "Misra1d": lambda b, x: b[0] * b[1] * x / (1 + b[1] * x),
    "Nelson": lambda b, x: b[0] - b[1] * x[:, 0] * torch.exp(-b[2] * x[:, 1]),  # of log y
    "Rat42": lambda b, x: b[0] / (1 + torch.exp(b[1] - b[2] * x)),
    "Rat43": lambda b, x: b[0] / (1 + torch.exp(b[1] - b[2] * x)) ** (1 / b[3]),
    "Roszman1": lambda b, x: b[0] - b[1] * x - torch.arctan(b[2] / (x - b[3])) / math.pi,
    "Thurber": _rational(4),
}
"""By the problem's name; the residual is that less the observation, for Nelson less its logarithm."""
