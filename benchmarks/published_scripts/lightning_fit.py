"""Lightning's fit, validate and test with a datamodule that prepares its data.

It takes the strategy as its argument: ddp or poseidon.
"""

import os
import random
import sys
import time
from statistics import median

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

if sys.argv[1] == "poseidon":
    import poseidon.lightning  # noqa: F401 - registers the strategy


class Augmented(Dataset):
    """Records with noise of all generators, in a process of the loader."""

    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        x, y = self.records[index]
        x = x + 0.1 * torch.randn(12)
        x[0] += random.random()
        x[1] += np.random.rand()
        return x, y


class Data(L.LightningDataModule):
    def prepare_data(self):
        if not os.path.exists("data.pt"):
            generator = torch.Generator().manual_seed(0)
            labels = torch.randint(3, (120,), generator=generator)
            x = torch.randn(120, 12, generator=generator) + labels[:, None]
            torch.save((x, labels), "data.pt")

    def setup(self, stage):
        whole = TensorDataset(*torch.load("data.pt", weights_only=True))
        parts = random_split(whole, [80, 20, 20], torch.Generator().manual_seed(42))
        self.train, self.val, self.held_out = parts

    def train_dataloader(self):
        return DataLoader(Augmented(self.train), batch_size=8, shuffle=True, num_workers=1)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=5)

    def test_dataloader(self):
        return DataLoader(self.held_out, batch_size=5)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(12, 24, bias=False),  # before BatchNorm its gradient would be noise
            *(nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 3)),
        )
        self.seconds = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.began = time.perf_counter()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seconds.append(time.perf_counter() - self.began)
        if self.global_rank == 0:
            print(f"step {self.global_step} loss {outputs['loss'].item():.6f}")

    def _score(self, batch, stage):
        x, y = batch
        scores = self.net(x)
        self.log(f"{stage}_loss", nn.functional.cross_entropy(scores, y), sync_dist=True)
        self.log(f"{stage}_acc", (scores.argmax(1) == y).float().mean(), sync_dist=True)

    def validation_step(self, batch, batch_idx):
        self._score(batch, "val")

    def test_step(self, batch, batch_idx):
        self._score(batch, "test")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def main():
    L.seed_everything(7, workers=True)
    data, model = Data(), Model()
    best = L.pytorch.callbacks.ModelCheckpoint("checkpoints", monitor="val_loss", save_last=True)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=sys.argv[1],
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        callbacks=[best, L.pytorch.callbacks.LearningRateMonitor()],
        logger=L.pytorch.loggers.CSVLogger("logs"),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(model, data)
    found = trainer.validate(model, datamodule=data, verbose=False)[0]
    found |= trainer.test(datamodule=data, ckpt_path="best", verbose=False)[0]
    if trainer.is_global_zero:
        print(" ".join(f"{name} loss {value:.6f}" for name, value in sorted(found.items())))
        print(f"seconds {median(model.seconds):.4f}")


main()
