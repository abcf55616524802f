"""Losses without noise, with the plain default: errors after fixed CPU seconds, one thread, float64.

    OMP_NUM_THREADS=1 python benchmarks/physics_bars.py poisson 0 1 2
    OMP_NUM_THREADS=1 python benchmarks/physics_bars.py burgers 0 1 2 --seconds 12
    OMP_NUM_THREADS=1 python benchmarks/physics_bars.py poisson5d 0 1 2 --seconds 400 --to 1e-4

Tasks: poisson (network 2-32-32-1), engd (2-32-1) and wide (2-64-1) are -Δu = 2π² sin πx sin πy with 30 x 30
points inside and 120 on the boundary, relative L2 error on a grid of 50 x 50. burgers (2-20-20-20-1) has the
viscosity 0.01/π and 1,360 points; its figure is the loss. poisson5d (5-64-64-48-48-1, 10,065 parameters) has
a sum of cosines as its solution, and its points are drawn anew for each step; relative L2 error.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from blockhf import BlockHF, blocks

Task = tuple[nn.Module, Callable[[Any], Any], Any, Callable[[], float]]
SECONDS = {"poisson": 8.0, "engd": 30.0, "wide": 120.0, "burgers": 12.0, "poisson5d": 80.0}
AIMS = {"poisson": 5e-5, "engd": 1e-6, "wide": 1e-6, "burgers": 1e-6, "poisson5d": 1e-3}


def network(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def derivative(value: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(value.sum(), x, create_graph=True)[0]


def poisson(*widths: int) -> Task:
    net = network(*widths)
    middle = (torch.arange(30) + 0.5) / 30
    inside = torch.cartesian_prod(middle, middle)
    low, high = torch.zeros(30), torch.ones(30)
    sides = ((middle, low), (middle, high), (low, middle), (high, middle))
    points = {"interior": inside, "boundary": torch.cat([torch.stack(side, 1) for side in sides])}

    def objective(batch: dict[str, Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = batch["interior"].detach().requires_grad_()
        slopes = derivative(net(x), x)
        laplacian = sum(derivative(slopes[:, axis], x)[:, axis] for axis in range(2))
        residuals = laplacian + 2 * math.pi**2 * torch.sin(math.pi * x.detach()).prod(1)
        edge = net(batch["boundary"])[:, 0]
        return (residuals, edge), (residuals.square().mean() + edge.square().mean()) / 2

    line = torch.linspace(0, 1, 50)
    grid = torch.cartesian_prod(line, line)
    return net, objective, points, error_of(net, grid, torch.sin(math.pi * grid).prod(1))


def burgers() -> Task:
    net = network(2, 20, 20, 20, 1)
    inside = torch.rand(1200, 2) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])
    start = torch.stack([torch.linspace(-1, 1, 80), torch.zeros(80)], 1)
    times = torch.linspace(0, 1, 40)
    walls = torch.cat([torch.stack([torch.full((40,), side), times], 1) for side in (-1.0, 1.0)])
    edge = torch.cat([start, walls])
    target = torch.cat([-torch.sin(math.pi * start[:, 0]), torch.zeros(80)])
    points = {"interior": inside, "edge": (edge, target)}

    def objective(batch: Any) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = batch["interior"].detach().requires_grad_()
        u = net(x)[:, 0]
        slopes = derivative(u, x)
        bend = derivative(slopes[:, 0], x)[:, 0]
        residuals = slopes[:, 1] + u * slopes[:, 0] - 0.01 / math.pi * bend
        off = net(batch["edge"][0])[:, 0] - batch["edge"][1]
        return (residuals, off), (residuals.square().mean() + off.square().mean()) / 2

    return net, objective, points, lambda: float(objective(points)[1].detach())


def poisson5d() -> Task:
    net = network(5, 64, 64, 48, 48, 1)

    def laplacian(x: Tensor) -> Tensor:
        """Value, Jacobian and Laplacian go forward together."""
        value, jacobian, second = x, torch.eye(5).expand(len(x), 5, 5), torch.zeros_like(x)
        for layer in net:
            if isinstance(layer, nn.Linear):
                value, jacobian, second = layer(value), jacobian @ layer.weight.T, second @ layer.weight.T
            else:
                value = torch.tanh(value)
                slope = 1 - value.square()
                second = slope * (second - 2 * value * jacobian.square().sum(1))
                jacobian = slope[:, None] * jacobian
        return second[:, 0]

    def objective(batch: dict[str, Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x, y = batch["interior"], batch["boundary"]
        residuals = laplacian(x) + math.pi**2 * torch.cos(math.pi * x).sum(1)
        edge = net(y)[:, 0] - torch.cos(math.pi * y).sum(1)
        return (residuals, edge), (residuals.square().mean() + edge.square().mean()) / 2

    def points(number: int) -> dict[str, Tensor]:
        inside, edge = torch.rand(number - number // 5, 5), torch.rand(number // 5, 5)
        sides = torch.randint(2, (len(edge),)).to(edge)
        edge[torch.arange(len(edge)), torch.randint(5, (len(edge),))] = sides
        return {"interior": inside, "boundary": edge}

    test = torch.rand(9000, 5, generator=torch.Generator().manual_seed(99))
    return net, objective, points, error_of(net, test, torch.cos(math.pi * test).sum(1))


def error_of(net: nn.Module, points: Tensor, solution: Tensor) -> Callable[[], float]:
    def error() -> float:
        with torch.no_grad():
            return float((net(points)[:, 0] - solution).norm() / solution.norm())

    return error


TASKS: dict[str, Callable[[], Task]] = {
    "poisson": lambda: poisson(2, 32, 32, 1),
    "engd": lambda: poisson(2, 32, 1),
    "wide": lambda: poisson(2, 64, 1),
    "burgers": burgers,
    "poisson5d": poisson5d,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--to", type=float, default=0.0, help="stop there; looking is not timed")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    seconds = chosen.seconds or SECONDS[chosen.task]
    errors, times = [], []
    for seed in chosen.seeds:
        torch.manual_seed(seed)
        net, objective, points, error = TASKS[chosen.task]()
        optimizer = BlockHF(blocks.single(net))
        start, shown, num_steps, aim = time.process_time(), seconds / 5, 0, AIMS[chosen.task]
        while (spent := time.process_time() - start) < seconds:
            found = error() if chosen.to else math.inf
            if found <= aim:
                print(f"  {num_steps:4d} steps, {spent:5.1f} s: {found:.2e}, below {aim:.0e}", flush=True)
                aim = 0.0
            if found <= chosen.to:
                break
            start += time.process_time() - start - spent
            if spent > shown:
                print(f"  {num_steps:4d} steps, {spent:5.1f} s: {error():.2e}", flush=True)
                shown += seconds / 5
            optimizer.step(objective, points)
            num_steps += 1
        errors.append(error())
        times.append(spent)
        print(f"{chosen.task}, seed {seed}: {num_steps} steps, {spent:.1f} s: {errors[-1]:.2e}", flush=True)
    medians = f"median {statistics.median(errors):.1e} after {statistics.median(times):.1f} s"
    print(f"{chosen.task}: {medians}, aim {chosen.to or AIMS[chosen.task]:.0e}")


if __name__ == "__main__":
    main()
