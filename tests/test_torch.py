"""Without any one of torch's private names the library works, and none is used outside of ``_torch``."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
import torch.distributed as dist
import torch.fx.experimental.proxy_tensor
import torch.nn.functional as F
import torch.utils._python_dispatch
from torch import Tensor, nn
from torch.utils import flop_counter

import blockhf
from blockhf import Auto, BlockHF, Kronecker, Traced, _torch, blocks
from blockhf.curvature import auto
from blockhf.flops import flops_of, flops_of_graph
from blockhf.fx_graphs import TracingError
from blockhf.preconditioners.parameter_uses import find_uses

aten = torch.ops.aten
SOURCE = Path(blockhf.__file__).parent
PRIVATE = re.compile(
    r"torch\._(?!_)|_inductor|_python_dispatch|distributed_c10d|fx\.experimental"
    r"|_saved_|\._schema|_overloadpacket|\bmodule\._|aten\._"
    r"|flop_registry|\w+Backward0|AccumulateGrad|torch\.accelerator"
)


def test_private_names_of_torch_are_in_one_place() -> None:
    files = sorted(set(SOURCE.rglob("*.py")) - {SOURCE / "_torch.py"})
    assert len(files) > 20
    found = [
        f"{file.relative_to(SOURCE)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if PRIVATE.search(line)
    ]
    assert not found, "Put these into _torch.py, each with its fallback."


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(32, 3, generator=generator, dtype=torch.float64),
        torch.randn(32, 2, generator=generator, dtype=torch.float64),
    )


def step(optimizer: BlockHF, model: nn.Module) -> Any:
    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, F.mse_loss(outputs, batch[1])

    optimizer.step(objective, make_batch())
    assert optimizer.report is not None
    assert optimizer.report.accepted
    return optimizer.report


def take_away_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.fx.experimental.proxy_tensor, "make_fx")


def take_away_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "SCHEMA", "_gone")


@pytest.mark.parametrize("take_away", [take_away_recording, take_away_schemas])
def test_products_are_by_double_backward(take_away: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_NODE", 0)
    monkeypatch.setattr(auto.Auto, "_worth_forming", staticmethod(lambda *_: []))
    model = make_model()
    expected = step(BlockHF.martens(blocks.single(model), products=Auto()), model)
    assert "traced" in expected.blocks[0].products
    take_away(monkeypatch)
    model = make_model()
    with pytest.warns(UserWarning, match="cannot be traced: .*this version of torch"):
        report = step(BlockHF.martens(blocks.single(model), products=Auto()), model)
    assert report.blocks[0].products.startswith("double backward")
    assert report.loss == pytest.approx(expected.loss)
    with pytest.raises(TracingError, match="this version of torch"):
        step(BlockHF.martens(blocks.single(model), products=Traced()), model)


def test_products_run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._inductor, "compile")
    model = make_model()
    with pytest.warns(UserWarning, match=r"Compiling failed .*torch\._inductor\.compile"):
        step(BlockHF.martens(blocks.single(model), products=Traced(compile=True)), model)


def take_away_saved_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "SAVED", "_gone_")


def take_away_the_name_of_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "PARAMETER", "gone")


@pytest.mark.parametrize("take_away", [take_away_saved_tensors, take_away_the_name_of_leaves])
def test_there_are_diagonals_and_no_kronecker_factors(
    take_away: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    assert len(find_uses([model(make_batch()[0])], model.parameters())) == 2
    take_away(monkeypatch)
    assert find_uses([model(make_batch()[0])], model.parameters()) == {}
    monkeypatch.setattr(auto.Auto, "_worth_forming", staticmethod(lambda *_: []))
    optimizer = BlockHF(blocks.by_layer(model))
    with pytest.warns(UserWarning, match="No Kronecker factors were found for 2 matrices") as warned:
        first, *_, last = [step(optimizer, model).loss for _ in range(4)]
    assert last < first
    assert len(warned) == 1


def test_matrices_that_are_multiplied_with_nothing_are_no_reason_to_warn() -> None:
    scales = nn.Parameter(torch.ones(32, 3, dtype=torch.float64))
    inputs, _ = make_batch()

    def objective() -> tuple[Tensor, Tensor]:
        outputs = scales * inputs
        return outputs, (outputs - 1).square().mean()

    BlockHF.martens([scales], preconditioner=Kronecker()).step(objective)


def test_torchs_own_counter_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.utils._python_dispatch, "TorchDispatchMode")

    class Counter(_torch.dispatch_mode()):  # type: ignore[misc]
        flops = 0

    with Counter() as counter:
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert counter.flops == 2 * 2 * 3 * 4


def test_products_and_convolutions_are_counted_without_torchs_table(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = torch.ones(2, 3), torch.ones(3, 4)
    pictures, kernel = torch.ones(2, 3, 8, 8), torch.ones(5, 3, 3, 3)
    convolution = (pictures, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    cases = [
        (aten.mm.default, (left, right)),
        (aten.addmm.default, (torch.ones(2, 4), left, right)),
        (aten.bmm.default, (left[None], right[None])),
        (aten.baddbmm.default, (torch.ones(1, 2, 4), left[None], right[None])),
        (aten.convolution.default, convolution),
        (aten.sin.default, (left,)),
    ]
    expected = [flops_of(operation, args, {}, operation(*args)) for operation, args in cases]
    assert expected[-2:] == [2 * 2 * 5 * 6 * 6 * 27, 0]
    monkeypatch.delattr(flop_counter, "flop_registry")
    assert [flops_of(operation, args, {}, operation(*args)) for operation, args in cases] == expected


def test_functions_that_are_no_operators_cost_nothing() -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.sin(x)[0]).graph
    assert flops_of_graph(graph) == 0
    assert _torch.schema_of(len) is None
    assert not _torch.writes_memory(len)
    assert _torch.writes_memory(aten.sin.default)


def test_wrappers_of_vmap_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [torch.ones(2), torch.ones(2, dtype=torch.int64), nn.Parameter(torch.ones(2)), torch.ones(0)]

    def known() -> tuple[list[bool], list[bool]]:
        wrapped: list[bool] = []

        def note(tensor: Tensor) -> Tensor:
            wrapped.append(_torch.is_functorch_wrapper(tensor))
            return tensor.sum()

        torch.func.vmap(torch.func.grad(note))(torch.ones(2, 3))
        torch.func.grad(note)(torch.ones(3))
        return [_torch.is_functorch_wrapper(tensor) for tensor in plain], wrapped

    expected = [False] * 4, [True] * 2
    assert known() == expected
    monkeypatch.delattr(torch._C._functorch, "is_functorch_wrapped_tensor")
    assert known() == expected


@pytest.mark.parametrize("has_name", [True, False])
def test_tensors_are_copied_into_others(has_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_name:
        monkeypatch.delattr(torch, "_foreach_copy_")
    into = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64)]
    own = [torch.ones(3), torch.eye(2, dtype=torch.float64)]
    _torch.copy_each(list(zip(into, own, strict=True)))
    for a, b in zip(into, own, strict=True):
        assert torch.equal(a, b)


def test_devices_are_found_without_torch_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.delattr(torch, "accelerator")
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    for available, expected in ((True, torch.device("cuda")), (False, None)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert _torch.accelerator() == expected
    _torch.use_device(3)
    assert used == [3]


class Device:
    """Stands in for a device's module: counts memory, and has one stream of random numbers."""

    def __init__(self) -> None:
        self.state, self.peak = torch.zeros(1), 7

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = 0

    def get_rng_state(self) -> Tensor:
        return self.state

    def set_rng_state(self, state: Tensor) -> None:
        self.state = state


