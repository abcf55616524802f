"""Accelerate: the processes of an ``Accelerator`` as the ranks that share the samples.

The prepared optimizer hands nothing but a closure on, so the batch goes with it::

    accelerator = Accelerator()
    optimizer = BlockHF(blocks.by_layer(model), mesh=mesh_of(accelerator))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    network = accelerator.unwrap_model(model)      # not the DistributedDataParallel around it

    def objective(batch): ...                      # calls the network

    for batch in loader:
        optimizer.step(Closure(objective, batch))
        print(optimizer.optimizer.report)
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from blockhf.integrations import ACCUMULATION, SCALER, refuse
from blockhf.meshes import mesh


def mesh_of(accelerator: Any) -> DeviceMesh | None:
    """The accelerator's processes, which share the samples; ``None`` for one process.

    Raises:
        ValueError: The accelerator accumulates gradients or scales losses, neither of which happens here.
    """
    steps, precision = accelerator.gradient_accumulation_steps, accelerator.mixed_precision
    refuse(
        "The Accelerator",
        {
            "gradient_accumulation_steps": (steps, steps != 1, ACCUMULATION),
            "mixed_precision": (precision, precision == "fp16", SCALER),
        },
    )
    if accelerator.num_processes == 1:
        return None
    return mesh(data=accelerator.num_processes, device=accelerator.device.type)
