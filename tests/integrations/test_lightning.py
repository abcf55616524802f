"""Lightning's own Trainer, current release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from children import starts_processes
from integration_tasks import example, run

pytestmark = [pytest.mark.filterwarnings("ignore"), starts_processes]

TINY = ("--samples", "800", "--width", "16", "--epochs", "4")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    pytest.importorskip("lightning")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("trainers/lightning_module", *TINY, "--folder", str(tmp_path_factory.mktemp("alone")))


def test_a_run_trains_counts_its_steps_logs_and_resumes_to_equal_parameters(alone: Any) -> None:
    assert alone["equal"]
    assert alone["steps"] == 16
    assert alone["accuracy"] > 0.5
    assert {"train/loss", "train/loss_after", "train/damping/0", "val/loss"} <= set(alone["logged"])


def test_two_processes_share_their_samples_and_resume(tmp_path: Path) -> None:
    arguments = (*TINY, "--devices", "2", "--folder", str(tmp_path / "run"))
    first, second = ranks.run(
        2, "integration_tasks:run", tmp_path / "ranks", "trainers/lightning_module", *arguments
    )
    for own in (first, second):
        assert own["equal"]
        assert own["steps"] == 8  # each process has half of the batches
        assert torch.equal(own["parameters"], first["parameters"])
    assert first["accuracy"] > 0.4


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)],
)
def test_precision_plug_ins_are_honoured(
    precision: str, dtype: torch.dtype, alone: Any, tmp_path: Path
) -> None:
    own = run("trainers/lightning_module", *TINY, "--precision", precision, "--folder", str(tmp_path))
    assert own["equal"]
    assert own["accuracy"] > 0.5
    assert not torch.equal(own["parameters"].float(), alone["parameters"])
    assert own["parameters"].dtype == dtype


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 4}, "accumulate_grad_batches=4, .*pass micro_batch_size= to BlockHF"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0, .*The search takes its place"),
        ({"precision": "16-mixed"}, "precision='16-mixed', .*Use bfloat16"),
    ],
    ids=["accumulation", "clipping", "float16"],
)
def test_settings_that_mean_nothing_are_refused_with_the_remedy(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import lightning

    module = example("trainers/lightning_module")
    options = {"accelerator": "cpu", "logger": False, "default_root_dir": tmp_path, **options}
    if options.get("precision"):  # without a GPU Lightning itself would complain first
        monkeypatch.setattr(lightning.Trainer, "precision", property(lambda _: "16-mixed"))
        del options["precision"]
    trainer = lightning.Trainer(**options, enable_progress_bar=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=message):
        trainer.fit(module.Classifier(8), *module.loaders(80))


def test_hooks_before_the_step_are_called_once(tmp_path: Path) -> None:
    import lightning

    module = example("trainers/lightning_module")
    called: list[str] = []

    class Counting(lightning.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            called.append(type(optimizer).__name__)

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=3,
        callbacks=[Counting()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module.Classifier(8), *module.loaders(400))
    assert called == ["BlockHF"] * 3
    assert trainer.global_step == 3


def test_automatic_optimization_stays_off() -> None:
    module = example("trainers/lightning_module").Classifier(8)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="Leave automatic_optimization at False"):
        module.automatic_optimization = True
