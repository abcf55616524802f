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
    {"_torch"},
    {"flops", "fx_graphs"},
    {"blocks", "operators", "report", "objective"},
    {"compile"},
    {"curvature", "solvers"},
    {"preconditioners", "damping", "sampling", "search"},
    {"distributed"},
    {"optimizer"},
    {"__init__"},
    {"__main__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The objective is asked near a point, which is made of blocks.
ON_ONE_FLOOR = {("objective", "blocks"), ("objective", "operators")}

FILES = sorted(SOURCE.rglob("*.py"))


def label(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


each_file = pytest.mark.parametrize("file", FILES, ids=label)


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
    assert {"blocks", "curvature", "solvers", "search", "optimizer"} <= {room_of(file) for file in FILES}
    assert rooms_used(SOURCE / "search.py") == {"objective", "operators", "solvers"}


@each_file
def test_imports_point_one_way(file: Path) -> None:
    room = room_of(file)
    assert room in FLOOR, f"The room {room!r} has no place in FLOORS; give it one."
    for used in rooms_used(file) - {room}:
        below = FLOOR[used] < FLOOR[room]
        assert below or (room, used) in ON_ONE_FLOOR, f"{label(file)} must not import {used}."


@each_file
def test_the_library_needs_nothing_but_torch(file: Path) -> None:
    needed = {module.split(".")[0] for module, _ in imported(file)}
    assert needed <= {"torch", "blockhf", *sys.stdlib_module_names}


@each_file
def test_the_library_knows_nothing_of_the_lab(file: Path) -> None:
    assert "blockhf_lab" not in file.read_text(), f"{label(file)} must not import the lab, nor by its name."


def test_the_solver_has_never_heard_of_networks() -> None:
    assert rooms_used(SOURCE / "solvers.py") == {"operators"}
    assert not any(module.startswith("torch.nn") for module, _ in imported(SOURCE / "solvers.py"))


def test_damping_sees_only_numbers() -> None:
    assert {module for module, _ in imported(SOURCE / "damping.py")} <= sys.stdlib_module_names


def test_operators_know_no_autograd() -> None:
    tree = ast.parse((SOURCE / "operators.py").read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & {"autograd", "func", "grad", "backward", "requires_grad", "enable_grad", "no_grad"}


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
