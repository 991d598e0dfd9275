"""Train with checkpoints; resume from the newest one when the job restarts.

poseidon run --hostfile=machinefiles/localserver --max_restarts=1 examples/torch_resume/train.py --lose_at=45
poseidon run --hostfile=machinefiles/localserver examples/torch_resume/train.py
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from poseidon.cli.entry import use_environment

use_environment()

import torch
from torch import nn
from torch.utils.data import TensorDataset

import poseidon

EPOCHS, BATCH, SAVE_EVERY = 5, 16, 20


def records() -> TensorDataset:
    """Return points, and the side of a curve on which they are."""
    random = torch.Generator().manual_seed(1)
    x = torch.rand(512, 2, generator=random) * 4 - 2
    return TensorDataset(x, (x[:, 1] > torch.sin(2 * x[:, 0])).long())


def digest(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters."""
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--lose_at", type=int, default=0, help="the last worker dies once, in this step"
    )
    flags = parser.parse_args()
    torch.manual_seed(poseidon.this_worker().rank)  # another dropout on each worker
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    with poseidon.distribute(model, optimizer) as group:
        group.keep(scheduler=scheduler)
        loader = group.loader(records(), BATCH)
        resumed = group.resume()
        if resumed:
            print(f"continuing at step {group.steps}, epoch {loader.sampler.epoch + 1}")
        for epoch in range(loader.sampler.epoch, EPOCHS):
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                if not group.step():
                    continue  # another virtual worker of this worker is next in the same step
                if group.steps % SAVE_EVERY == 0 or group.stopping:
                    group.save()
                if group.stopping:
                    return
                if group.steps == flags.lose_at and group.rank == group.size - 1 and not resumed:
                    os.kill(os.getpid(), signal.SIGKILL)
            scheduler.step()
            print(f"epoch {epoch + 1}: loss {group.mean(loss):.4f}")
        group.settle()
        print(f"weights {digest(model)}")


if __name__ == "__main__":
    main()
