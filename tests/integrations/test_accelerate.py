"""Accelerate's own Accelerator, current release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from blockhf.integrations.accelerate import mesh_of
from children import starts_processes

pytestmark = [pytest.mark.filterwarnings("ignore"), starts_processes]

TINY = ("--samples", "800", "--width", "16", "--epochs", "4")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    pytest.importorskip("accelerate")


def run_on(num_ranks: int, folder: Path, *arguments: str) -> list[Any]:
    """In processes of their own: the accelerator's state is one for a process."""
    everything = (*TINY, "--folder", str(folder / "run"), *arguments)
    return ranks.run(
        num_ranks, "integration_tasks:run", folder / "ranks", "trainers/accelerate_loop", *everything
    )


def test_a_prepared_optimizer_trains_and_resumes_to_equal_parameters(tmp_path: Path) -> None:
    (own,) = run_on(1, tmp_path)
    assert own["equal"]
    assert own["processes"] == 1
    assert own["loss"] < 0.9


def test_two_processes_are_a_mesh_and_resume(tmp_path: Path) -> None:
    first, second = run_on(2, tmp_path)
    for own in (first, second):
        assert own["equal"]
        assert own["processes"] == 2
        assert torch.equal(own["parameters"], first["parameters"])
    assert first["loss"] < 0.9


def test_bfloat16_is_honoured(tmp_path: Path) -> None:
    (own,) = run_on(1, tmp_path, "--precision", "bf16")
    assert own["equal"]
    assert own["parameters"].dtype == torch.float32
    assert own["loss"] < 0.9


class Settings:
    """What ``mesh_of`` asks of an accelerator."""

    gradient_accumulation_steps, mixed_precision, num_processes = 1, "no", 1


def test_settings_that_mean_nothing_are_refused_with_the_remedy() -> None:
    settings = Settings()
    assert mesh_of(settings) is None
    settings.gradient_accumulation_steps = 4
    with pytest.raises(
        ValueError, match=r"gradient_accumulation_steps=4, .*pass micro_batch_size= to BlockHF"
    ):
        mesh_of(settings)
    settings.gradient_accumulation_steps, settings.mixed_precision = 1, "fp16"
    with pytest.raises(ValueError, match=r"mixed_precision='fp16', .*Use bfloat16"):
        mesh_of(settings)
