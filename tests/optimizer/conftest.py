"""What the tests of the optimizer's contract share: they hold for every factory."""

from __future__ import annotations

import pytest
import torch

from optimizer_tasks import FACTORIES, Factory


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=FACTORIES.values(), ids=FACTORIES.keys())
def factory(request: pytest.FixtureRequest) -> Factory:
    return request.param
