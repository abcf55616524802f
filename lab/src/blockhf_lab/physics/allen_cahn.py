"""The Allen-Cahn equation: slow fronts between two stable phases, a known hard case for networks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blockhf import blocks
from blockhf_lab.physics import problem
from blockhf_lab.physics.networks import JetNetwork, periodic
from blockhf_lab.physics.problem import Kind, PhysicsTask

DIFFUSIVITY = 1e-4
_MODES, _STEPS, _KEPT = 512, 2000, 100  # of the reference; every twentieth step is kept


@functools.cache
def reference() -> Tensor:
    """The solution at evenly spaced t (rows) and x (columns): Fourier in x, Strang's splitting in t.

    Half a step of diffusion, exact in Fourier space, a step of reaction in closed form, and half a step of
    diffusion again.
    """
    x = -1 + 2 * torch.arange(_MODES, dtype=problem.DTYPE) / _MODES
    waves = math.pi * torch.fft.fftfreq(_MODES, 1 / _MODES, dtype=problem.DTYPE)
    step = 1 / _STEPS
    decay = torch.exp(-DIFFUSIVITY * waves.square() * step / 2)
    u = x.square() * torch.cos(math.pi * x)
    kept = [u]
    for index in range(1, _STEPS + 1):
        u = torch.fft.ifft(decay * torch.fft.fft(u)).real
        u = u / (u.square() + (1 - u.square()) * math.exp(-10 * step)).sqrt()  # u' = 5u - 5u³
        u = torch.fft.ifft(decay * torch.fft.fft(u)).real
        if index % (_STEPS // _KEPT) == 0:
            kept.append(u)
    return torch.stack(kept)


def solution(points: Tensor) -> Tensor:
    """The reference, summed from its Fourier series at x, and at the kept time nearest to t."""
    x, t = points.unbind(1)
    rows = torch.fft.fft(reference())
    waves = math.pi * torch.fft.fftfreq(_MODES, 1 / _MODES, dtype=problem.DTYPE)
    found = torch.empty_like(x)
    row = (t * _KEPT).round().long()
    for index in sorted(set(row.tolist())):
        own = row == index
        phases = waves * (x[own, None] + 1)
        series = rows[index]
        found[own] = (phases.cos() @ series.real - phases.sin() @ series.imag) / _MODES
    return found


def residuals(model: nn.Module, points: Tensor, values: Tensor) -> Sequence[Tensor]:
    """u_t - D u_xx - 5u + 5u³ inside, u - g at the start; the network is periodic by itself."""
    jet = model(points)
    u = jet.value[:, 0]
    return jet.slopes[1, :, 0] - DIFFUSIVITY * jet.second[:, 0] - 5 * u + 5 * u**3, u - values


def _points() -> list[Kind]:
    inside = problem.sobol(1500, (-1, 0), (1, 1))
    x = problem.line(-1, 1, 201)[:-1]
    start = torch.stack([x, torch.zeros_like(x)], dim=1)
    return [
        Kind(inside, torch.zeros_like(inside[:, 0])),
        Kind(start, x.square() * torch.cos(math.pi * x), weight=100.0),
    ]


def task(preset: str) -> PhysicsTask:
    """1,500 points inside and 200 at the start; network 3-30-30-30-1 on cos πx, sin πx and t."""
    return problem.make(
        "allen-cahn",
        preset,
        title="Allen-Cahn equation, network 3-30-30-30-1, 1,700 points",
        equation="u_t = 10⁻⁴ u_xx + 5u - 5u³, periodic on [-1, 1], u = x² cos πx at t = 0",
        make_model=lambda: JetNetwork((3, 30, 30, 30, 1), (1.0, 0.0), periodic),
        make_blocks=blocks.single,
        kinds=_points(),
        test_points=lambda: problem.space_time(-1, 1, 1).points,
        residuals=residuals,
        solution=solution,
        view=lambda: problem.space_time(-1, 1, 1),
        targets=(5e-1, 1e-1, 1e-2),
    )
