"""Muon for the races: what it does to matrices, and that the rest is AdamW."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from blockhf_lab.muon import Muon, orthogonalized


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (1, 3)])
def test_singular_values_come_near_one_and_their_vectors_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    left, values, right = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    # Values below a hundredth of the largest need more than five steps; here are none.
    found = left.T @ orthogonalized(left @ values.clamp(min=0.1).diag() @ right) @ right.T
    torch.testing.assert_close(found, found.diagonal().diag())
    assert 0.65 < float(found.diagonal().min()) <= float(found.diagonal().max()) < 1.25


def test_no_gradient_at_all_is_no_direction() -> None:
    assert torch.equal(orthogonalized(torch.zeros(3, 2)), torch.zeros(3, 2))


def test_a_matrix_moves_as_far_as_an_update_of_adam_does() -> None:
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.zeros(60, 30))
    optimizer = Muon([matrix], lr=0.01)
    matrix.grad = 1e4 * torch.randn(60, 30)
    optimizer.step()
    assert float(matrix.detach().square().mean().sqrt()) == pytest.approx(0.2 * 0.01, rel=0.3)


def test_momentum_is_nesterovs() -> None:
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    first, second = torch.randn(2, 4, 3, dtype=torch.float64)
    optimizer = Muon([matrix], lr=0.5, momentum=0.9, weight_decay=0.0)
    matrix.grad = first
    optimizer.step()
    before = matrix.detach().clone()
    matrix.grad = second
    optimizer.step()
    # The scale is lost in the orthogonalization, so the sum may be without weights.
    ahead = second + 0.9 * (second + 0.9 * first)
    torch.testing.assert_close(before - matrix, 0.5 * 0.2 * 4**0.5 * orthogonalized(ahead))


def test_what_is_no_matrix_is_updated_by_adamw() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2, 1, 1))]
    theirs = copy.deepcopy(ours)
    optimizers = Muon(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for _ in range(3):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = other.grad = torch.randn_like(own)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_a_loaded_state_makes_the_same_next_step() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = Muon(model.parameters())
    inputs = torch.randn(2, 5, 3)
    for batch in inputs:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    other = copy.deepcopy(model)
    resumed = Muon(other.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, own in ((model, optimizer), (other, resumed)):

        def closure(each: nn.Module = each, own: Muon = own) -> torch.Tensor:
            own.zero_grad()
            loss: torch.Tensor = each(inputs[0]).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        assert float(own.step(closure)) > 0
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=0, atol=0)


@pytest.mark.parametrize(("option", "value"), [("lr", -1.0), ("momentum", 1.0)])
def test_misuse_is_told(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} is {value}, but must be"):
        Muon([nn.Parameter(torch.zeros(1))], **{option: value})
