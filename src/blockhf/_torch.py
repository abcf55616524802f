"""Every name of torch that is private or depends on its version, each with what happens without it.

The rest of the library uses public names only. A function here that has nothing to fall back on raises
``MissingInTorchError``, and its callers take another way: double backward instead of tracing, products that
run uncompiled, a diagonal instead of Kronecker factors.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.utils import flop_counter

_aten = torch.ops.aten


class MissingInTorchError(Exception):
    """This version of torch lacks a name that has no substitute; the message says which."""


# Recording and compiling.


def record_operations(
    function: Callable[..., Any], arguments: Sequence[Any], *, without_data: bool = False
) -> fx.GraphModule:
    """The operations of a function as a graph. Without ``make_fx`` nothing is traced."""
    try:
        from torch.fx.experimental.proxy_tensor import make_fx
    except ImportError as error:
        raise MissingInTorchError("this version of torch has no make_fx") from error
    options: dict[str, Any] = {"tracing_mode": "fake", "_allow_non_fake_inputs": True} if without_data else {}
    recorded: fx.GraphModule = make_fx(function, **options)(*arguments)
    return recorded


SCHEMA = "_schema"


def schema_of(operation: Any) -> Any:
    """What an operation takes, gives and writes to; ``None`` for a function that is no operator of torch.

    Without it nobody knows what may be moved, and nothing is traced.
    """
    if packet_of(operation) is None:
        return None
    try:
        return getattr(operation, SCHEMA)
    except AttributeError as error:
        raise MissingInTorchError("this version of torch does not say what operations write to") from error


def packet_of(operation: Any) -> Any:
    """All overloads of an operation; ``None`` for a function that is no operator of torch."""
    return getattr(operation, "overloadpacket", None)


def inductor_compile(
    recorded: fx.GraphModule, inputs: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Any]:
    """The graph through the compiler behind ``torch.compile``. Without it products run uncompiled."""
    try:
        from torch._inductor import compile  # takes a second to import
    except ImportError as error:
        raise MissingInTorchError("this version of torch has no torch._inductor.compile") from error
    compiled: Callable[..., Any] = compile(recorded, list(inputs), options)
    return compiled


# Counting.


class _CountedByTorch:
    """Counts as ``FlopCounterMode`` does, for classes that expect to see each operation themselves."""

    flops: int

    def __enter__(self) -> Any:
        self._counter = flop_counter.FlopCounterMode(display=False)
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._counter.__exit__(*error)  # type: ignore[no-untyped-call]
        self.flops += int(self._counter.get_total_flops())


def dispatch_mode() -> Any:
    """The base of classes that see each operation inside of their ``with``.

    Without it torch's own counter counts, which leaves out factorizations and products with a vector.
    """
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        return _CountedByTorch
    return TorchDispatchMode


DispatchMode: Any = dispatch_mode()

EIGENDECOMPOSITION: Any = getattr(_aten, "_linalg_eigh", None)
"""What ``torch.linalg.eigh`` calls. Without it eigendecompositions are not counted."""

_FLOPS: dict[Any, Callable[..., int]] = {
    _aten.mm: lambda left, right, **_: 2 * left.numel() * right.shape[-1],
    _aten.bmm: lambda left, right, **_: 2 * left.numel() * right.shape[-1],
    _aten.addmm: lambda _, left, right, **__: 2 * left.numel() * right.shape[-1],
    _aten.baddbmm: lambda _, left, right, **__: 2 * left.numel() * right.shape[-1],
    _aten.convolution: lambda _, weight, *__, out_val, **___: 2 * out_val.numel() * weight[0].numel(),
}


def flop_formula(packet: Any) -> Callable[..., int] | None:
    """Torch's count of an operation. Without its table attention and gradients of it are not counted."""
    table: dict[Any, Callable[..., int]] = getattr(flop_counter, "flop_registry", _FLOPS)
    return table.get(packet)


def writes_memory(operation: Any) -> bool:
    """Whether an operation is no view. Without the attribute all are taken to be views."""
    return not getattr(operation, "is_view", True)


# Autograd's graph. Where a name is missing, the uses of parameters are not found: no Kronecker factors.

SAVED = "_saved_"
PARAMETER = "torch::autograd::AccumulateGrad"
EMBEDDING, CONVOLUTION = "EmbeddingBackward0", "ConvolutionBackward0"
MATRIX_PRODUCT, ADDED_MATRIX_PRODUCT = "MmBackward0", "AddmmBackward0"
LAYER_NORM, MULTIPLICATION = "NativeLayerNormBackward0", "MulBackward0"
BATCH_NORMS = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")
TRANSPOSES, PERMUTATION = ("TBackward0", "TransposeBackward0"), "PermuteBackward0"
CASTS = ("ToCopyBackward0",)
SPREADING_VIEWS = ("UnsqueezeBackward0", "ExpandBackward0", "ViewBackward0")


