"""The device that the tests here run on: a pretended one, or that of ``--device``."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pretend
import pytest
import torch
from torch import Tensor, nn


class Pretended:
    """The device in pretend.py."""

    name = pretend.NAME
    is_exact = True
    dtype = torch.float64

    def move(self, module: nn.Module) -> None:
        pretend.move(module)

    def tensor(self, tensor: Tensor) -> Tensor:
        return pretend.moved(tensor)

    def home(self, tensor: Tensor) -> Tensor:
        """The tensor's values on the CPU."""
        return tensor.detach().inner if isinstance(tensor, pretend.PretendTensor) else tensor.detach()

    @contextlib.contextmanager
    def counting(self) -> Iterator[list[str]]:
        """Put what the host waits for into a list, one line for each wait."""
        pretend.waits.clear()
        found: list[str] = []
        yield found
        found += pretend.waits.elements()


class Real:
    """A device that is there; its kernels round in ways of their own."""

    is_exact = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = torch.float32 if name.startswith("mps") else torch.float64

    def move(self, module: nn.Module) -> None:
        module.to(self.name)

    def tensor(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.name)

    def home(self, tensor: Tensor) -> Tensor:
        return tensor.detach().cpu()

    @contextlib.contextmanager
    def counting(self) -> Iterator[list[str]]:
        if not self.name.startswith("cuda"):
            pytest.skip("only CUDA tells when it is waited for")
        found: list[str] = []
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found += [f"{each.filename}:{each.lineno}" for each in told if "synchroniz" in str(each.message)]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    name = request.config.getoption("--device")
    if name:
        yield Real(name)
    elif not pretend.IS_POSSIBLE:
        pytest.skip("this version of torch does not let a device be written in Python")
    else:
        with pretend.present():
            yield Pretended()
