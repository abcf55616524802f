"""What the ways to products learn: refusals are saved, traces and checks are made again."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockhf import Auto, BlockHF, Formed, PolicyState, Products, Traced, blocks
from blockhf.fx_graphs import TracingError
from curvature_tasks import branching, data, mlp, squares, step, ways
from optimizer_tasks import equal, through_a_file, values


def normalized() -> nn.Module:
    """Small blocks that cannot be formed, as the samples see each other."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 60), nn.BatchNorm1d(60), nn.Tanh(), nn.Linear(60, 2)).double()


class Annealed:
    """An objective with a number that is another one at each step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.weight = model, 1.0

    def __call__(self, batch: Any) -> tuple[Tensor, Tensor]:
        outputs = self.model(batch[0])
        return outputs, self.weight * F.mse_loss(outputs, batch[1])


def annealed(optimizer: BlockHF, objective: Annealed) -> None:
    for _ in range(2):
        objective.weight += 0.25
        optimizer.step(objective, data(20))


def learned(optimizer: BlockHF) -> dict[str, Any]:
    """What the state dict has of the products, by way of a file."""
    return through_a_file(optimizer.state_dict())["policies"]["products"]


def resumed(model: nn.Module, optimizer: BlockHF, **options: Any) -> tuple[nn.Module, BlockHF]:
    """The same run, in objects of its own that know only what was saved."""
    other_model = copy.deepcopy(model)
    other = BlockHF.martens(blocks.by_layer(other_model), **options)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    return other_model, other


def choices(optimizer: BlockHF) -> list[str]:
    """How the last step made its products, without the seconds that it took."""
    return [re.sub(r" in \d+\.\d s", "", way) for way in ways(optimizer)]


# Refusals.


@pytest.mark.usefixtures("nothing_is_too_small")
@pytest.mark.parametrize(
    ("refusal", "make", "objective_for", "note"),
    [
        ("no_tracing", lambda: mlp(3, 40, 2), branching, r"double backward: .*reads numbers out of tensors"),
        ("no_forming", normalized, squares, r"traced, .*\(cannot be formed: "),
    ],
    ids=["tracing", "forming"],
)
def test_a_refusal_is_saved_and_a_resumed_run_makes_the_same_choices(
    refusal: str, make: Callable[[], nn.Module], objective_for: Any, note: str, num_traces: list[int]
) -> None:
    model = make()
    optimizer = BlockHF.martens(blocks.by_layer(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tests of the choice look at it
        optimizer.step(objective_for(model), data(20))
    assert isinstance(learned(optimizer)["shared"][refusal], str)
    assert learned(optimizer)["blocks"] == {}
    other_model, other = resumed(model, optimizer)
    for _ in range(3):
        optimizer.step(objective_for(model), data(20))
        other.step(objective_for(other_model), data(20))
        assert choices(other) == choices(optimizer)
        assert all(re.match(note, way) for way in ways(other))
    assert num_traces == [1 if refusal == "no_tracing" else 2]
    assert learned(other) == learned(optimizer)
    assert torch.equal(values(other_model), values(model))


@pytest.mark.parametrize("constant", [False, True], ids=["changes at each step", "stays"])
@pytest.mark.parametrize("at", range(5))
def test_a_run_resumed_anywhere_refuses_a_changing_objective_at_the_same_step(
    at: int, constant: bool
) -> None:
    """Traces are not saved, but what they consisted of is."""

    def number_of_steps(resume_at: int | None) -> tuple[int, dict[str, Any]]:
        model = mlp(3, 4, 2)
        optimizer = BlockHF.martens(blocks.by_layer(model), products=Traced())
        objective = Annealed(model)
        for number in range(6):
            if number == resume_at:
                model, optimizer = resumed(model, optimizer, products=Traced())
                objective.model = model
            objective.weight += 0.0 if constant else 0.25
            try:
                optimizer.step(objective, data(20))
            except TracingError as error:
                return number, {"refused": str(error)}
        return 6, learned(optimizer)["shared"]

    expected = number_of_steps(None)
    assert expected[0] == (6 if constant else 4)
    assert constant or "changes from call to call" in expected[1]["refused"]
    assert number_of_steps(at) == expected


# Traces and checks.


@pytest.mark.parametrize(("way", "kept"), [(Traced(), "traces"), (Formed(), "checked")], ids=str)
def test_traces_and_checks_are_neither_saved_nor_copied(way: Products, kept: str) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.single(model), products=way)
    step(optimizer, model, 8)
    state = optimizer.policy_state["products"]
    assert next(iter(state.cache)) == kept
    assert len(state.cache[kept]) == 1
    assert learned(optimizer) == {"shared": state.shared, "blocks": {}}
    for other in (
        copy.deepcopy((model, optimizer))[1],
        copy.copy(optimizer),
        pickle.loads(pickle.dumps((model, optimizer)))[1],
    ):
        assert other.policy_state["products"] == PolicyState(state.shared)
    assert len(state.cache[kept]) == 1


def test_a_loaded_state_drops_the_traces_of_before(num_traces: list[int]) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.single(model), products=Traced())
    step(optimizer, model, 8)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.policy_state["products"].cache
    step(optimizer, model, 8)
    assert num_traces == [2]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_traces_are_made_again_by_copies(copied: Callable[[Any], Any], num_traces: list[int]) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.single(model), products=Traced())
    step(optimizer, model, 8)
    other_model, other = copied((model, optimizer))
    step(optimizer, model, 8)
    step(other, other_model, 8)
    assert num_traces == [2]
    assert torch.equal(values(model), values(other_model))


# One object for two optimizers.


@pytest.mark.usefixtures("nothing_is_too_small")
def test_one_auto_serves_two_optimizers_on_two_models() -> None:
    """One of the objectives can be neither traced nor formed; the other learns nothing of that."""
    found = []
    shared = Auto()
    for one, two in ((shared, shared), (Auto(), Auto())):
        refused, fine = mlp(3, 60, 5, 2), mlp(3, 60, 5, 2, seed=1)
        first = BlockHF.martens(blocks.by_layer(refused), products=one, max_cg_steps=12)
        second = BlockHF.martens(blocks.by_layer(fine), products=two, max_cg_steps=12)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                first.step(branching(refused), data(8))
                second.step(squares(fine), data(8))
        assert len(caught) == 1
        assert learned(first)["shared"].keys() == {"no_tracing", "no_forming"}
        assert list(learned(second)["shared"]) == ["traced"]
        assert {way.partition(",")[0].partition(" ")[0] for way in ways(second)} == {"traced", "formed"}
        found.append([choices(first), choices(second), values(refused), values(fine)])
    assert equal(*found)
