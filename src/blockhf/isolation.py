"""What a step does to a model is undone or kept as a whole: random numbers, buffers, kernels, flags."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from blockhf._torch import forget_hooks, is_functorch_wrapper, own_buffers, random_state, set_random_state
from blockhf.blocks import Block


class RandomState:
    """The state of the random numbers of the CPU and of some devices, now or put back."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self._cpu = torch.get_rng_state()
        self._others = {d: random_state(d) for d in devices if d.type not in ("cpu", "meta")}

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device, state in self._others.items():
            set_random_state(device, state)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw from this state on; afterwards it is as if nothing had been drawn."""
        outside = RandomState(self.devices)
        self.restore()
        try:
            yield
        finally:
            outside.restore()


class _Open(threading.local):
    """What this thread has isolated at the moment."""

    def __init__(self) -> None:
        self.buffers: list[IsolatedBuffers] = []


_open = _Open()


class IsolatedBuffers(contextlib.AbstractContextManager["IsolatedBuffers"]):
    """Lets modules write into copies of their buffers; ``commit`` makes the copies' values real.

    So the running statistics of BatchNorm, and whatever else a forward pass keeps in a buffer, move
    only where the caller says so. Modules are found as this thread calls them, wherever they come from.

    Args:
        modules: Modules whose buffers may be written without a call, e.g. in a method; they are isolated too.
    """

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        self._given = modules
        self._swapped: dict[tuple[nn.Module, str], tuple[Tensor, Tensor]] = {}
        self.modules: dict[nn.Module, None] = {}  # those that were called, in order
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> IsolatedBuffers:
        self._swapped.clear()
        self.modules.clear()
        self._thread = threading.get_ident()
        _open.buffers.append(self)
        self._hook = register_module_forward_pre_hook(self._called)
        for module in self._given:
            self._isolate(module)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Put the buffers back; it may be done again where it was interrupted."""
        if self._hook is not None:
            self._hook.remove()
        forget_hooks(self._called)
        for (module, name), (original, stand_in) in self._swapped.items():
            # A module may have put a new tensor in place instead of writing into the old one.
            now = own_buffers(module).get(name)
            if now is not original:
                self._swapped[module, name] = (original, stand_in if now is None else now)
                own_buffers(module)[name] = original
        if self in _open.buffers:
            _open.buffers.remove(self)

    def _called(self, module: nn.Module, _: Any) -> None:
        if threading.get_ident() == self._thread:
            self.modules[module] = None
            self._isolate(module)

    def _isolate(self, module: nn.Module) -> None:
        for name, buffer in own_buffers(module).items():
            if buffer is not None and (module, name) not in self._swapped and not _transient(buffer):
                stand_in = buffer.clone()
                self._swapped[module, name] = (buffer, stand_in)
                own_buffers(module)[name] = stand_in

    @property
    def originals(self) -> list[Tensor]:
        """The buffers that ``commit`` writes to."""
        return [original for original, _ in self._swapped.values()]

    @torch.no_grad()
    def commit(self, names: Collection[str] | None = None) -> None:
        """Make the copies' values real: of all buffers, or of those of some names."""
        for (module, name), (original, stand_in) in self._swapped.items():
            if names is not None and name not in names:
                continue
            if original.shape == stand_in.shape:
                original.copy_(stand_in)
            else:  # the module put in a tensor of another size
                own_buffers(module)[name] = stand_in.detach()


class Restored(contextlib.AbstractContextManager["Restored"]):
    """Puts parameters, buffers, flags and random numbers back where an exception ends the context.

    Args:
        blocks: The blocks of the parameters.
        also: Called after that, to put other things back.
    """

    def __init__(self, blocks: Sequence[Block], also: Callable[[], None]) -> None:
        self.blocks, self.put_back = blocks, also
        self.origin = [block.values() for block in blocks]
        self._params = [param for block in blocks for param in block.params]
        self._random = RandomState(sorted({param.device for param in self._params}, key=str))
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._num_open = len(_open.buffers)

    def protect(self, buffers: Sequence[Tensor]) -> None:
        """Keep copies of buffers that are about to be written."""
        self._buffers += [(buffer, buffer.clone()) for buffer in buffers]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        for buffers in reversed(_open.buffers[self._num_open :]):
            buffers.close()
        for param in self._params:
            param.requires_grad_(True)
        for block, value in zip(self.blocks, self.origin, strict=True):
            block.visit_(value)
        for buffer, value in self._buffers:
            buffer.data.copy_(value)
        self._random.restore()
        self.put_back()


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Choose kernels that autograd can differentiate twice, for the length of the context.

    Attention is computed by its plain formula, and recurrent layers without cuDNN, for as long as they run.
    """
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), _recurrent_layers_without_cudnn():
        yield


@contextlib.contextmanager
def _recurrent_layers_without_cudnn() -> Iterator[None]:
    """Convolutions of the same model keep cuDNN, which can differentiate those twice."""
    thread, switched = threading.get_ident(), contextlib.ExitStack()

    def begin(module: nn.Module, _: Any) -> None:
        if isinstance(module, nn.RNNBase) and threading.get_ident() == thread:
            switched.enter_context(torch.backends.cudnn.flags(enabled=False))

    def end(module: nn.Module, *_: Any) -> None:
        if isinstance(module, nn.RNNBase) and threading.get_ident() == thread:
            switched.close()

    hooks = contextlib.ExitStack()
    try:
        hooks.enter_context(register_module_forward_pre_hook(begin))
        hooks.enter_context(register_module_forward_hook(end, always_call=True))
        yield
    finally:
        hooks.close()
        forget_hooks(begin, end)
        switched.close()


@contextlib.contextmanager
def frozen(params: Sequence[Tensor]) -> Iterator[None]:
    """No graph to the parameters, while derivatives inside the objective still work."""
    try:
        for param in params:
            param.requires_grad_(False)
        yield
    finally:
        for param in params:
            param.requires_grad_(True)


def _transient(tensor: Tensor) -> bool:
    """Whether it is a wrapper that ``vmap`` and its like made and that ends with them."""
    return is_functorch_wrapper(tensor)
