"""A step leaves random numbers, buffers and flags as they were, unless it says otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockhf.isolation import IsolatedBuffers, RandomState, frozen, twice_differentiable
from buffers import after, assert_buffers, buffers

X = torch.arange(12.0).view(6, 2)

# --- random numbers ----------------------------------------------------------------------------------


def test_a_replay_draws_the_same_numbers_and_leaves_the_stream_where_it_was() -> None:
    torch.manual_seed(0)
    state = RandomState([torch.device("cpu")])
    first = torch.rand(3)
    with state.replayed():
        again = torch.rand(3)
        torch.rand(100)
    after = torch.rand(3)

    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(3))
    assert torch.equal(again, first)
    assert torch.equal(after, torch.rand(3))


def test_a_replay_that_fails_leaves_the_stream_where_it_was() -> None:
    state = RandomState([torch.device("cpu"), torch.device("meta")])
    torch.rand(5)
    outside = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), state.replayed():
        torch.rand(2, 2) @ torch.rand(3, 3)
    assert torch.equal(torch.get_rng_state(), outside)


# --- buffers -----------------------------------------------------------------------------------------


class Replacing(nn.Module):
    """Puts a new tensor in the place of its buffer, as ``self.mean = …`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return x


class Growing(nn.Module):
    """Keeps what it has seen, in a buffer of another size each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x])
        return x


class Forgetful(nn.Module):
    """Deletes one buffer and empties another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.ones(2))
        self.register_buffer("second", torch.ones(2))
        self.register_buffer("third", None)

    def forward(self, x: Tensor) -> Tensor:
        del self.first
        self.second = None
        return x


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "writing": norm,
    "replacing": Replacing,
    "growing": Growing,
    "counting twice a pass": lambda: nn.Sequential(*[shared := nn.BatchNorm1d(2), shared]),
}
each_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


@each_module
def test_buffers_are_as_before_unless_committed(make: Callable[[], nn.Module]) -> None:
    module = make()
    before, places = buffers(module), [id(buffer) for buffer in module.buffers()]
    with IsolatedBuffers():
        module(X)
        assert {name: buffer.tolist() for name, buffer in module.named_buffers()} != {
            name: buffer.tolist() for name, buffer in before.items()
        }
    assert_buffers(module, before)
    assert [id(buffer) for buffer in module.buffers()] == places


@each_module
def test_a_commit_makes_the_buffers_those_of_an_ordinary_pass(make: Callable[[], nn.Module]) -> None:
    module = make()
    expected = after(module, X, X + 1)
    with IsolatedBuffers() as isolated:
        module(X)
        module(X + 1)
    isolated.commit()
    assert_buffers(module, expected)
    assert not any(buffer.requires_grad for buffer in module.buffers())


def test_a_commit_writes_into_the_very_tensors_that_were_there() -> None:
    for module in (norm(), Replacing()):
        places = [buffer.data_ptr() for buffer in module.buffers()]
        with IsolatedBuffers() as isolated:
            module(X)
        isolated.commit()
        assert [buffer.data_ptr() for buffer in module.buffers()] == places


@each_module
def test_a_second_use_starts_anew(make: Callable[[], nn.Module]) -> None:
    module = make()
    isolated = IsolatedBuffers()
    with isolated:
        module(X)
    before = buffers(module)
    expected = after(module, X + 1)
    with isolated:
        module(X + 1)
    assert_buffers(module, before)
    isolated.commit()
    assert_buffers(module, expected)


@pytest.mark.parametrize(("inner_commits", "outer_commits"), [(a, b) for a in (0, 1) for b in (0, 1)])
@each_module
def test_isolation_nests(make: Callable[[], nn.Module], inner_commits: bool, outer_commits: bool) -> None:
    module = make()
    inputs = [X, X + 1] if inner_commits else [X]
    expected = after(module, *inputs) if outer_commits else buffers(module)
    with IsolatedBuffers() as outer:
        module(X)
        within = buffers(module)
        with IsolatedBuffers() as inner:
            module(X + 1)
        assert_buffers(module, within)
        if inner_commits:
            inner.commit()
    if outer_commits:
        outer.commit()
    assert_buffers(module, expected)


@each_module
def test_a_module_first_met_inside_two_isolations_is_isolated_by_both(make: Callable[[], nn.Module]) -> None:
    module = make()
    before = buffers(module)
    with IsolatedBuffers() as outer:
        with IsolatedBuffers():
            module(X)
        assert_buffers(module, before)
    outer.commit()
    assert_buffers(module, before)


def test_buffers_are_as_before_when_a_module_raises() -> None:
    module = nn.Sequential(norm(), nn.Linear(3, 1))  # the second does not fit
    before = buffers(module)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), IsolatedBuffers():
        module(X)
    assert_buffers(module, before)
    expected = after(module[0], X)
    module[0](X)  # nothing listens any more
    assert_buffers(module[0], expected)


def test_buffers_that_a_module_deletes_or_empties_come_back() -> None:
    module = Forgetful()
    with IsolatedBuffers():
        module(X)
    assert module.first.tolist() == module.second.tolist() == [1, 1]
    assert module.third is None


def test_an_ensemble_by_vmap_keeps_its_buffers() -> None:
    members = [norm().eval() for _ in range(3)]
    params, stacked = torch.func.stack_module_state(members)  # type: ignore[arg-type]
    base = copy.deepcopy(members[0])
    before = buffers(base)

    def call(params: Any, buffers: Any) -> Tensor:
        return torch.func.functional_call(base, (params, buffers), (X,))

    with IsolatedBuffers() as isolated:
        outputs = torch.vmap(call)(params, stacked)
    isolated.commit()
    torch.testing.assert_close(outputs, torch.stack([member(X) for member in members]))
    assert_buffers(base, before)


# --- kernels and flags -------------------------------------------------------------------------------


def test_attention_can_be_differentiated_twice() -> None:
    w = torch.randn(1, 1, 4, 8, requires_grad=True)
    with torch.no_grad(), twice_differentiable():
        loss = F.scaled_dot_product_attention(w, w, w).square().sum()
    (slope,) = torch.autograd.grad(loss, w, create_graph=True)
    assert torch.autograd.grad(slope.sum(), w)[0].isfinite().all()


class WithoutCudnn(nn.LSTM):
    """Takes down whether cuDNN may be used."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.allowed = torch.backends.cudnn.enabled
        return super().forward(x)[0]


def test_recurrent_layers_run_without_cudnn_and_no_others_do() -> None:
    model = WithoutCudnn(2, 3)
    seen: list[bool] = []
    beside = nn.Linear(3, 1)
    beside.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.enabled))
    with torch.backends.cudnn.flags(enabled=True):
        with twice_differentiable():
            beside(model(X[None]))
            with pytest.raises(RuntimeError):
                model(X[None, :, :1])
            assert torch.backends.cudnn.enabled
        assert (model.allowed, seen) == (False, [True])
        model(X[None])
        assert model.allowed


def test_frozen_parameters_build_no_graph_and_thaw_whatever_happens() -> None:
    params = [torch.ones(2, requires_grad=True) for _ in range(2)]
    with frozen(params):
        assert not (params[0] * params[1]).requires_grad
        x = torch.ones(2, requires_grad=True)
        assert torch.equal(torch.autograd.grad((params[0] * x).sum(), x)[0], torch.ones(2))
    with pytest.raises(RuntimeError, match="halt"), frozen(params):
        raise RuntimeError("halt")
    assert all(param.requires_grad for param in params)
