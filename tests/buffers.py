"""What the buffers of a module are, should be, and would be after ordinary passes."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_buffers(module: nn.Module, expected: dict[str, Tensor]) -> None:
    now = dict(module.named_buffers())
    assert list(now) == list(expected)
    assert all(torch.equal(now[name], expected[name]) for name in expected)


def after(module: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """The buffers that ordinary passes over ``inputs`` lead to."""
    twin = copy.deepcopy(module)
    for x in inputs:
        twin(x)
    return buffers(twin)
