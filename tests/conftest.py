"""``pytest --device cuda``: the tests of devices, on a real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

OF_THEIR_OWN = "BLOCKHF_TEST_DEVICES"
"""Set where the tests of devices run in a process of their own."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", help="run the tests of devices, and no others, on this one instead of a pretended one"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests of devices: torch cannot forget the device that they pretend to have."""
    wanted = config.getoption("--device") or os.environ.get(OF_THEIR_OWN)
    return True if collection_path.name == "devices" and not wanted else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device"):
        chosen = [item for item in items if "devices" in item.path.parts]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
