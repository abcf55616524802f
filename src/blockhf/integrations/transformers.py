"""Hugging Face transformers: a mixin for its ``Trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ConstantLR

from blockhf import blocks
from blockhf.integrations import ACCUMULATION, SCALER, data_mesh, refuse, require_mesh
from blockhf.optimizer import BlockHF

__all__ = ["BlockHFTrainer", "data_mesh", "num_labels"]


def num_labels(batch: Mapping[str, Tensor]) -> Tensor:
    """How many labels of a batch count: those that are not -100.

    ``BlockHF(..., reduction=num_labels)`` weighs micro-batches and ranks by it, because losses of language
    models are means over labels. Models that predict the next token do not count the first of a sequence.
    """
    return (batch["labels"] != -100).sum()


class BlockHFTrainer:
    """A ``transformers.Trainer`` that trains with BlockHF.

    Name the mixin first, and pass the optimizer, or have one made by the defaults::

        class Trainer(BlockHFTrainer, transformers.Trainer): ...

        args = transformers.TrainingArguments(...)     # starts the processes, so it comes first
        optimizer = BlockHF(blocks.by_module(model), mesh=data_mesh())
        Trainer(model, args, train_dataset=data, optimizers=(optimizer, None)).train()

    Each batch of the loader is one update, on the logits and the loss of ``compute_loss``. Checkpoints,
    callbacks and logging are the Trainer's own; the gradient's norm in its log is 0, as ``.grad`` is not
    used. Its default schedule, linear decay to zero, is off; another ``lr_scheduler_type``, or a scheduler
    that is passed with the optimizer, is used. ``learning_rate`` is not read.
    """

    accelerator: Any
    args: Any
    compute_loss: Any
    compute_loss_context_manager: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    _prepare_inputs: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own = self.args
        steps = own.gradient_accumulation_steps
        refuse(
            "TrainingArguments",
            {
                "gradient_accumulation_steps": (steps, steps != 1, ACCUMULATION),
                "fp16": (own.fp16, bool(own.fp16), SCALER),
                "n_gpu": (own.n_gpu, own.n_gpu > 1, "Start one process for each device by torchrun."),
            },
        )

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer that was passed, or the default method in blocks by module."""
        if self.optimizer is None:
            groups = blocks.by_module(self.model if model is None else model)
            self.optimizer = BlockHF(groups, weight_decay=self.args.weight_decay, mesh=data_mesh())
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule that was asked for, or none."""
        if self.lr_scheduler is None and self.args.lr_scheduler_type == "linear":
            self.lr_scheduler = ConstantLR(optimizer or self.optimizer, factor=1.0)
        base: Any = super()
        return base.create_scheduler(num_training_steps, optimizer)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One update."""
        network, trainer = self.accelerator.unwrap_model(model), self
        network.train()
        require_mesh(self.optimizer.optimizer)

        def objective(batch: Any) -> tuple[Tensor, Tensor]:
            with trainer.compute_loss_context_manager():
                loss, outputs = trainer.compute_loss(network, dict(batch), return_outputs=True)
            return outputs["logits"], loss

        loss: Tensor = self.optimizer.optimizer.step(objective, dict(self._prepare_inputs(inputs)))
        # This was the step: the one that the Trainer asks for next does nothing.
        self.accelerator.gradient_state.sync_gradients = False
        return loss.detach()
