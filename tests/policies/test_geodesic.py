"""Levenberg-Marquardt steps with acceleration and momentum, against the dense formulas."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from blockhf import BlockHF, Geodesic

DAMPING = 0.05  # relative to the mean of the diagonal


def residuals(w: Tensor) -> Tensor:
    a, b, c = w
    return torch.stack([a * b - 1, (a + c).sin(), b * b * c - 0.5, a - c, (a * c).exp() - 1.2])


def expected_step(w: Tensor, last: Tensor | None, momentum: float, damping: float) -> Tensor:
    J, r = torch.func.jacrev(residuals)(w), residuals(w)
    inverse = torch.linalg.inv(J.T @ J + damping * (J.T @ J).diagonal().mean() * torch.eye(3).double())
    start = torch.zeros(3).double() if last is None else momentum * last
    v = start - inverse @ J.T @ (r + J @ start)
    h = 1e-3
    bend = 2 / h * ((residuals(w + h * v) - r) / h - J @ v)
    return v - inverse @ J.T @ bend / 2


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("loss_scale", [1.0, 1e3])
def test_steps_are_those_of_the_dense_formulas(momentum: float, loss_scale: float) -> None:
    w = torch.tensor([1.2, 0.7, 0.3], dtype=torch.float64, requires_grad=True)

    def objective() -> tuple[Tensor, Tensor]:
        r = residuals(w)
        return r, loss_scale * r.square().sum() / 2

    search = Geodesic(momentum=momentum, probe=1e-3)
    optimizer = BlockHF.least_squares([{"params": [w], "damping": DAMPING}], search=search)
    last = None
    for _ in range(3):
        before, damping = w.detach().clone(), optimizer.param_groups[0]["damping"]
        optimizer.step(objective)
        assert optimizer.report is not None
        if optimizer.report.reason not in ("first try", "with momentum"):
            break
        step = expected_step(before, last, momentum, damping)
        torch.testing.assert_close(w.detach() - before, step, rtol=1e-5, atol=1e-8)
        last = w.detach() - before
    assert last is not None


def test_damping_grows_within_a_step_until_the_loss_falls() -> None:
    w = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)

    def objective() -> tuple[Tensor, Tensor]:
        r = w.atan()  # full Gauss-Newton steps diverge from here
        return r, r.square().sum() / 2

    optimizer = BlockHF.least_squares([{"params": [w], "damping": 1e-6}])
    optimizer.step(objective)
    assert optimizer.report is not None
    assert optimizer.report.accepted
    assert "damping times" in optimizer.report.reason or optimizer.param_groups[0]["damping"] > 1e-6
    for _ in range(30):
        loss = optimizer.step(objective)
    assert float(loss) < 1e-20


def test_a_network_in_blocks_with_several_outputs_is_fitted() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    x = torch.randn(30, 2, dtype=torch.float64)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 0].sin(), x[:, 1].cos()], 1)

    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, torch.nn.functional.mse_loss(outputs, batch[1])

    optimizer = BlockHF.least_squares(
        [{"params": list(layer.parameters()), "name": str(i)} for i, layer in enumerate((model[0], model[2]))]
    )
    losses = [float(optimizer.step(objective, (x, y))) for _ in range(40)]
    assert losses[-1] < 1e-2 * losses[0]
    assert all(after <= before for before, after in itertools.pairwise(losses))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"growth": 1.0}, "growth is 1.0"),
        ({"probe": 0.0}, "probe is 0.0"),
        ({"longest": 0.0}, "longest is 0.0"),
        ({"max_tries": 0}, "max_tries is 0"),
    ],
)
def test_settings_out_of_bounds_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Geodesic(**options)  # type: ignore[arg-type]
