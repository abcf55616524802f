"""A mesh of processes does what one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ranks
from mesh_tasks import METHODS, in_one_process

SHAPES = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1)]
OFTEN = ("paper", "martens", "default")
UNEVEN = ("paper", "martens", "no held-out samples", "few", "sum")
# Every method on one mesh of both dimensions, and a few on all; all on all is for a longer look.
CASES = [
    pytest.param(
        shape,
        uneven,
        name,
        marks=() if shape == (2, 2) or (not uneven and name in OFTEN) else pytest.mark.slow,
        id=f"{shape[0]}x{shape[1]}-{'uneven' if uneven else 'even'}-{name}",
    )
    for shape in SHAPES
    for uneven in (False, True)
    for name in (UNEVEN if uneven else METHODS)
    if not (uneven and shape == (1, 1))
]

Runs = Callable[[tuple[int, int], bool, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The results of the ranks of a mesh: all methods in one start of its processes."""
    found: dict[Any, list[dict[str, Any]]] = {}

    def get(shape: tuple[int, int], uneven: bool, name: str) -> list[dict[str, Any]]:
        often = name in OFTEN and not uneven and shape != (2, 2)
        if (shape, uneven, often) not in found:
            names = UNEVEN if uneven else OFTEN if often else list(METHODS)
            found[shape, uneven, often] = ranks.run(
                shape[0] * shape[1],
                "mesh_tasks:on_mesh",
                tmp_path_factory.mktemp("mesh"),
                shape,
                names,
                uneven,
            )
        return found[shape, uneven, often]

    return get


@pytest.mark.parametrize(("shape", "uneven", "name"), CASES)
def test_a_mesh_does_what_one_process_does(
    runs: Runs, shape: tuple[int, int], uneven: bool, name: str
) -> None:
    found = [rank[name] for rank in runs(shape, uneven, name)]
    expected = in_one_process(shape, name, uneven)
    keys = ["gradient", "directions", "parameters"]
    if uneven and name == "sum":  # without held-out samples, the curvature is that of others
        keys.remove("directions")
    for own in found:
        for key in ("loss", "losses", "dampings"):
            assert own[key] == pytest.approx(expected[key], rel=1e-6), key
        for key in keys:
            assert float((own[key] - expected[key]).norm()) < 1e-6 * float(expected[key].norm()), key
        assert torch.equal(own["parameters"], found[0]["parameters"])
        assert own["step"] == expected["step"]
        assert own["cg"] == expected["cg"]
