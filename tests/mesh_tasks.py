"""What the ranks do in the tests of meshes, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import blockhf
from blockhf import (
    AllSamples,
    BestIterate,
    BlockHF,
    Diagonal,
    DoubleBackward,
    EmpiricalFisher,
    Formed,
    Hutchinson,
    Identity,
    Nystrom,
    SignedGradients,
    Subspace,
    Traced,
    blocks,
)
from blockhf.distributed import share_out

NUM_SAMPLES, NUM_CURVED, NUM_STEPS = 144, 24, 5
Batch = tuple[Tensor, Tensor]


def default(groups: Any, **options: Any) -> BlockHF:
    """As it comes, but for the number of samples, which goes by the cost, and that is another on a mesh."""
    return BlockHF(groups, curvature_batch_size=NUM_CURVED, **{"sampling": AllSamples(), **options})


def paper(groups: Any, **options: Any) -> BlockHF:
    return BlockHF.paper(
        groups, **{"damping": 0.1, "max_cg_steps": 5, "curvature_batch_size": NUM_CURVED, **options}
    )


METHODS: dict[str, Callable[..., BlockHF]] = {
    "paper": paper,
    "martens": lambda groups, **options: BlockHF.martens(groups, curvature_batch_size=NUM_CURVED, **options),
    "default": default,
    "no held-out samples": lambda groups, **options: default(
        groups, search=Subspace(held_out=0), preconditioner=Identity(), **options
    ),
    "best iterate": lambda groups, **options: paper(groups, search=BestIterate(), **options),
    "formed": lambda groups, **options: default(groups, products=Formed(), **options),
    "traced": lambda groups, **options: default(groups, products=Traced(), **options),
    "double backward": lambda groups, **options: default(groups, products=DoubleBackward(), **options),
    "signed": lambda groups, **options: default(
        groups, preconditioner=Diagonal(SignedGradients(), exponent=0.75), **options
    ),
    "hutchinson": lambda groups, **options: default(
        groups, preconditioner=Diagonal(Hutchinson(3)), **options
    ),
    "nystrom": lambda groups, **options: default(groups, preconditioner=Nystrom(4), **options),
    "fisher": lambda groups, **options: paper(groups, curvature=EmpiricalFisher(), **options),
    "sum": lambda groups, **options: default(groups, reduction="sum", preconditioner=Identity(), **options),
    "few": lambda groups, **options: paper(groups, **{**options, "curvature_batch_size": 1}),
}
"""Methods by name; each takes groups and options."""


def make() -> tuple[nn.Module, Callable[[str], Any], Batch]:
    """A network in three blocks, its objective for a reduction, and all samples."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    inputs = torch.randn(NUM_SAMPLES, 6, dtype=torch.float64)
    targets = torch.randint(4, (NUM_SAMPLES,))

    def objective_for(reduction: str) -> Any:
        def objective(batch: Batch) -> tuple[Tensor, Tensor]:
            outputs = model(batch[0])
            return outputs, F.cross_entropy(outputs, batch[1], reduction=reduction)

        return objective

    return model, objective_for, (inputs, targets)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def shards(num_ranks: int, uneven: bool) -> list[int]:
    weights = list(range(1, num_ranks + 1)) if uneven else [1] * num_ranks
    return share_out(NUM_SAMPLES, [weight * NUM_SAMPLES for weight in weights])


def act(
    optimizer: BlockHF, model: nn.Module, objective: Any, batch: Batch, num_steps: int = NUM_STEPS
) -> dict[str, Any]:
    """Gradient and directions at the start, then some steps."""
    with optimizer._problem(objective, batch, None, searches=False) as problem:
        loss, gradient = problem.differentiate()
    optimizer.direction(objective, batch)
    directions = flat([param.grad for param in model.parameters() if param.grad is not None])
    losses = [float(optimizer.step(objective, batch)) for _ in range(num_steps)]
    assert optimizer.report is not None
    return {
        "loss": float(loss),
        "gradient": torch.cat(gradient),
        "directions": directions,
        "losses": losses,
        "parameters": flat(list(model.parameters())),
        "dampings": [group["damping"] for group in optimizer.param_groups],
        "work": dict(optimizer.report.work),
        "step": optimizer.report.step,
        "cg": [block.num_steps for block in optimizer.report.blocks],
        "loads": list(optimizer.report.loads),
    }


def on_mesh(shape: tuple[int, int], names: Sequence[str], uneven: bool) -> dict[str, Any]:
    """In each rank: the methods, one after the other."""
    mesh = blockhf.mesh(*shape)
    rank = dist.get_rank()
    sizes = shards(mesh.size(), uneven)
    start = sum(sizes[:rank])
    found = {}
    for name in names:
        model, objective_for, batch = make()
        if rank > 0:  # rank 0's parameters count
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1.0)
        optimizer = METHODS[name](blocks.by_layer(model), mesh=mesh)
        own = tuple(tensor[start : start + sizes[rank]] for tensor in batch)
        found[name] = act(optimizer, model, objective_for(optimizer.reduction), own)
        found[name]["kept"] = sorted(
            group["name"]
            for group in optimizer.param_groups
            if any("direction" in optimizer.state[param] for param in group["params"])
        )
    dist.barrier()
    dist.destroy_process_group()
    return found


def in_one_process(shape: tuple[int, int], name: str, uneven: bool) -> dict[str, Any]:
    """The same on all samples, in the order in which the mesh has them."""
    model, objective_for, batch = make()
    optimizer = METHODS[name](blocks.by_layer(model))
    num_blocks, num_data = shape
    sizes = shards(num_blocks * num_data, uneven)
    held = 0
    if hasattr(optimizer.search, "num_held_out"):
        held = optimizer.search.num_held_out(NUM_SAMPLES, NUM_SAMPLES)
    held_out = share_out(held, sizes)
    curved = share_out(
        optimizer._num_curvature_samples(NUM_SAMPLES - held),
        [size - number for size, number in zip(sizes, held_out, strict=True)],
    )
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    columns = [row * num_data + column for column in range(num_data) for row in range(num_blocks)]
    front = [index for rank in columns for index in range(starts[rank], starts[rank] + curved[rank])]
    tail = [
        index
        for rank, start in enumerate(starts)
        for index in range(start + sizes[rank] - held_out[rank], start + sizes[rank])
    ]
    middle = [index for index in range(NUM_SAMPLES) if index not in {*front, *tail}]
    if num_data > 1 and not uneven and name != "few":
        optimizer.micro_batch_size = NUM_CURVED // num_data  # parts that draw as the columns do
    arranged = tuple(tensor[front + middle + tail] for tensor in batch)
    return act(optimizer, model, objective_for(optimizer.reduction), arranged)
