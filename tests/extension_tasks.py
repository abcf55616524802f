"""The extensions in ``examples/extend``, each at work on a small model, in one process or on a mesh."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import blockhf
from blockhf import Backtracking, BlockHF, DoubleBackward, LevenbergMarquardt, Traced, blocks
from optimizer_tasks import Task, values

FOLDER = Path(__file__).parents[1] / "examples" / "extend"
sys.path.append(str(FOLDER))

from average_ratio import AverageRatio  # noqa: E402
from grid_search import GridSearch  # noqa: E402
from mixed_curvature import Mixed  # noqa: E402
from nystrom import Nystrom  # noqa: E402
from recycled_descent import RecycledDescent  # noqa: E402

EXTENSIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "search": lambda: {"search": GridSearch(), "lr": 0.1},
    "damping": lambda: {"damping": AverageRatio(weight=0.5)},
    "preconditioner": lambda: {"preconditioner": Nystrom(rank=4, every=2)},
    "solver": lambda: {"solver": RecycledDescent(), "warm_start": 0.0},
    "curvature": lambda: {"curvature": Mixed(fisher=0.5), "products": DoubleBackward()},
    "curvature, traced": lambda: {"curvature": Mixed(fisher=0.5), "products": Traced()},
}
"""By extension point, the options that put the extension in."""

NUM_STEPS = 5


def task() -> Task:
    return Task("cross_entropy", num_samples=24)


def optimizer_for(own: Task, options: dict[str, Any], mesh: Any = None) -> BlockHF:
    settings = {
        "max_cg_steps": 4,
        "damping": LevenbergMarquardt(initial=0.05),
        "search": Backtracking(),
        **options,
    }
    return BlockHF.martens(blocks.by_layer(own.model), mesh=mesh, **settings)


def trained(options: dict[str, Any], mesh: Any = None) -> dict[str, Any]:
    """Some steps, on this rank's share of the samples where there is a mesh."""
    own = task()
    batch: tuple[Tensor, ...] = own.batch
    if mesh is not None:
        batch = tuple(tensor.chunk(mesh.size())[dist.get_rank()] for tensor in batch)
    optimizer = optimizer_for(own, options, mesh)
    losses = [float(optimizer.step(own.objective, batch)) for _ in range(NUM_STEPS)]
    return {
        "losses": losses,
        "parameters": values(own.model),
        "dampings": [group["damping"] for group in optimizer.param_groups],
        "policies": optimizer.state_dict()["policies"],
        "kept": sorted(optimizer.policy_state["solver"].blocks),
    }


def on_mesh(shape: tuple[int, int]) -> dict[str, Any]:
    """In each rank: all extensions, one after the other."""
    torch.manual_seed(0)
    mesh = blockhf.mesh(*shape)
    return {name: trained(make(), mesh) for name, make in EXTENSIONS.items()}
