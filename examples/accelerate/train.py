"""Train a small classifier with accelerate. The script knows nothing of Poseidon.

poseidon run --ddp --hostfile=machinefiles/localserver examples/accelerate/train.py
accelerate launch --cpu --num_processes=2 examples/accelerate/train.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def points(count: int, seed: int) -> TensorDataset:
    """Return points, and the side of a curve on which they are."""
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 2, generator=random) * 4 - 2
    return TensorDataset(x, (x[:, 1] > torch.sin(2 * x[:, 0])).long())


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--precision", default="no", help="as bf16")
    parser.add_argument("--folder", type=Path, help="of the state; training resumes from it")
    flags = parser.parse_args(words)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision=flags.precision,
        # the order follows from the epoch, so a run that resumes has it
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(1)
    model = nn.Sequential(
        nn.Linear(2, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    train = DataLoader(points(512, seed=1), 16, shuffle=True)
    test = DataLoader(points(205, seed=2), 20)  # the last batch is smaller
    model, optimizer, scheduler, train, test = accelerator.prepare(
        model, optimizer, scheduler, train, test
    )
    epoch = torch.zeros(1, dtype=torch.int64)
    accelerator.register_for_checkpointing(Epoch(epoch))
    if flags.folder and flags.folder.exists():
        accelerator.load_state(str(flags.folder))
    while epoch < flags.epochs:
        model.train()
        train.set_epoch(int(epoch))
        total = torch.zeros((), device=accelerator.device)
        for x, y in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.detach()
        model.eval()
        right = count = 0
        for x, y in test:
            with torch.no_grad():
                guesses, labels = accelerator.gather_for_metrics((model(x).argmax(1), y))
            right += int((guesses == labels).sum())
            count += len(labels)
        epoch += 1
        mean = accelerator.reduce(total, "mean").item() / len(train)
        accelerator.print(f"epoch {int(epoch)}: loss {mean:.9f}, {right} of {count} right")
        if flags.folder:
            accelerator.save_state(str(flags.folder))


class Epoch:
    """The number of finished epochs, for the state that accelerate saves."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number = number

    def state_dict(self) -> dict[str, int]:
        return {"epoch": int(self._number)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._number.fill_(state["epoch"])


if __name__ == "__main__":
    main()
