"""Lends parameters and buffers to the modules that an objective calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from blockhf.fx_graphs import TracingError


class Host(nn.Module):
    """Holds modules, so that ``functional_call`` can lend them other parameters and buffers."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        for index, module in enumerate(modules):
            self.add_module(str(index), module)

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()

    def named(self) -> Mapping[str, Tensor]:
        """The buffers that the modules own themselves."""
        return {
            f"{index}.{name}": buffer
            for index, module in self.named_children()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        }

    def owners(self, params: Sequence[Tensor]) -> dict[str, int]:
        """Under which names the modules own which of the parameters."""
        position = {param: index for index, param in enumerate(params)}
        names = {
            f"{index}.{name}": position[param]
            for index, module in self.named_children()
            for name, param in module.named_parameters(recurse=False, remove_duplicate=False)
            if param in position
        }
        if missing := len(set(position.values()) - set(names.values())):
            raise TracingError(f"{missing} parameters are owned by no module that the objective calls")
        return names
