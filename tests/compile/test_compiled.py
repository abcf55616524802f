"""Products through the compiler are the same products."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._inductor
import torch.nn.functional as F
from torch import Tensor, nn

from blockhf import BlockHF, Traced, blocks
from curvature_tasks import mlp, step


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_compiled_products_equal_the_others_and_the_time_to_compile_is_told() -> None:
    model = mlp(3, 8, 2)
    reference = copy.deepcopy(model)
    compiled = Traced(compile=True)
    for one, way in ((model, compiled), (reference, Traced())):
        optimizer = BlockHF.paper(blocks.by_layer(one), damping=0.1, max_cg_steps=4, products=way)
        step(optimizer, one, 16)
        assert optimizer.report is not None
        assert ("compiled in" in optimizer.report.blocks[0].products) == (way is compiled)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)


def test_what_is_little_else_than_matrix_products_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch._inductor, "compile", lambda module, *_: compiled.append(module) or module)
    notes = []
    for width in (8, 1024):
        model = mlp(width, width, 2)
        way = Traced(compile=True)
        optimizer = BlockHF.paper(blocks.single(model), damping=0.1, max_cg_steps=1, products=way)
        inputs, targets = torch.randn(8, width, dtype=torch.float64), torch.zeros(8, 2, dtype=torch.float64)

        def objective(batch: Any, model: nn.Module = model) -> tuple[Tensor, Tensor]:
            outputs = model(batch[0])
            return outputs, F.mse_loss(outputs, batch[1])

        optimizer.step(objective, (inputs, targets))
        assert optimizer.report is not None
        notes.append(optimizer.report.blocks[0].products)
    assert len(compiled) == 1
    assert "compiled in" in notes[0]
    assert notes[1].endswith(", not compiled, as it is matrix products")


def test_without_a_compiler_products_run_plain_after_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch._inductor, "compile", broken)
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.single(model), products=Traced(compile=True))
    with pytest.warns(UserWarning, match=r"Compiling failed .*no C\+\+ compiler.*run without it"):
        step(optimizer, model, 8)
    step(optimizer, model, 8)
    assert optimizer.report is not None
    assert optimizer.report.accepted
