"""What the ranks do in the tests of meshes, and the same in one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import blockhf
from blockhf import (
    AdamWalk,
    AllSamples,
    BlockHF,
    Diagonal,
    DoubleBackward,
    EmpiricalFisher,
    Formed,
    Identity,
    NoWalk,
    Subspace,
    Traced,
    blocks,
)
from blockhf.meshes import Distributed

NUM_SAMPLES, NUM_CURVED, NUM_STEPS = 144, 24, 5
Batch = tuple[Tensor, Tensor]


def default(groups: Any, **options: Any) -> BlockHF:
    """With default settings, but for the number of samples, which goes by the cost, another one on a mesh.

    The search is named, as one process alone would else solve a batch that comes again exactly.
    """
    settings = {"sampling": AllSamples(), "search": Subspace(), **options}
    return BlockHF(groups, curvature_batch_size=NUM_CURVED, **settings)


def paper(groups: Any, **options: Any) -> BlockHF:
    return BlockHF.paper(
        groups, **{"damping": 0.1, "max_cg_steps": 5, "curvature_batch_size": NUM_CURVED, **options}
    )


METHODS: dict[str, Callable[..., BlockHF]] = {
    "paper": paper,
    "martens": lambda groups, **options: BlockHF.martens(groups, curvature_batch_size=NUM_CURVED, **options),
    "default": default,
    "finite set": lambda groups, **options: default(groups, **{"population": 200, **options}),
    "no held-out samples": lambda groups, **options: default(
        groups, search=Subspace(held_out=0), preconditioner=Identity(), **options
    ),
    "formed": lambda groups, **options: default(groups, products=Formed(), **options),
    "traced": lambda groups, **options: default(groups, products=Traced(), **options),
    "double backward": lambda groups, **options: default(groups, products=DoubleBackward(), **options),
    "diagonal": lambda groups, **options: default(
        groups, preconditioner=Diagonal(exponent=0.75, num_draws=2), **options
    ),
    "micro-batches": lambda groups, **options: default(
        groups, **{"preconditioner": Identity(), "micro_batch_size": 5, **options}
    ),
    "fisher": lambda groups, **options: paper(groups, curvature=EmpiricalFisher(), **options),
    "sum": lambda groups, **options: default(groups, reduction="sum", preconditioner=Identity(), **options),
    "weighted": lambda groups, **options: default(
        groups, reduction=weight_of, preconditioner=Identity(), **{"micro_batch_size": 7, **options}
    ),
    "complete": lambda groups, **options: BlockHF(groups, population=NUM_SAMPLES, **options),
    "again": lambda groups, **options: BlockHF(groups, **options),
    "least squares": lambda groups, **options: BlockHF.least_squares(
        groups, **{"micro_batch_size": 5, **options}
    ),
    # The matrix of one sample has few eigenvalues: CG must not end by the last bits.
    "weight decay": lambda groups, **options: default(groups, weight_decay=0.05, **options),
    "few": lambda groups, **options: paper(groups, **{**options, "curvature_batch_size": 1, "cg_rtol": 1e-8}),
}
"""Methods by name; each takes groups and options."""


WEIGHTS = torch.tensor([0.5, 1.0, 0.0, 2.0], dtype=torch.float64)


def weight_of(batch: Batch) -> Tensor:
    """The weight of samples in a mean that is weighted by class."""
    return WEIGHTS[batch[1]].sum()


def make() -> tuple[nn.Module, Callable[[Any], Any], Batch]:
    """A network in three blocks, its objective for a reduction, and all samples."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    inputs = torch.randn(NUM_SAMPLES, 6, dtype=torch.float64)
    targets = torch.randint(4, (NUM_SAMPLES,))

    def objective_for(reduction: Any) -> Any:
        def objective(batch: Batch) -> tuple[Tensor, Tensor]:
            outputs = model(batch[0])
            if not isinstance(reduction, str):
                return outputs, F.cross_entropy(outputs, batch[1], weight=WEIGHTS)
            return outputs, F.cross_entropy(outputs, batch[1], reduction=reduction)

        return objective

    return model, objective_for, (inputs, targets)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def shards(num_ranks: int, uneven: bool) -> list[int]:
    weights = list(range(1, num_ranks + 1)) if uneven else [1] * num_ranks
    sizes = [weight * NUM_SAMPLES // sum(weights) for weight in weights]
    return [*sizes[:-1], NUM_SAMPLES - sum(sizes[:-1])]


def act(
    optimizer: BlockHF, model: nn.Module, objective: Any, batch: Batch, num_steps: int = NUM_STEPS
) -> dict[str, Any]:
    """Gradient and directions at the start, then some steps."""
    with optimizer._transaction(optimizer._blocks()) as before:
        update = optimizer._begin(optimizer._prepare(objective, batch, None, before, searches=False))
        update.differentiate()
    optimizer.direction(objective, batch)
    directions = flat([param.grad for param in model.parameters() if param.grad is not None])
    losses = [float(optimizer.step(objective, batch)) for _ in range(num_steps)]
    assert optimizer.report is not None
    return {
        "loss": float(update.loss),
        "gradient": torch.cat(list(update.gradient)),
        "directions": directions,
        "losses": losses,
        "parameters": flat(list(model.parameters())),
        "dampings": [group["damping"] for group in optimizer.param_groups],
        "work": dict(optimizer.report.work),
        "step": optimizer.report.step,
        "cg": [block.num_steps for block in optimizer.report.blocks],
    }


def several(*tasks: tuple[str, *tuple[Any, ...]]) -> list[Any]:
    """Functions of this module and their arguments, one after the other: processes are slow to start."""
    return [globals()[name](*args) for name, *args in tasks]


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
    return found


def in_one_process(shape: tuple[int, int], name: str, uneven: bool) -> dict[str, Any]:
    """The same on all samples, in the order in which the mesh has them: column by column."""
    model, objective_for, batch = make()
    optimizer = METHODS[name](blocks.by_layer(model))
    num_blocks, num_data = shape
    sizes = shards(num_blocks * num_data, uneven)
    columns = [row * num_data + column for column in range(num_data) for row in range(num_blocks)]
    pieces = [torch.split(tensor, sizes) for tensor in batch]
    arranged = (
        torch.cat([pieces[0][rank] for rank in columns]),
        torch.cat([pieces[1][rank] for rank in columns]),
    )
    return act(optimizer, model, objective_for(optimizer.reduction), arranged)


def compiled() -> Any:
    """The default with compiled products, on two ranks."""
    METHODS["compiled"] = lambda groups, **options: default(groups, products=Traced(compile=True), **options)
    return on_mesh((2, 1), ["compiled"], False)


def decaying(groups: Sequence[dict[str, Any]], **options: Any) -> BlockHF:
    """Directions to the last digits, with a weight decay for each block."""
    own = [{**group, "weight_decay": 0.1 * number} for number, group in enumerate(groups)]
    exact = {"max_cg_steps": 300, "cg_rtol": 1e-14, "curvature_batch_size": None, "warm_start": 0.0}
    return paper(own, damping=1e-3, **exact, **options)


def decayed() -> dict[str, Tensor]:
    """The directions of ``decaying`` by each way to products, on both meshes of two ranks."""
    half, found = NUM_SAMPLES // 2, {}
    for shape in ((2, 1), (1, 2)):
        mesh = blockhf.mesh(*shape)
        rank = dist.get_rank()
        for products in (DoubleBackward(), Traced(), Formed(), blockhf.Factored(), blockhf.Auto()):
            model, objective_for, batch = make()
            optimizer = decaying(
                blocks.by_layer(model), mesh=mesh, products=products, solver=blockhf.Cholesky()
            )
            optimizer.direction(
                objective_for("mean"), tuple(tensor[rank * half : (rank + 1) * half] for tensor in batch)
            )
            found[f"{shape} {products}"] = -flat([param.grad for param in model.parameters()])
    return found


def frozen_and_given() -> dict[str, Any]:
    """A block is frozen, and thawed again; then curvature samples of their own are given."""
    mesh = blockhf.mesh(2, 1)
    rank = dist.get_rank()
    model, objective_for, batch = make()
    optimizer = paper(blocks.by_layer(model), mesh=mesh)
    half = NUM_SAMPLES // 2
    own = tuple(tensor[rank * half : (rank + 1) * half] for tensor in batch)
    follow(optimizer, model, objective_for("mean"), own, tuple(tensor[: 8 + 4 * rank] for tensor in own))
    return {"parameters": flat(list(model.parameters())), "state": optimizer.state_dict()["state"]}


def follow(optimizer: BlockHF, model: Any, objective: Any, batch: Any, curvature: Any) -> None:
    optimizer.step(objective, batch)
    for param in model[0].parameters():
        param.requires_grad_(False)
    optimizer.step(objective, batch)
    for param in model[0].parameters():
        param.requires_grad_(True)
    for _ in range(2):
        optimizer.step(objective, batch, curvature)


def states(folder: str) -> dict[str, Any]:
    """Steps, a saved state, further steps; and what is kept here and what is gathered."""
    import torch.distributed.checkpoint as dcp

    mesh = blockhf.mesh(2, 1)
    rank = dist.get_rank()
    model, objective_for, batch = make()
    half = NUM_SAMPLES // 2
    own = tuple(tensor[rank * half : (rank + 1) * half] for tensor in batch)
    optimizer = default(blocks.by_layer(model), mesh=mesh, warm_start=0.5)
    for _ in range(3):
        optimizer.step(objective_for("mean"), own)
    kept = [
        group["name"]
        for group in optimizer.param_groups
        if all("direction" in optimizer.state[param] for param in group["params"])
    ]
    factored = sorted(optimizer.policy_state["preconditioner"].blocks)
    state = optimizer.state_dict()
    saved = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "optimizer": state}
    dcp.save(saved, checkpoint_id=folder)
    for _ in range(2):
        optimizer.step(objective_for("mean"), own)
    again = default(blocks.by_layer(model), mesh=mesh, warm_start=0.5)
    again.load_state_dict(state)
    return {
        "folder": folder,
        "kept": kept,
        "factored": factored,
        "saved": saved,
        "parameters": flat(list(model.parameters())),
        "loaded": sorted(again.policy_state["preconditioner"].blocks),
        "continued": _continued(again, model, saved["model"], objective_for("mean"), own),
    }


