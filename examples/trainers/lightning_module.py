"""Lightning: a classifier that trains with BlockHF, is saved half-way, and resumes to the same parameters.

``python examples/trainers/lightning_module.py --devices 2``
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from blockhf import BlockHF, blocks
from blockhf.integrations.lightning import BlockHFModule, data_mesh


class Classifier(BlockHFModule, lightning.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 5))

    def objective(self, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        logits = self.network(inputs)
        return logits, F.cross_entropy(logits, targets)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, loss = self.objective(batch)
        accuracy = (logits.argmax(1) == batch[1]).float().mean()
        self.log_dict({"val/loss": loss, "val/accuracy": accuracy}, sync_dist=True)

    def configure_optimizers(self) -> BlockHF:
        return BlockHF(blocks.by_layer(self.network), weight_decay=1e-4, mesh=data_mesh())


def loaders(num_samples: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples + 500, 20, generator=generator)
    teacher = torch.randn(20, 5, generator=generator)
    data = TensorDataset(inputs, (inputs @ teacher + inputs[:, :5] ** 2).argmax(1))
    seen, unseen = (
        torch.utils.data.Subset(data, range(num_samples)),
        torch.utils.data.Subset(data, range(num_samples, num_samples + 500)),
    )
    return DataLoader(seen, batch_size=num_samples // 4), DataLoader(unseen, batch_size=500)


def fit(arguments: argparse.Namespace, folder: Path, epochs: int, resume: Path | None = None) -> Any:
    lightning.seed_everything(0, verbose=False)
    module = Classifier(arguments.width)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy="ddp" if arguments.devices > 1 else "auto",
        precision=arguments.precision,
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, *loaders(arguments.samples), ckpt_path=resume)
    return trainer


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    # The same on all processes.
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "blockhf-lightning")
    arguments = parser.parse_args(argv)
    folder = arguments.folder

    whole = fit(arguments, folder, arguments.epochs)
    half = fit(arguments, folder, arguments.epochs // 2)
    half.save_checkpoint(folder / "half.ckpt")
    resumed = fit(arguments, folder, arguments.epochs, folder / "half.ckpt")

    ends = [nn.utils.parameters_to_vector(own.lightning_module.parameters()) for own in (whole, resumed)]
    found = {
        "steps": whole.global_step,
        "accuracy": float(whole.callback_metrics["val/accuracy"]),
        "logged": sorted(whole.callback_metrics),
        "equal": torch.equal(*ends),
        "parameters": ends[0].detach(),
    }
    if whole.is_global_zero:
        print(f"{found['steps']} steps, accuracy {found['accuracy']:.3f}; resumed equal: {found['equal']}")
    return found


if __name__ == "__main__":
    main()
