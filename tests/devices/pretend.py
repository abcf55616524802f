"""A device that is not there: tensors that say they are on it, live in memory, and count each wait for them.

A tensor of the device holds one of the CPU. The device does with an operation what the CPU does, and

- refuses to let its tensors meet the CPU's, single numbers aside, as CUDA does;
- counts the operations after which the host has to wait for the device: numbers that are read, copies to the
  host, results whose size depends on values, and factorizations that look whether they failed.

What it does not show: speed, streams, memory, kernels that differ from the CPU's.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import blockhf

NAME = "pretend"
_LIBRARY = str(Path(blockhf.__file__).parent)

IS_POSSIBLE = "_setup_privateuseone_for_python_backend" in vars(backend_registration)
"""Whether this version of torch lets a device be written in Python."""

# Results of which the host needs to know the values, or the size of which depends on them.
WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "linalg_eigh",
    "_linalg_eigh",
    "_linalg_solve_ex",
    "linalg_cholesky",
    "linalg_inv_ex",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_dim",
}

waits: collections.Counter[str] = collections.Counter()
"""How often the host waited, by what for and where in the library."""


class _Module(backend_registration._DummyBackendModule if IS_POSSIBLE else object):  # type: ignore[misc]
    """What ``torch.get_device_module`` finds: the device's random numbers are the CPU's."""

    _seeds = torch.Generator()

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def synchronize(self, device: Any = None) -> None:
        waits["synchronize"] += 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


if IS_POSSIBLE:
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())


class PretendTensor(Tensor):
    """A tensor on the device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendTensor:
        made: PretendTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PretendTensor({self.inner})"

    def tolist(self) -> Any:
        _wait("tolist")
        return self.inner.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("numpy() of a tensor that is on a device")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, dict(kwargs or {}))


class _Factories(TorchDispatchMode):
    """Operations that make tensors of the device from none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_here(kwargs.get("device")) or any(isinstance(x, PretendTensor) for x in tree_leaves(args)):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def present() -> Iterator[None]:
    """There is such a device."""
    real = torch.Generator

    class Generator(real):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            return real.__new__(real, "cpu" if _is_here(device) else device)

    torch.Generator = Generator  # type: ignore[misc]
    try:
        with _Factories():
            yield
    finally:
        torch.Generator = real  # type: ignore[misc]


def moved(tensor: Tensor) -> PretendTensor:
    """A copy on the device."""
    return PretendTensor(tensor.detach().clone())


def move(module: nn.Module) -> None:
    """Put a module's parameters and buffers on the device."""
    for inner in module.modules():
        for name, param in inner._parameters.items():
            if param is not None:
                inner._parameters[name] = nn.Parameter(moved(param), param.requires_grad)
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                inner._buffers[name] = moved(buffer)


def _asks(filename: str) -> bool:
    """Whether a file is one of the library's that asks for numbers, and not the one that reads them."""
    return filename.startswith(_LIBRARY) and not filename.endswith("scalars.py")


def _wait(what: str) -> None:
    frame = sys._getframe(1)
    while frame.f_back is not None and not _asks(frame.f_code.co_filename):
        frame = frame.f_back
    place = Path(frame.f_code.co_filename)
    waits[f"{what}: {place.parent.name}/{place.name}:{frame.f_lineno} in {frame.f_code.co_name}"] += 1


def _is_here(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, PretendTensor) else value


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.removeprefix("aten::")
    leaves = tree_leaves((args, kwargs))
    here = [leaf for leaf in leaves if isinstance(leaf, PretendTensor)]
    target = kwargs.get("device")
    leaves_device = (target is not None and not _is_here(target)) or (
        name == "copy_" and not isinstance(args[0], PretendTensor)
    )
    if name in WAITING or (here and leaves_device):
        _wait("copy to the host" if leaves_device else name)
    strangers = [
        leaf
        for leaf in leaves
        if isinstance(leaf, Tensor) and not isinstance(leaf, PretendTensor) and leaf.dim() > 0
    ]
    if here and strangers and name not in ("copy_", "_to_copy"):
        raise RuntimeError(
            f"{name}: a tensor of the CPU, {tuple(strangers[0].shape)}, meets one of the device"
        )
    if target is not None:
        kwargs["device"] = torch.device("cpu")
    result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if name == "copy_":
        return args[0]
    if leaves_device:
        return result
    own = {id(leaf.inner): leaf for leaf in here}  # in-place operations return what they were given
    return tree_map(lambda leaf: _outer(leaf, own), result)


def _outer(leaf: Any, own: dict[int, PretendTensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return own[id(leaf)] if id(leaf) in own else PretendTensor(leaf)
