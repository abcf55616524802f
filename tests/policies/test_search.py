"""How far: each search on losses whose best step is known."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockhf.blocks import Block
from blockhf.curvature import DoubleBackward, Hessian
from blockhf.point import Linearizer, Point
from blockhf.policies import Backtracking, Choice, FixedStep, Proposal, Search, Situation
from blockhf.policy import PolicyState
from blockhf.samples import Samples

LAWS = settings(max_examples=60, deadline=None, derandomize=True, database=None)
NAN, INF = math.nan, math.inf


@dataclass
class Landscape:
    """A loss of some parameters, its point, and a watch on whether a search leaves them alone."""

    loss: Callable[..., Tensor]
    start: Sequence[Sequence[float]]
    params: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.params = [torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in self.start]
        blocks = [Block(f"b{i}", (param,)) for i, param in enumerate(self.params)]
        samples = Samples(lambda: self.loss(*self.params), None, blocks)
        self.point = Point(samples, Linearizer(Hessian(), DoubleBackward(), PolicyState()))

    def value(self) -> float:
        return float(self.loss(*self.params).detach())

    def gradient(self) -> list[Tensor]:
        return list(torch.autograd.grad(self.loss(*self.params), self.params))

    def choose(self, search: Search, proposals: Sequence[Proposal]) -> Choice:
        before = [
            (param.detach().clone(), param.data_ptr(), param._version, param.requires_grad)
            for param in self.params
        ]
        state = PolicyState()
        choice = search.choose(Situation(self.value(), proposals, self.point, self.point), state)
        assert state == PolicyState()  # these searches learn nothing
        for param, (value, pointer, version, needs_grad) in zip(self.params, before, strict=True):
            assert torch.equal(param, value)
            assert (param.data_ptr(), param._version, param.requires_grad) == (pointer, version, needs_grad)
            assert param.grad is None
        return choice

    @property
    def num_evaluations(self) -> int:
        return self.point.samples.ledger.work.num_evaluations


def propose(gradient: Tensor, direction: Sequence[float], lr: float = 1.0, **more: Any) -> Proposal:
    return Proposal(gradient, torch.tensor(direction, dtype=torch.float64), -1.0, 0.0, lr, **more)


def bowl(*params: Tensor) -> Tensor:
    return sum((param**2).sum() / 2 for param in params)  # type: ignore[return-value]


# --- what the model foretells ------------------------------------------------------------------------


@LAWS
@given(
    seed=st.integers(0, 1000),
    damping=st.sampled_from([0.0, 0.1, 5.0]),
    lr=st.sampled_from([0.0, 0.3, 1.0]),
    scale=st.sampled_from([0.25, 1.0, 2.0]),
)
def test_the_foretold_change_is_that_of_the_undamped_quadratic(
    seed: int, damping: float, lr: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    root, g, d = (torch.randn(s, generator=generator, dtype=torch.float64) for s in [(5, 5), (5,), (5,)])
    A = root @ root.T
    damped = float(d @ (A + damping * torch.eye(5, dtype=torch.float64)) @ d / 2 + g @ d)
    proposal = Proposal(g, d, damped, damping, lr)

    step = scale * lr * d
    assert proposal.change(scale) == pytest.approx(float(step @ A @ step / 2 + g @ step), abs=1e-9)
    assert proposal.slope == pytest.approx(float(g @ d))
    assert proposal.norm == pytest.approx(float(d.norm()))
    assert proposal.curvature == pytest.approx(float(d @ A @ d), abs=1e-9)


# --- fixed step --------------------------------------------------------------------------------------


def test_a_fixed_step_is_lr_times_the_direction_of_each_block() -> None:
    land = Landscape(bowl, [[1.0, 2.0], [3.0]])
    g = land.gradient()
    choice = land.choose(FixedStep(), [propose(g[0], [-1, -2], lr=0.5), propose(g[1], [-2], lr=0.1)])
    assert [update.tolist() for update in choice.update] == [[-0.5, -1.0], [-0.2]]
    assert choice.coefficients == [0.5, 0.1]
    assert choice.loss is None
    assert land.num_evaluations == 0


def test_a_fixed_step_goes_uphill_without_asking() -> None:
    land = Landscape(bowl, [[1.0]])
    assert land.choose(FixedStep(), [propose(land.gradient()[0], [5.0])]).update is not None


def test_a_fixed_step_that_evaluates_knows_the_loss_at_one_evaluation() -> None:
    land = Landscape(bowl, [[1.0], [3.0]])
    g = land.gradient()
    choice = land.choose(FixedStep(evaluates=True), [propose(g[0], [-1.0]), propose(g[1], [-3.0], lr=0.5)])
    assert choice.loss == pytest.approx(1.5**2 / 2)
    assert choice.change == pytest.approx(
        sum(p.change() for p in [propose(g[0], [-1.0]), propose(g[1], [-3.0], 0.5)])
    )
    assert land.num_evaluations == 1


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_fixed_step_that_evaluates_rejects_what_is_not_finite(bad: float) -> None:
    land = Landscape(lambda w: torch.where(w.sum() < 0, torch.full_like(w.sum(), bad), bowl(w)), [[1.0]])
    choice = land.choose(FixedStep(evaluates=True), [propose(land.gradient()[0], [-2.0])])
    assert choice.update is None
    assert choice.reason == "the loss after the step is not finite"


# --- backtracking ------------------------------------------------------------------------------------


def test_backtracking_takes_the_full_direction_where_it_helps() -> None:
    land = Landscape(bowl, [[2.0, -1.0]])
    choice = land.choose(Backtracking(), [propose(land.gradient()[0], [-2.0, 1.0])])
    assert (choice.reason, choice.loss, land.num_evaluations) == ("first try", 0.0, 1)
    assert choice.update[0].tolist() == [-2.0, 1.0]
    assert choice.coefficients == [1.0]


def test_backtracking_shrinks_an_overshooting_step() -> None:
    # From 1 along -10: f(-9), f(-4) and f(-1.5) are above f(1) = 0.5, f(-0.25) is below.
    land = Landscape(bowl, [[1.0]])
    choice = land.choose(Backtracking(), [propose(land.gradient()[0], [-10.0], lr=1.0)])
    assert choice.update[0].tolist() == [-1.25]
    assert choice.coefficients == [0.125]
    assert (choice.reason, land.num_evaluations) == ("shrunk to 0.125", 4)
    assert choice.change == propose(land.gradient()[0], [-10.0]).change(0.125)


def test_backtracking_shrinks_all_blocks_alike_after_their_lr() -> None:
    land = Landscape(bowl, [[1.0], [1.0]])
    g = land.gradient()
    choice = land.choose(Backtracking(), [propose(g[0], [-10.0], lr=0.4), propose(g[1], [-1.0], lr=0.0)])
    assert [float(update) for update in choice.update] == pytest.approx([-1.0, 0.0])
    assert choice.coefficients == pytest.approx([0.1, 0.0])


@LAWS
@given(
    seed=st.integers(0, 1000),
    shrink=st.sampled_from([0.3, 0.5, 0.9]),
    sufficient=st.sampled_from([0.0, 1e-4, 0.3, 0.9]),
    length=st.sampled_from([0.1, 1.0, 5.0, 60.0]),
)
def test_backtracking_takes_the_first_step_that_armijo_allows(
    seed: int, shrink: float, sufficient: float, length: float
) -> None:
    def loss(w: Tensor) -> Tensor:
        return (torch.cosh(w) + 0.3 * torch.sin(3 * w)).sum()

    generator = torch.Generator().manual_seed(seed)
    land = Landscape(loss, [torch.randn(3, generator=generator).tolist()])
    (g,) = land.gradient()
    proposal = propose(g, (-length * g).tolist(), lr=0.7)
    search = Backtracking(shrink=shrink, sufficient=sufficient, max_tries=6)
    choice = land.choose(search, [proposal])

    before, slope = land.value(), 0.7 * float(g @ proposal.direction)
    scales = [shrink**trial for trial in range(6)]
    after = [float(loss(land.params[0].detach() + 0.7 * scale * proposal.direction)) for scale in scales]
    allowed = [a <= before + sufficient * s * slope for a, s in zip(after, scales, strict=True)]
    if any(allowed):
        first = allowed.index(True)
        assert choice.loss == pytest.approx(after[first])
        assert choice.coefficients == pytest.approx([0.7 * scales[first]])
        assert land.num_evaluations == first + 1
    else:
        assert choice.update is None
        assert land.num_evaluations == 6


def test_backtracking_rejects_a_direction_that_only_climbs() -> None:
    land = Landscape(bowl, [[1.0]])
    choice = land.choose(Backtracking(max_tries=3), [propose(land.gradient()[0], [1.0])])
    assert choice.update is None
    assert choice.reason == "no step down to 0.25 of the direction lowers the loss enough"
    assert land.num_evaluations == 3


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_backtracking_shrinks_past_losses_that_are_not_finite(bad: float) -> None:
    land = Landscape(lambda w: torch.where(w.sum() < 0, torch.full_like(w.sum(), bad), bowl(w)), [[1.0]])
    choice = land.choose(Backtracking(), [propose(land.gradient()[0], [-3.0])])
    assert choice.coefficients == [0.25]
    assert choice.loss == pytest.approx(0.25**2 / 2)


def test_backtracking_rejects_where_every_loss_is_nan() -> None:
    land = Landscape(lambda w: torch.where(w.sum() != 1, w.sum() * NAN, w.sum()), [[1.0]])
    choice = land.choose(Backtracking(max_tries=2), [propose(torch.ones(1).double(), [-1.0])])
    assert (choice.update, land.num_evaluations) == (None, 2)


@pytest.mark.parametrize("options", [{"shrink": 0.01}, {"sufficient": 0.0}, {"max_tries": 1}])
def test_backtracking_allows_its_bounds(options: dict[str, Any]) -> None:
    assert Backtracking(**options).evaluates


# --- constructions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("search", "options", "message"),
    [
        (Backtracking, {"shrink": 0.0}, "shrink is 0.0, but must be between 0 and 1."),
        (Backtracking, {"shrink": 1.0}, "shrink is 1.0, but must be between 0 and 1."),
        (Backtracking, {"shrink": NAN}, "shrink is nan, but must be between 0 and 1."),
        (Backtracking, {"sufficient": -0.1}, "sufficient is -0.1, but must be at least 0 and below 1."),
        (Backtracking, {"sufficient": 1.0}, "sufficient is 1.0, but must be at least 0 and below 1."),
        (Backtracking, {"max_tries": 0}, "max_tries is 0, but must be at least 1."),
    ],
)
def test_an_invalid_search_is_refused_with_value_and_bound(
    search: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        search(**options)


def test_a_search_says_what_it_needs_and_what_it_knows() -> None:
    searches: list[Search] = [FixedStep(), FixedStep(evaluates=True), Backtracking()]
    assert [search.evaluates for search in searches] == [False, True, True]
    assert not any(search.uses_curvature for search in searches)
    assert not any(search.num_held_out(10_000, 5000) for search in searches)
