"""Random cotangents have the covariance that they should have, sample by sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockhf import EmpiricalFisher, Evaluation
from blockhf.curvature.draws import Noise, curvature_draw
from preconditioner_tasks import randn


def mse(outputs: tuple[Tensor, ...]) -> Tensor:
    return outputs[0].square().mean()


def cross_entropy(outputs: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(outputs[0], torch.arange(len(outputs[0])) % outputs[0].shape[1])


def tied(outputs: tuple[Tensor, ...]) -> Tensor:
    shifted = outputs[0] + outputs[1] * torch.tensor([1.0, -1.0, 0.0])
    return F.cross_entropy(shifted, torch.tensor([0, 1])) + outputs[1].square().mean()


@pytest.mark.parametrize(
    ("outputs", "loss", "num_samples"),
    [
        pytest.param([randn(3, 2)], mse, 3, id="mse"),
        pytest.param([randn(2, 4)], cross_entropy, 2, id="cross entropy"),
        pytest.param([randn(2, 3), 0.1 * randn(2, 1)], tied, 2, id="several outputs"),
        pytest.param([randn(3, 2)], cross_entropy, 7, id="no samples first"),
        pytest.param([randn(2, 3)], cross_entropy, None, id="no samples"),
    ],
)
def test_a_draws_covariance_is_the_losss_hessian_by_the_outputs(
    outputs: list[Tensor], loss: Any, num_samples: int | None
) -> None:
    sizes = [output.numel() for output in outputs]

    def flat_loss(flat: Tensor) -> Tensor:
        pieces = torch.split(flat, sizes)
        return loss(tuple(p.view(output.shape) for p, output in zip(pieces, outputs, strict=True)))

    H = torch.func.jacrev(torch.func.jacrev(flat_loss))(torch.cat([output.flatten() for output in outputs]))
    assert bool((torch.linalg.eigvalsh(H) > -1e-3).all())
    leaves = tuple(output.clone().requires_grad_() for output in outputs)
    evaluation = Evaluation(leaves, loss(leaves), num_samples)
    draws = torch.stack(
        [
            torch.cat([r.flatten() for r in curvature_draw(evaluation, Noise(3, number=number))])
            for number in range(1000)
        ]
    )
    covariance = draws.T @ draws / len(draws)
    deviation = (H.diagonal().clamp_min(1e-3).sqrt()[:, None] * H.diagonal().clamp_min(1e-3).sqrt()) * (
        2 / len(draws)
    ) ** 0.5
    assert float(((covariance - H) / deviation).abs().max()) < 5


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_slopes_with_random_signs_have_the_covariance_of_the_empirical_fisher(reduction: str) -> None:
    logits, classes = randn(3, 4).requires_grad_(), torch.tensor([0, 1, 3])
    loss = F.cross_entropy(logits, classes, reduction=reduction)
    evaluation = Evaluation((logits,), loss, 3, reduction)
    draws = [EmpiricalFisher().draw(evaluation, Noise(3, number=number))[0] for number in range(64)]
    (slopes,) = torch.autograd.grad(F.cross_entropy(logits, classes, reduction="sum"), logits)
    scale = 3**-0.5 if reduction == "mean" else 1.0
    signs = torch.stack([(draw / (scale * slopes)).mean(1) for draw in draws])
    for draw, own in zip(draws, signs, strict=True):  # one sign for each sample, so any covariance is exact
        torch.testing.assert_close(draw, scale * own[:, None] * slopes)
    assert set(signs.round(decimals=9).flatten().tolist()) == {-1.0, 1.0}
    assert len({tuple(own) for own in signs.round().tolist()}) == 8, "signs are independent"


def test_the_slopes_ask_for_no_second_derivative_of_the_loss() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, outputs: Tensor) -> Tensor:
            ctx.save_for_backward(outputs)
            return outputs.square().mean()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (outputs,) = ctx.saved_tensors
            return gradient * 2 * outputs / outputs.numel()

    outputs = randn(3, 2).requires_grad_()
    (draw,) = EmpiricalFisher().draw(Evaluation((outputs,), Once.apply(outputs), 3), Noise(0))
    assert bool(draw.abs().gt(0).all())


def test_draws_follow_from_the_seed_and_leave_torchs_own_alone() -> None:
    logits = randn(4, 3).requires_grad_()
    evaluation = Evaluation((logits,), F.cross_entropy(logits, torch.tensor([0, 1, 2, 0])), 4)
    state = torch.get_rng_state()
    one, same, other = (curvature_draw(evaluation, Noise(seed))[0] for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


@settings(deadline=None)  # the machine may be busy
@given(place=st.integers(0, 200), length=st.integers(1, 150))
def test_a_samples_noise_does_not_depend_on_the_part_it_is_in(place: int, length: int) -> None:
    everything = Noise(7).normal(torch.empty(400, 3))
    some = Noise(7, place).normal(torch.empty(length, 3))
    assert torch.equal(some, everything[place : place + length])
    assert len(everything.unique()) == 1200


def test_a_loss_whose_curvature_overflows_stops_no_draw() -> None:
    outputs = torch.full((3, 2), 200.0, requires_grad=True)
    evaluation = Evaluation((outputs,), torch.exp(outputs).mean(), num_samples=3)
    (draw,) = curvature_draw(evaluation, Noise(seed=0))
    assert draw.shape == outputs.shape
