"""Lightning: a mixin for modules that train with BlockHF."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blockhf.integrations import ACCUMULATION, CLIPPING, SCALER, data_mesh, refuse, require_mesh, scalars

__all__ = ["BlockHFModule", "data_mesh"]


class BlockHFModule:
    """A LightningModule that trains with BlockHF, by Lightning's manual optimization.

    Write ``objective(batch)``, which returns outputs and loss, in place of ``training_step``, and name the
    mixin first::

        class Classifier(BlockHFModule, lightning.LightningModule):
            def objective(self, batch):
                inputs, targets = batch
                logits = self.network(inputs)
                return logits, F.cross_entropy(logits, targets)

            def configure_optimizers(self):
                return BlockHF(blocks.by_layer(self), mesh=data_mesh())

    Steps go through Lightning's own optimizer, so ``global_step``, ``max_steps``, checkpoints, callbacks and
    precision plug-ins work as ever. With several processes (``strategy="ddp"``) ``data_mesh()`` makes them
    share their samples. Schedulers are yours to step, as in any manual optimization.

    Attributes:
        log_prefix: What the report's numbers are logged under; ``None`` logs nothing.
    """

    log_prefix: str | None = "train/"
    trainer: Any
    optimizers: Any
    log_dict: Any
    double: Any

    @property
    def automatic_optimization(self) -> bool:
        """Lightning does not call ``backward``."""
        return False

    @automatic_optimization.setter
    def automatic_optimization(self, value: bool) -> None:
        if value:
            raise ValueError("BlockHF makes its own gradients. Leave automatic_optimization at False.")

    def objective(self, batch: Any) -> tuple[Any, Tensor]:
        """Outputs and loss for a batch."""
        raise NotImplementedError(
            f"{type(self).__name__} needs objective(batch), returning outputs and loss."
        )

    def configure_callbacks(self) -> list[Any]:
        """No callbacks, but the first chance to look at the trainer's settings."""
        trainer = self.trainer
        refuse(
            "The Trainer",
            {
                "accumulate_grad_batches": (
                    trainer.accumulate_grad_batches,
                    trainer.accumulate_grad_batches != 1,
                    ACCUMULATION,
                ),
                "gradient_clip_val": (trainer.gradient_clip_val, bool(trainer.gradient_clip_val), CLIPPING),
                "precision": (trainer.precision, trainer.precision == "16-mixed", SCALER),
            },
        )
        return []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """With ``64-true``, float64 before the parameters are loaded: Lightning itself makes it so after."""
        if self.trainer.precision == "64-true":
            self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One update; the report's numbers are logged."""
        optimizer = self.optimizers()
        if isinstance(optimizer, list):
            raise ValueError(
                f"There are {len(optimizer)} optimizers. Override training_step, and call "
                "optimizer.step(objective=..., batch=...) of each."
            )
        require_mesh(optimizer.optimizer)
        loss: Tensor = optimizer.step(objective=self.objective, batch=batch)
        if self.log_prefix is not None:
            self.log_dict(scalars(optimizer.report, self.log_prefix))
        return loss
