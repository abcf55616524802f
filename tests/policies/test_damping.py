"""Damping rules are arithmetic; these are the sums."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from blockhf.policies import ByCoefficient, Constant, DampingRule, LevenbergMarquardt, Outcome

RULE = LevenbergMarquardt(initial=1.0, factor=0.5, good=0.75, bad=0.25, floor=0.01, ceiling=100.0)


@pytest.mark.parametrize(
    ("damping", "outcome", "expected"),
    [
        pytest.param(1.0, Outcome(True, 0.9), 0.5, id="a good ratio"),
        pytest.param(1.0, Outcome(True, 5.0), 0.5, id="better than foretold"),
        pytest.param(1.0, Outcome(True, 0.5), 1.0, id="a fair ratio"),
        pytest.param(1.0, Outcome(True, 0.75), 1.0, id="the good bound itself"),
        pytest.param(1.0, Outcome(True, 0.25), 1.0, id="the bad bound itself"),
        pytest.param(1.0, Outcome(True, 0.1), 2.0, id="a bad ratio"),
        pytest.param(1.0, Outcome(True, -3.0), 2.0, id="the loss rose"),
        pytest.param(1.0, Outcome(True, -math.inf), 2.0, id="the loss rose without bound"),
        pytest.param(1.0, Outcome(True, math.nan), 1.0, id="no number"),
        pytest.param(1.0, Outcome(True, None), 1.0, id="accepted, ratio unknown"),
        pytest.param(1.0, Outcome(False), 2.0, id="rejected"),
        pytest.param(1.0, Outcome(False, 0.9), 2.0, id="rejected in spite of the ratio"),
        pytest.param(0.015, Outcome(True, 0.9), 0.01, id="floor"),
        pytest.param(0.0, Outcome(True, 0.9), 0.01, id="floor from a hand-set zero"),
        pytest.param(0.0, Outcome(True, None), 0.01, id="floor without a ratio"),
        pytest.param(80.0, Outcome(False), 100.0, id="ceiling"),
        pytest.param(1e9, Outcome(True, 0.9), 100.0, id="ceiling from a hand-set value"),
        pytest.param(100.0, Outcome(True, 0.9), 50.0, id="down from the ceiling"),
        pytest.param(0.01, Outcome(False), 0.02, id="up from the floor"),
    ],
)
def test_levenberg_marquardt_follows_the_reduction_ratio(
    damping: float, outcome: Outcome, expected: float
) -> None:
    assert RULE.update(damping, outcome, {}) == expected


@pytest.mark.parametrize(
    ("damping", "outcome", "expected"),
    [
        pytest.param(1.0, Outcome(True, coefficient=0.4), 0.5, id="much is taken"),
        pytest.param(1.0, Outcome(True, coefficient=0.8), 0.25, id="most is taken"),
        pytest.param(1.0, Outcome(True, coefficient=0.2), 1.0, id="the good bound itself"),
        pytest.param(1.0, Outcome(True, coefficient=0.05), 1.0, id="the bad bound itself"),
        pytest.param(1.0, Outcome(True, coefficient=0.02), 2.5, id="by as much as little is taken"),
        pytest.param(1.0, Outcome(True, coefficient=1e-9), 8.0, id="not faster than the fastest"),
        pytest.param(1.0, Outcome(True, coefficient=-1.0), 8.0, id="the other way"),
        pytest.param(1.0, Outcome(True, 0.9, 0.1), 1.0, id="between the bounds"),
        pytest.param(1.0, Outcome(True), 1.0, id="unknown"),
        pytest.param(1.0, Outcome(False, coefficient=0.8), 8.0, id="rejected"),
        pytest.param(1.0, Outcome(True, ratio=0.9), 0.5, id="no lengths, and a good ratio"),
        pytest.param(1.0, Outcome(True, ratio=0.5), 1.0, id="no lengths, and a fair ratio"),
        pytest.param(1.0, Outcome(True, ratio=0.1), 2.0, id="no lengths, and a bad ratio"),
        pytest.param(1.0, Outcome(True, ratio=0.1, coefficient=0.8), 2.0, id="a bad ratio counts too"),
        pytest.param(1.0, Outcome(True, ratio=0.4, coefficient=0.8), 1.0, id="a fair one keeps it"),
        pytest.param(1.0, Outcome(True, ratio=0.1, coefficient=0.01), 5.0, id="the worse of the two"),
        pytest.param(0.0, Outcome(True), 1e-7, id="floor"),
        pytest.param(9e7, Outcome(False), 1e8, id="ceiling"),
    ],
)
def test_damping_by_coefficient_follows_the_share_that_is_taken(
    damping: float, outcome: Outcome, expected: float
) -> None:
    assert ByCoefficient().update(damping, outcome, {}) == expected


def test_a_success_undoes_a_failure() -> None:
    rule = LevenbergMarquardt()
    raised = rule.update(rule.initial, Outcome(False), {})
    assert raised == pytest.approx(1.5 * rule.initial)
    assert rule.update(raised, Outcome(True, 1.0), {}) == pytest.approx(rule.initial)


@pytest.mark.parametrize("outcome", [Outcome(True, 0.9), Outcome(True, 0.1), Outcome(True), Outcome(False)])
@pytest.mark.parametrize("damping", [0.0, 0.3, 1e9])
def test_constant_damping_stays_whatever_happens(damping: float, outcome: Outcome) -> None:
    assert Constant(0.1).update(damping, outcome, {}) == damping


def test_a_rule_says_whether_it_needs_the_loss_after_the_step() -> None:
    assert (Constant().needs_ratio, LevenbergMarquardt().needs_ratio) == (False, True)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (Constant, {}),
        (Constant, {"initial": 0.0}),
        (Constant, {"initial": 7.5}),
        (LevenbergMarquardt, {}),
        (LevenbergMarquardt, {"initial": 1e-8}),
        (LevenbergMarquardt, {"initial": 1e8}),
        (LevenbergMarquardt, {"good": 0.5, "bad": 0.5}),
        (LevenbergMarquardt, {"initial": 3.0, "floor": 3.0, "ceiling": 3.0}),
        (LevenbergMarquardt, {"factor": 0.999}),
    ],
)
def test_a_valid_rule_starts_where_it_says(rule: Any, options: dict[str, float]) -> None:
    made: DampingRule = rule(**options)
    assert made.initial == options.get("initial", rule.initial)


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (Constant, {"initial": -0.1}, "damping is -0.1, but must not be negative."),
        (Constant, {"initial": math.nan}, "damping is nan, but must not be negative."),
        (LevenbergMarquardt, {"factor": 0.0}, "factor is 0.0, but must be between 0 and 1."),
        (LevenbergMarquardt, {"factor": 1.0}, "factor is 1.0, but must be between 0 and 1."),
        (LevenbergMarquardt, {"factor": 1.5}, "factor is 1.5, but must be between 0 and 1."),
        (LevenbergMarquardt, {"factor": math.nan}, "factor is nan, but must be between 0 and 1."),
        (LevenbergMarquardt, {"bad": 0.8}, "bad is 0.8, but must not be above good, 0.75."),
        (LevenbergMarquardt, {"initial": 0.0}, "initial is 0.0, but must be between the floor, 1e-08, which"),
        (LevenbergMarquardt, {"initial": 1e9}, "initial is 1000000000.0, but must be between the floor"),
        (LevenbergMarquardt, {"initial": math.nan}, "initial is nan, but must be between the floor"),
        (
            LevenbergMarquardt,
            {"floor": 0.0},
            "initial is 0.1, but must be between the floor, 0.0, which must",
        ),
        (
            LevenbergMarquardt,
            {"floor": 0.5},
            "initial is 0.1, but must be between the floor, 0.5, which must",
        ),
        (LevenbergMarquardt, {"ceiling": 0.01}, "initial is 0.1, but must be between the floor"),
        (ByCoefficient, {"factor": 1.0}, "factor is 1.0, but must be between 0 and 1."),
        (ByCoefficient, {"bad": 0.5}, "bad is 0.5, but must not be above good, 0.2."),
        (ByCoefficient, {"fastest": 1.0}, "fastest is 1.0, but must be above 1."),
        (ByCoefficient, {"floor": 0.0}, "initial is 1.0, but must be between the floor, 0.0, which must"),
    ],
)
def test_an_invalid_rule_is_refused_with_value_and_bound(
    rule: Any, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        rule(**options)
