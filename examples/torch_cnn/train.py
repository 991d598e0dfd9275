"""Train a torch CNN on all workers of a job.

    poseidon run --hostfile=machinefiles/localserver examples/torch_cnn/train.py
    poseidon run --hostfile=machinefiles/localserver examples/torch_cnn/train.py --torch_optimizer
    python examples/torch_cnn/train.py

The pictures are made here: stripes of eight directions, under noise.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from poseidon.cli.entry import use_environment

use_environment()

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import poseidon

DIRECTIONS = 8
SIZE = 16


def pictures(count: int, seed: int) -> TensorDataset:
    """Return images of stripes of random position and width; the label is their direction."""
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(DIRECTIONS, (count,), generator=random)
    angle = (label * math.pi / DIRECTIONS).view(-1, 1, 1)
    width, place = torch.rand((2, count, 1, 1), generator=random)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = x * torch.cos(angle) + y * torch.sin(angle)
    stripes = torch.sin(along * (1 + width) + 2 * math.pi * place)
    noise = torch.randn((count, SIZE, SIZE), generator=random)
    return TensorDataset((stripes + 1.5 * noise).unsqueeze(1), label)


def cnn() -> nn.Module:
    """Two convolutions with BatchNorm, two fully-connected layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, DIRECTIONS),
    )


def accuracy(model: nn.Module, records: TensorDataset) -> float:
    """Return the part of the records whose direction is predicted correctly."""
    x, y = records.tensors
    model.eval()
    with torch.no_grad():
        right: Tensor = model(x).argmax(1) == y
    model.train()
    return right.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--records", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32, help="of each worker")
    parser.add_argument(
        "--torch_optimizer", action="store_true", help="torch.optim in place of a server's rule"
    )
    flags = parser.parse_args()
    train, test = pictures(flags.records, seed=1), pictures(1000, seed=2)
    model = cnn()
    how: poseidon.SGD | torch.optim.Optimizer
    if flags.torch_optimizer:
        how = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    else:
        how = poseidon.SGD(lr=0.05, momentum=0.9, weight_decay=1e-4)
    with poseidon.distribute(model, how, batch_size=flags.batch) as group:
        loader = DataLoader(train, batch_size=flags.batch, sampler=group.sampler(train))
        for epoch in range(flags.epochs):
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                group.step()
                group.log(loss=loss)
                if group.stopping:
                    return
            group.settle()
            right = accuracy(model, test)
            group.log(accuracy=right)
            print(f"epoch {epoch + 1}: loss {group.mean(loss):.3f}, accuracy {right:.1%}")


if __name__ == "__main__":
    main()
