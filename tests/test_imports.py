"""Imports point one way, the library needs torch alone, and it never prints."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import blockhf

SOURCE = Path(blockhf.__file__).parent

# A room may import from the floors below its own. A new room gets its place here.
FLOORS = [
    {"_torch", "batches", "policy", "scalars"},
    {"blocks", "flops", "fx_graphs", "linalg", "objective", "report"},
    {"diagnosis", "isolation", "ledger", "ranks", "rotation", "compile"},
    {"samples"},
    {"curvature"},
    {"point", "preconditioners"},
    {"policies"},
    {"plan", "points"},
    {"meshes"},
    {"hints", "meeting", "options", "update", "walkers"},
    {"bookkeeping", "walking"},
    {"opening"},
    {"methods"},
    {"optimizer"},
    {"examination", "fitting", "integrations"},
    {"check"},
    {"__init__"},
    {"__main__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# What a file may import inside of a function, for those who have it.
OPTIONAL = {"curvature/linearize.py": {"scipy"}}

FILES = sorted(SOURCE.rglob("*.py"))


def label(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


each_file = pytest.mark.parametrize("file", FILES, ids=label)


def files_of(room: str) -> list[Path]:
    return [file for file in FILES if room_of(file) == room]


def imported(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Each module that a file imports from, with the names it takes; inside functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{label(file)} has a relative import; write it out."
            assert node.module is not None
            yield node.module, [alias.name for alias in node.names]


def rooms_used(file: Path) -> set[str]:
    rooms: set[str] = set()
    for module, names in imported(file):
        parts = module.split(".")
        if parts[0] != "blockhf":
            continue
        if len(parts) > 1:
            rooms.add(parts[1])
        else:  # `from blockhf import blocks` is the room, `import BlockHF` the whole house
            rooms.update(name if name in FLOOR else "__init__" for name in names or ["__init__"])
    return rooms


def test_the_files_are_found() -> None:
    assert {room_of(file) for file in FILES} == set(FLOOR), "A room has no place in FLOORS, or is gone."
    assert rooms_used(SOURCE / "policies" / "search.py") == {"point", "policy", "scalars"}


@each_file
def test_imports_point_one_way(file: Path) -> None:
    room = room_of(file)
    for used in rooms_used(file) - {room}:
        assert FLOOR[used] < FLOOR[room], f"{label(file)} must not import {used}."


@each_file
def test_the_library_needs_nothing_but_torch(file: Path) -> None:
    needed = {module.split(".")[0] for module, _ in imported(file)}
    optional = OPTIONAL.get(file.relative_to(SOURCE).as_posix(), set())
    assert needed - optional <= {"torch", "blockhf", *sys.stdlib_module_names}
    at_once = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)]
    assert not {str(node.module).split(".")[0] for node in at_once} & optional


@each_file
def test_the_library_knows_nothing_of_the_lab(file: Path) -> None:
    assert "blockhf_lab" not in file.read_text(), f"{label(file)} must not import the lab, nor by its name."


@pytest.mark.parametrize("file", files_of("linalg"), ids=label)
def test_linear_algebra_has_never_heard_of_networks_nor_of_autograd(file: Path) -> None:
    assert rooms_used(file) <= {"linalg", "policy", "scalars"}
    assert {module for module, _ in imported(file) if module.startswith("torch")} <= {"torch"}
    names = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
    assert not names & {
        "autograd", "func", "nn", "grad", "backward", "requires_grad", "enable_grad", "no_grad"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["policies/damping.py", "policies/sampling.py"])
def test_damping_and_sampling_see_only_numbers(name: str) -> None:
    modules = {module for module, _ in imported(SOURCE / name)}
    assert modules <= sys.stdlib_module_names | {"blockhf.policy", "collections.abc"}


def test_the_plan_is_made_of_numbers_and_draws_and_placement_of_numbers_alone() -> None:
    assert not any(module.startswith("torch") for module, _ in imported(SOURCE / "meshes" / "placement.py"))
    assert rooms_used(SOURCE / "plan.py") == {"batches", "policies", "policy"}
    assert {module for module, _ in imported(SOURCE / "plan.py") if module.startswith("torch")} == {"torch"}


def test_the_optimizer_does_not_ask_whether_there_is_a_mesh() -> None:
    assert not {"Local", "Distributed"} & {
        name for _, names in imported(SOURCE / "optimizer.py") for name in names
    }


@pytest.mark.parametrize("file", [file for file in FILES if room_of(file) != "__main__"], ids=label)
def test_the_library_never_prints(file: Path) -> None:
    calls = [
        node.func.id
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert "print" not in calls


def test_every_public_name_is_there_once() -> None:
    assert len(blockhf.__all__) == len(set(blockhf.__all__))
    assert all(hasattr(blockhf, name) for name in blockhf.__all__)
