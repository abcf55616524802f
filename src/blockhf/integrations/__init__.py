"""Adapters to trainers, each a small module; none imports its framework (docs/howto/trainers.md).

``lightning``, ``accelerate``, ``transformers``, ``ignite`` and ``tensorboard`` have the names of what they
adapt to. What they share is here.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from blockhf.meshes import mesh
from blockhf.optimizer import BlockHF
from blockhf.report import StepReport


def data_mesh() -> DeviceMesh | None:
    """The processes that a trainer has started, as ranks that share the samples; ``None`` for one process."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return mesh(data=dist.get_world_size())


def require_mesh(optimizer: BlockHF) -> None:
    """Raise where a trainer has started several processes and the optimizer knows of one."""
    if optimizer.mesh.is_alone and data_mesh() is not None:
        raise ValueError(
            f"There are {dist.get_world_size()} processes, but the optimizer has mesh=None, so each would "
            "train a model of its own. Pass mesh=data_mesh() to BlockHF, once the trainer has started them."
        )


def scalars(report: StepReport | None, prefix: str = "") -> dict[str, float]:
    """The numbers of a report that are worth a curve, by name; those that a step does not have are left out.

    >>> scalars(StepReport(1, True, "fixed step", 2.0), "train/")
    {'train/loss': 2.0, 'train/accepted': 1.0, 'train/products': 0.0, 'train/seconds': 0.0}
    """
    if report is None:
        return {}
    found = {
        "loss": report.loss,
        "loss_after": report.loss_after,
        "accepted": float(report.accepted),
        "ratio": report.ratio,
        "signal": report.signal,
        "products": float(report.num_products),
        "seconds": float(report.seconds),
        **{f"damping/{block.name}": block.damping for block in report.blocks},
    }
    return {prefix + name: value for name, value in found.items() if value is not None}


def refuse(framework: str, settings: dict[str, tuple[Any, bool, str]]) -> None:
    """Raise where a trainer has a setting that means nothing here.

    Args:
        framework: Whose settings.
        settings: By name the value, whether it is one to refuse, and the remedy.
    """
    for name, (value, is_wrong, remedy) in settings.items():
        if is_wrong:
            raise ValueError(f"{framework} has {name}={value!r}, which has no effect on BlockHF. {remedy}")


ACCUMULATION = (
    "Load that many times as large a batch instead, and pass micro_batch_size= to BlockHF: it holds so many "
    "samples in memory at a time, and the result is that of the whole batch."
)
CLIPPING = "The search takes its place: docs/howto/weight_decay.md. Leave it out."
SCALER = "Losses need no scaler here, but float16 does. Use bfloat16."
