"""``pytest --device cuda``: the tests of devices, on a real one."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", help="run the tests of devices, and no others, on this one instead of a pretended one"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device"):
        chosen = [item for item in items if "devices" in item.path.parts]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
