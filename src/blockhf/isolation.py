"""What a step does to a model is undone or kept as a whole: random numbers, buffers, kernels, flags."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook

from blockhf._torch import is_functorch_wrapper, own_buffers


class RandomState:
    """The state of the random numbers of the CPU and of some devices, now or put back."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self._modules = [(torch.get_device_module(d), d) for d in devices if d.type not in ("cpu", "meta")]
        self._cpu = torch.get_rng_state()
        self._others = [module.get_rng_state(device) for module, device in self._modules]

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for (module, device), state in zip(self._modules, self._others, strict=True):
            module.set_rng_state(state, device)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw from this state on; afterwards it is as if nothing had been drawn."""
        outside = RandomState(self.devices)
        self.restore()
        try:
            yield
        finally:
            outside.restore()


class IsolatedBuffers(contextlib.AbstractContextManager["IsolatedBuffers"]):
    """Lets modules write into copies of their buffers; ``commit`` makes the copies' values real.

    So the running statistics of BatchNorm, and whatever else a forward pass keeps in a buffer, move
    only where the caller says so. Modules are found as they are called, wherever they come from.
    """

    def __init__(self) -> None:
        self._swapped: dict[tuple[nn.Module, str], tuple[Tensor, Tensor]] = {}
        self.modules: dict[nn.Module, None] = {}  # those that were called, in order

    def __enter__(self) -> IsolatedBuffers:
        self._swapped.clear()
        self.modules.clear()
        self._hook = register_module_forward_pre_hook(self._isolate)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        for (module, name), (original, stand_in) in self._swapped.items():
            # A module may have put a new tensor in place instead of writing into the old one.
            now = own_buffers(module).get(name)
            self._swapped[module, name] = (original, stand_in if now is None else now)
            own_buffers(module)[name] = original

    def _isolate(self, module: nn.Module, _: Any) -> None:
        self.modules[module] = None
        for name, buffer in own_buffers(module).items():
            if buffer is not None and (module, name) not in self._swapped and not _transient(buffer):
                stand_in = buffer.clone()
                self._swapped[module, name] = (buffer, stand_in)
                own_buffers(module)[name] = stand_in

    @torch.no_grad()
    def commit(self) -> None:
        for (module, name), (original, stand_in) in self._swapped.items():
            if original.shape == stand_in.shape:
                original.copy_(stand_in)
            else:  # the module put in a tensor of another size
                own_buffers(module)[name] = stand_in.detach()


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Choose kernels that autograd can differentiate twice, for the length of the context."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        yield


@contextlib.contextmanager
def frozen(params: Sequence[Tensor]) -> Iterator[None]:
    """No graph to the parameters, while derivatives inside the objective still work."""
    for param in params:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in params:
            param.requires_grad_(True)


def _transient(tensor: Tensor) -> bool:
    """Whether it is a wrapper that ``vmap`` and its like made and that ends with them."""
    return is_functorch_wrapper(tensor)
