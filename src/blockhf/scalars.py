"""Numbers that the host reads from a device, together: each look waits until the device is done."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def read(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The numbers in each tensor, by one wait for each device that they are on.

    Numbers come as wide as the widest tensor, and whole ones are exact up to 2²⁴.

    >>> read([torch.tensor(2.0), torch.tensor([True, False])])
    [[2.0], [1.0, 0.0]]
    """
    found: list[list[float]] = [[] for _ in tensors]
    for device in {tensor.device for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        flat = [_wide(tensors[place].detach()).reshape(-1) for place in places]
        numbers = iter(torch.cat(flat).tolist())
        for place, own in zip(places, flat, strict=True):
            found[place] = [next(numbers) for _ in range(len(own))]
    return found


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Copies of small tensors on the CPU, in double precision, by one wait."""
    pairs = zip(tensors, read(tensors), strict=True)
    return [torch.tensor(own, dtype=torch.float64, device="cpu").view(like.shape) for like, own in pairs]


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all numbers in all tensors are finite, by one wait."""
    return all(fine for (fine,) in read([tensor.isfinite().all() for tensor in tensors]))


def gathered(*numbers: Tensor) -> Tensor:
    """Single numbers of any kind on one device in one tensor, of single precision at the least."""
    wide = functools.reduce(torch.promote_types, (number.dtype for number in numbers), torch.float32)
    return torch.cat([number.reshape(1).to(wide) for number in numbers])


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
