"""What a step may change, taken down and compared to the last bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import blockhf


def differs(one: Any, other: Any) -> bool:
    """Whether two nestings of tensors and numbers differ in any bit; no number equals no number."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return True
        return not bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() != other.keys() or any(differs(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) != len(other) or any(map(differs, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return False
    return bool(type(one) is not type(other) or one != other)


@dataclass(frozen=True)
class Snapshot:
    """All that a step may not change for good unless it is made."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    flags: dict[str, Any]
    grads: dict[str, Any]
    state: dict[str, Any]
    random: Tensor
    report: int
    surroundings: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, optimizer: blockhf.BlockHF) -> Snapshot:
        named = dict(model.named_parameters())
        return cls(
            parameters={name: own.detach().clone() for name, own in named.items()},
            buffers={name: own.detach().clone() for name, own in model.named_buffers()},
            flags={
                **{name: (own.requires_grad, own.is_leaf) for name, own in named.items()},
                **{f"{name}.training": own.training for name, own in model.named_modules()},
                "momenta": [
                    own.momentum for own in model.modules() if isinstance(own, nn.modules.batchnorm._NormBase)
                ],
            },
            grads={name: None if own.grad is None else own.grad.clone() for name, own in named.items()},
            state=copy.deepcopy(optimizer.state_dict()),
            random=torch.get_rng_state(),
            report=id(optimizer.report),
            surroundings=surroundings(),
        )

    def changed(self, later: Snapshot, *besides: str) -> list[str]:
        """What is no longer as it was."""
        names = [name for name in vars(self) if name not in besides]
        return [name for name in names if differs(getattr(self, name), getattr(later, name))]


def surroundings() -> dict[str, Any]:
    """What torch has for the whole process."""
    hooks = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    return {
        "hooks": [len(own) for own in hooks],
        "gradients": torch.is_grad_enabled(),
        "kernels": [
            torch._C._get_flash_sdp_enabled(),
            torch._C._get_math_sdp_enabled(),
            torch._C._get_mem_efficient_sdp_enabled(),
        ],
        "inference": torch.is_inference_mode_enabled(),
        "dtype": str(torch.get_default_dtype()),
    }


def holds_graph(value: Any) -> bool:
    """Whether a tensor with a graph is among nested values."""
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    if isinstance(value, Mapping):
        return any(map(holds_graph, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_graph, value))