def saves(node: Any, *names: str) -> bool:
    """Whether a node of autograd's graph keeps all of these arguments of its operation."""
    return all(hasattr(type(node), SAVED + name) for name in names)


def saved(node: Any, name: str) -> Any:
    """An argument that a node of autograd's graph keeps for its backward pass."""
    return getattr(node, SAVED + name)


def differentiates_once(node: Any) -> bool:
    """Whether a node of a graph is a function of the user's whose derivative is a constant to autograd.

    Without the private name it is not found out, and its second derivative is zero in silence.
    """
    try:
        return type(node)._forward_cls.backward.__code__ is _ONCE
    except AttributeError:
        return False


_ONCE = once_differentiable(lambda ctx: None).__code__


def parameter_of(node: Any) -> Tensor | None:
    """The tensor whose gradient a node accumulates, if it is one of those."""
    is_leaf = node is not None and node.name() == PARAMETER and hasattr(type(node), "variable")
    return node.variable if is_leaf else None


# Modules and wrappers.


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module itself, to be exchanged in place; ``nn.Module`` cannot be without them."""
    return module._buffers


def forget_hooks(*functions: Callable[..., Any]) -> None:
    """Take hooks of all modules away whose handles an interrupt kept from being known.

    Without the private tables they stay, and do nothing.
    """
    for name in ("_global_forward_pre_hooks", "_global_forward_hooks"):
        table: dict[int, Any] = getattr(torch.nn.modules.module, name, {})
        for key in [key for key, hook in table.items() if hook in functions]:
            del table[key]


def is_functorch_wrapper(tensor: Tensor) -> bool:
    """Whether ``vmap`` and its like made the tensor, which ends with them.

    Without torch's own word, a tensor that has no storage is taken for one, a sparse tensor too.
    """
    try:
        return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
    except AttributeError:
        pass
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return True
    return False


def copy_each(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first. Without the joint call this is done one by one."""
    try:
        torch._foreach_copy_([into for into, _ in pairs], [own for _, own in pairs])
    except AttributeError:
        for into, own in pairs:
            into.copy_(own)


# Devices and processes.


def accelerator() -> torch.device | None:
    """The machine's accelerator, if it has one. Without ``torch.accelerator`` only CUDA is seen."""
    try:
        module = torch.accelerator
    except AttributeError:
        return torch.device("cuda") if torch.cuda.is_available() else None
    return module.current_accelerator() if module.is_available() else None


def use_device(index: int) -> None:
    """Make one of the accelerators the current one. Without ``torch.accelerator``, one of CUDA's."""
    try:
        torch.accelerator.set_device_index(index)
    except AttributeError:
        torch.cuda.set_device(index)


def reset_peak_memory(device: torch.device) -> None:
    """Start to count a device's peak memory anew. Without it the peak is that since the process began."""
    for module in _memory_counters(device):
        with contextlib.suppress(AttributeError):
            module.reset_peak_memory_stats(device)
            return


def peak_memory(device: torch.device) -> int | None:
    """A device's peak memory in bytes. Without it the report has none."""
    for module in _memory_counters(device):
        with contextlib.suppress(AttributeError):
            return int(module.max_memory_allocated(device))
    return None


def _memory_counters(device: torch.device) -> Iterator[Any]:
    """What counts a device's memory: ``torch.accelerator`` from 2.9 on, the device's own module before."""
    with contextlib.suppress(AttributeError):
        yield torch.accelerator
    with contextlib.suppress(AttributeError, RuntimeError):
        yield torch.get_device_module(device)


def random_state(device: torch.device) -> Tensor:
    """The state of a device's random numbers. Some devices have but one, and take no number."""
    module = torch.get_device_module(device)
    try:
        state: Tensor = module.get_rng_state(device)
    except TypeError:
        state = module.get_rng_state()
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Put the state of a device's random numbers back."""
    module = torch.get_device_module(device)
    try:
        module.set_rng_state(state, device)
    except TypeError:
        module.set_rng_state(state)


def is_distributed_tensor(tensor: Tensor) -> bool:
    """Whether it is a ``DTensor``. Without that class there is none."""
    try:
        from torch.distributed.tensor import DTensor
    except ImportError:
        return False
    return isinstance(tensor, DTensor)


def set_group_timeout(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    """How long a group waits for its ranks. Without it, groups of a mesh wait for torch's 30 minutes."""
    with contextlib.suppress(AttributeError):
        dist.distributed_c10d._set_pg_timeout(timeout, group)
