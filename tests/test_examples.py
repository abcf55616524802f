"""Every script in ``examples`` runs: at small sizes always, at its own sizes for a longer look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from integration_tasks import EXAMPLES, run

Found = dict[str, Any]


def fell(share: float) -> Callable[[Found], bool]:
    return lambda found: found["losses"][-1] < share * found["losses"][0]


# Small arguments, what holds with them, and what holds at the example's own sizes.
CASES: dict[str, tuple[str, Callable[[Found], bool], Callable[[Found], bool]]] = {
    "mlp": ("--steps 6 --samples 400 --width 8", fell(1.0), lambda found: found["accuracy"] > 0.98),
    "resnet": ("--steps 2 --samples 128 --size 8 --width 2", fell(1.05), lambda f: f["accuracy"] > 0.8),
    "gpt": ("--steps 4 --sequences 256 --context 8 --width 8 --layers 1", fell(0.98), fell(0.55)),
    "lora": (
        "--steps 3 --samples 400 --width 8 --rank 2",
        lambda found: fell(1.0)(found) and found["kept"],
        lambda found: fell(0.5)(found) and found["kept"] and found["sizes"][0] < found["sizes"][1],
    ),
    "vae": ("--steps 6 --samples 400 --size 4 --width 8", fell(1.0), fell(0.5)),
    "infonce": ("--steps 3 --samples 128 --width 8", fell(1.0), lambda found: found["after"] > 0.6),
    "policy": (
        "--steps 4 --poles 16 --length 60 --width 8",
        lambda found: found["times"][-1] > found["times"][0],
        lambda found: found["times"][-1] > 190,
    ),
    "direction": (
        "--seconds 0.2 --steps 4 --samples 300 --width 8",
        lambda found: all(loss < 4 for loss in found.values()),
        lambda found: found["direction() + SGD with momentum"] < 0.7 * found["SGD with momentum"],
    ),
}
# Those of trainers are run by the tests of the integrations, which know what must be installed.
TRAINERS = {
    f"trainers/{name}" for name in ("lightning_module", "accelerate_loop", "hf_trainer", "ignite_engine")
}


def test_every_script_is_run() -> None:
    found = {path.relative_to(EXAMPLES).with_suffix("").as_posix() for path in EXAMPLES.rglob("*.py")}
    assert {name for name in found if not name.startswith("extend/")} == {
        *CASES, *TRAINERS, "trainers/plain_loop"
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_example_runs_at_small_sizes(name: str) -> None:
    arguments, holds, _ = CASES[name]
    found = run(name, *arguments.split())
    assert holds(found), found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_example_does_what_it_says(name: str) -> None:
    found = run(name)
    assert CASES[name][2](found), found
