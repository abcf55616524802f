"""Recorded graphs through torch's compiler, or as they are where there is none."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from blockhf._torch import inductor_compile
from blockhf.compile.repeated_regions import outline
from blockhf.fx_graphs import reuse_memory

_LONG = 1500
"""Operations from which on only what repeats is compiled."""


class Compiled:
    """A recorded function that is compiled at its first call, or the function as it is if that fails.

    Attributes:
        seconds: What the first call took.
    """

    def __init__(self, recorded: fx.GraphModule) -> None:
        self.recorded = recorded
        self.function = _fused(recorded)
        self.seconds = 0.0
        self._ready = False

    def __call__(self, *inputs: Tensor) -> Any:
        return self.function(*inputs) if self._ready else self._first(*inputs)

    def _first(self, *inputs: Tensor) -> Any:
        start = time.perf_counter()
        try:
            result = self.function(*inputs)
        except Exception as error:  # a missing compiler, or whatever else a compiler may say
            warnings.warn(
                f"Compiling failed ({type(error).__name__}: {str(error).strip().splitlines()[0]}), so "
                "the products run without it. It needs a C++ compiler, e.g. gcc.",
                stacklevel=2,
            )
            self.function = self.recorded
            result = self.function(*inputs)
        self.seconds, self._ready = time.perf_counter() - start, True
        for module in self.function.modules():
            if isinstance(module, Fused):
                module.is_checked = True
        return result


def _fused(recorded: fx.GraphModule) -> nn.Module:
    if len(recorded.graph.nodes) <= _LONG:
        return Fused(recorded)
    outlined = outline(recorded, Fused)
    reuse_memory(outlined.graph)
    outlined.recompile()
    return outlined


class Fused(nn.Module):
    """A recorded graph as the compiler behind ``torch.compile`` makes it, for inputs like the first ones.

    Dynamo, which comes before it there, would only record what is recorded already, and would ask at each
    call whether the inputs are still alike. That is what a trace holds for, so it is asked until the whole
    product has run once, and then no more.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self._recorded = (module,)  # not as a submodule
        self._compiled: Callable[..., Any] | None = None
        self._layouts: list[Any] = []
        self.is_checked = False

    def forward(self, *inputs: Tensor) -> Any:
        if not self.is_checked:
            layouts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in inputs]
            if self._compiled is None:
                self._compiled = inductor_compile(self._recorded[0], inputs, _options(inputs))
                self._layouts = layouts
            if layouts != self._layouts:
                raise RuntimeError(
                    "a piece of the graph got inputs of another layout than it was compiled for"
                )
        assert self._compiled is not None
        return self._compiled(*inputs)


def _options(inputs: Sequence[Tensor]) -> dict[str, Any]:
    """What the compiler should do otherwise than by default.

    It need not ask for sizes and strides at each call either. And on a CPU it turns a matrix product that is
    added to something into one that is accumulated in a copy of it, although the sum would be fused with
    what comes next.
    """
    on_cpu = all(tensor.device.type == "cpu" for tensor in inputs)
    return {"size_asserts": False, **({"pattern_matcher": False} if on_cpu else {})}