def _continued(optimizer: BlockHF, model: nn.Module, start: Any, objective: Any, batch: Any) -> Tensor:
    model.load_state_dict(start)
    for _ in range(2):
        optimizer.step(objective, batch)
    return flat(list(model.parameters()))


def added() -> dict[int, Any]:
    """A block that comes later, with none, one or both of the others frozen; rank 0's parameters count."""
    mesh = blockhf.mesh(2, 1)
    rank = dist.get_rank()
    half = NUM_SAMPLES // 2
    found = {}
    for num_frozen in range(3):
        model, objective_for, batch = make()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(rank)
        own = tuple(tensor[rank * half : (rank + 1) * half] for tensor in batch)
        found[num_frozen] = grow(model, num_frozen, objective_for("mean"), own, mesh=mesh)
    return found


def grow(model: nn.Module, num_frozen: int, objective: Any, batch: Any, **options: Any) -> dict[str, Any]:
    *early, late = blocks.by_layer(model)
    optimizer = paper(early, **options)
    optimizer.step(objective, batch)
    frozen = [param for group in early[:num_frozen] for _, param in group["params"]]
    for param in frozen:
        param.requires_grad_(False)
    optimizer.add_param_group(late)
    for _ in range(2):
        optimizer.step(objective, batch)
    for param in frozen:
        param.requires_grad_(True)
    optimizer.step(objective, batch)
    owned = [group["name"] for group in optimizer.param_groups if optimizer.mesh.owns(group["name"])]
    return {
        "parameters": flat(list(model.parameters())),
        "state": optimizer.state_dict()["state"],
        "owned": owned,
    }


