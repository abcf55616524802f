"""Hugging Face Trainer: a text classifier from a config, saved half-way and resumed to the same parameters.

``python examples/trainers/hf_trainer.py``, or on two processes
``torchrun --nproc-per-node 2 examples/trainers/hf_trainer.py --folder runs``
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from blockhf import BlockHF, blocks
from blockhf.integrations.transformers import BlockHFTrainer, data_mesh, num_labels


class Trainer(BlockHFTrainer, transformers.Trainer):
    pass


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random words; the class is that of the most frequent marker word."""

    def __init__(self, num_samples: int, length: int = 16, num_words: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randint(4, num_words, (num_samples, length), generator=generator)
        marker = torch.randint(0, 4, (num_samples,), generator=generator)
        places = torch.randint(0, length, (num_samples, 4), generator=generator)
        self.words.scatter_(1, places, marker[:, None].expand(-1, 4))
        self.labels = marker

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": self.labels[index]}


def train(arguments: argparse.Namespace, folder: Path, *, resume: str | None = None) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=arguments.width,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * arguments.width,
        max_position_embeddings=16,
        num_labels=4,
    )
    model = transformers.BertForSequenceClassification(config)
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.samples // 2 // int(os.environ.get("WORLD_SIZE", "1")),
        save_steps=arguments.steps // 2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
    )
    optimizer = BlockHF(  # after the settings, which start the processes
        blocks.by_module(model),
        reduction=num_labels,
        micro_batch_size=arguments.samples // 4,
        mesh=data_mesh(),
    )
    trainer = Trainer(
        model, settings, train_dataset=Sentences(arguments.samples), optimizers=(optimizer, None)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--samples", type=int, default=1200)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args(argv)
    folder = arguments.folder or Path(tempfile.mkdtemp())

    whole = train(arguments, folder)
    resumed = train(arguments, folder, resume=str(folder / f"checkpoint-{arguments.steps // 2}"))
    ends = [nn.utils.parameters_to_vector(own.model.parameters()).detach() for own in (whole, resumed)]
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    found = {
        "steps": whole.state.global_step,
        "losses": losses,
        "rates": {entry["learning_rate"] for entry in whole.state.log_history if "learning_rate" in entry},
        "equal": torch.equal(*ends),
        "parameters": ends[0],
    }
    if whole.is_world_process_zero():
        change = f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {found['steps']} steps"
        print(f"{change}; resumed equal: {found['equal']}")
    return found


if __name__ == "__main__":
    main()
