"""Train a small classifier with Lightning on all workers of a job.

poseidon run --hostfile=machinefiles/localserver examples/lightning/train.py
python examples/lightning/train.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from poseidon.cli.entry import use_environment

use_environment()

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import poseidon.lightning  # noqa: F401 - registers the strategy "poseidon"


class Classifier(lightning.LightningModule):
    """A net that says on which side of a curve a point is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 64, bias=False),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
        )
        self.scores = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.net(x))
        return scores

    def training_step(self, batch: Sequence[Tensor], number: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Sequence[Tensor], number: int) -> None:
        x, y = batch
        scores = self(x)
        self.log("accuracy", (scores.argmax(1) == y).float().mean(), sync_dist=True)
        self.log("test_loss", nn.functional.cross_entropy(scores, y), sync_dist=True)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[object]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]

    def on_train_epoch_end(self) -> None:
        found = {name: f"{value:.9f}" for name, value in self.trainer.callback_metrics.items()}
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch + 1}: {found}", flush=True)


def points(count: int, seed: int) -> TensorDataset:
    """Return points, and the side of a curve on which they are."""
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 2, generator=random) * 4 - 2
    return TensorDataset(x, (x[:, 1] > torch.sin(2 * x[:, 0])).long())


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--strategy", default="poseidon")
    parser.add_argument("--devices", default="auto", help="of another strategy, as ddp")
    parser.add_argument("--precision", default="32-true", help="as bf16-mixed")
    parser.add_argument("--folder", help="of checkpoints; training resumes from the last one")
    flags = parser.parse_args(words)
    lightning.seed_everything(1)
    trainer = lightning.Trainer(
        strategy=flags.strategy,
        devices=flags.devices,
        max_epochs=flags.epochs,
        precision=flags.precision,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(flags.folder, save_last=True)] if flags.folder else [],
        enable_checkpointing=flags.folder is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Classifier(),
        DataLoader(points(512, seed=1), 16, shuffle=True),
        DataLoader(points(200, seed=2), 20),
        ckpt_path="last" if flags.folder else None,
    )


if __name__ == "__main__":
    main()