def poisson(net: nn.Module) -> Any:
    """The equation u'' = -π² sin πx with both ends at zero, to which a batch may give a weight."""

    def objective(batch: dict[str, Any]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = batch["interior"].detach().requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        inside = second + torch.pi**2 * torch.sin(torch.pi * x.detach())
        edge = net(batch["boundary"])
        return (inside, edge), inside.square().mean() + batch.get("weight", 1.0) * edge.square().mean()

    return objective


def kinds_of_samples(mesh: Any = None, first: int = 0, last: int = 6) -> dict[str, Any]:
    """Steps without noise on samples of two kinds, of which there are six times seven and six times two."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    inside, edge = torch.linspace(0, 1, 42, dtype=torch.float64), torch.tensor([0.0, 1.0] * 6).double()
    batch = {"interior": inside[7 * first : 7 * last, None], "boundary": edge[2 * first : 2 * last, None]}
    optimizer = BlockHF(blocks.by_layer(net), population=54, mesh=mesh)
    losses = [float(optimizer.step(poisson(net), batch)) for _ in range(6)]
    assert optimizer.report is not None
    notes = [block.products for block in optimizer.report.blocks]
    return {"losses": losses, "notes": notes, "parameters": flat(list(net.parameters()))}


def kinds() -> list[dict[str, Any]]:
    """The same on both meshes of two ranks; the second has twice as many samples of each kind."""
    own = [(0, 2), (2, 6)][dist.get_rank()]
    return [kinds_of_samples(blockhf.mesh(*shape), *own) for shape in ((2, 1), (1, 2))]


def kinds_out_of_proportion() -> str:
    rank = dist.get_rank()
    net = nn.Linear(1, 1).double()
    optimizer = BlockHF(blocks.single(net), mesh=blockhf.mesh(2, 1))
    batch = {"interior": torch.rand(8 + rank, 1).double(), "boundary": torch.rand(2, 1).double()}
    try:
        optimizer.step(poisson(net), batch)
    except ValueError as error:
        return str(error)
    return ""


def differences() -> dict[str, str]:
    """What is said where ranks do not do the same; all ranks must say it."""
    mesh = blockhf.mesh(2, 1)
    rank = dist.get_rank()
    found = {}

    def attempt(what: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except ValueError as error:
            found[what] = str(error)

    def groups(**options: Any) -> Any:
        return [{**group, **options} for group in blocks.by_layer(make()[0])]

    attempt("damping", lambda: paper(groups(), damping=0.1 + rank, mesh=mesh))
    attempt(
        "solver",
        lambda: BlockHF(groups(), mesh=mesh, **({"solver": blockhf.ConjugateGradient()} if rank else {})),
    )
    attempt("blocks", lambda: paper(groups()[: 3 - rank], mesh=mesh))
    attempt("shape", lambda: paper(blocks.by_layer(nn.Linear(3 + rank, 2)), mesh=mesh))
    kind = torch.float64 if rank else torch.float32
    attempt("dtype", lambda: paper(blocks.by_layer(nn.Linear(3, 2).to(kind)), mesh=mesh))

    model, objective_for, batch = make()
    optimizer = paper(blocks.by_layer(model), mesh=mesh)
    attempt("no batch", lambda: optimizer.step(lambda: objective_for("mean")(batch)))
    wide = (batch[0].float() if rank else batch[0], batch[1])
    attempt("samples", lambda: optimizer.step(objective_for("mean"), wide))
    given = {"curvature_batch": batch} if rank else {}
    attempt("curvature", lambda: optimizer.step(objective_for("mean"), batch, **given))
    model[0].weight.requires_grad_(rank == 0)
    attempt("frozen", lambda: optimizer.step(objective_for("mean"), batch))
    model[0].weight.requires_grad_(True)
    optimizer.param_groups[rank]["lr"] = 0.05
    attempt("an edit", lambda: optimizer.step(objective_for("mean"), batch))
    return found


def noisy() -> dict[str, Any]:
    """The default, whose numbers of samples go by what the steps cost."""
    mesh = blockhf.mesh(2, 1)
    rank = dist.get_rank()
    model, objective_for, (inputs, targets) = make()
    batch = (inputs.repeat(100, 1)[rank::2], targets.repeat(100)[rank::2])
    optimizer = BlockHF(blocks.by_layer(model), mesh=mesh, walk=NoWalk())
    sizes = []
    for _ in range(4):
        optimizer.step(objective_for("mean"), batch)
        assert optimizer.report is not None
        sizes.append(optimizer.report.work["gradient_batch"])
    return {
        "sizes": sizes,
        "parameters": flat(list(model.parameters())),
        "report": optimizer.report.details(),
    }


def walk(mesh: Any = None, rank: int = 0, num_ranks: int = 1, rotation: float = 1.0) -> dict[str, Any]:
    """The default's first steps, which are stretches of small ones, with every rank's part of a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    inputs = torch.randn(6000, 5).double()
    batch = [own.chunk(num_ranks)[rank] for own in (inputs, inputs[:, :1].sin())]

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, F.mse_loss(outputs, batch[1])

    optimizer = BlockHF(blocks.by_layer(model), mesh=mesh, walk=AdamWalk(rotation=rotation))
    reasons, losses = [], []
    for _ in range(3):
        optimizer.step(objective, batch)
        assert optimizer.report is not None
        reasons.append(optimizer.report.reason.split(" at ")[0])
        losses.append(optimizer.report.loss_after)
    return {"reasons": reasons, "losses": losses, "parameters": flat(list(model.parameters()))}


def walking() -> dict[float, dict[str, Any]]:
    """With and without rotations."""
    mesh = blockhf.mesh(2, 1)
    return {rotation: walk(mesh, dist.get_rank(), 2, rotation) for rotation in (0.0, 1.0)}


def killed(where: str, shape: tuple[int, int]) -> None:
    """Rank 1 is killed in its second step."""
    mesh = blockhf.mesh(*shape)
    rank = dist.get_rank()
    model, objective_for, batch = make()
    optimizer = paper(blocks.by_layer(model), mesh=mesh, products=DoubleBackward())
    assert isinstance(optimizer.mesh, Distributed)
    optimizer.step(objective_for("mean"), batch)

    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        if where == "gradient":
            optimizer.step(die, batch)
        elif where == "cg":
            optimizer._begin_solution = die  # type: ignore[method-assign]
        else:
            optimizer.mesh.exchange = die  # type: ignore[method-assign]
    optimizer.step(objective_for("mean"), batch)