@pytest.mark.parametrize("accelerator", [None, types.SimpleNamespace()])
def test_where_torch_accelerator_counts_no_memory_the_devices_own_module_does(
    monkeypatch: pytest.MonkeyPatch, accelerator: Any
) -> None:
    if accelerator is None:
        monkeypatch.delattr(torch, "accelerator")
    else:
        monkeypatch.setattr(torch, "accelerator", accelerator)
    own, device = Device(), torch.device("cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda _: own)
    assert _torch.peak_memory(device) == 7
    _torch.reset_peak_memory(device)
    assert own.peak == 0
    monkeypatch.setattr(torch, "get_device_module", lambda _: types.SimpleNamespace())
    _torch.reset_peak_memory(device)
    assert _torch.peak_memory(device) is None


def test_a_device_with_one_stream_of_random_numbers_is_asked_without_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, device = Device(), torch.device("mps")
    monkeypatch.setattr(torch, "get_device_module", lambda _: own)
    assert _torch.random_state(device) is own.state
    _torch.set_random_state(device, torch.ones(1))
    assert own.state == 1


def test_groups_keep_torchs_own_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_set_pg_timeout")
    _torch.set_group_timeout(None, datetime.timedelta(seconds=1))  # type: ignore[arg-type]


def test_nothing_of_the_compiler_is_loaded_before_it_is_asked_for() -> None:
    script = """
import sys, torch, blockhf
from blockhf import BlockHF, Traced, blocks
loaded = lambda: sorted(name for name in sys.modules if name.startswith("blockhf.compile."))
assert loaded() == [], loaded()
model = torch.nn.Linear(2, 1)
def objective(batch):
    outputs = model(batch)
    return outputs, outputs.square().mean()
BlockHF.martens(blocks.single(model), products=Traced()).step(objective, torch.ones(3, 2))
assert loaded() == ["blockhf.compile.batch_small_matmuls"], loaded()
"""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
