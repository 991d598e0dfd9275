"""Train a small classifier with Ray Train over Poseidon's connections.

python examples/ray_train/train.py                   # on this machine
python examples/ray_train/train.py --address=auto    # on the cluster of this node
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from poseidon.cli.entry import use_environment

use_environment()

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from poseidon.ray_train import PoseidonConfig


def points(count: int, seed: int) -> TensorDataset:
    """Return points, and the side of a curve on which they are."""
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 2, generator=random) * 4 - 2
    return TensorDataset(x, (x[:, 1] > torch.sin(2 * x[:, 0])).long())


def train(config: dict[str, int]) -> None:
    """Train on one worker: a loop as Ray's documentation shows it."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
    model = prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = prepare_data_loader(DataLoader(points(480, seed=1), 16, shuffle=True))
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"))
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
    for epoch in range(first, config["epochs"]):
        loader.sampler.set_epoch(epoch)
        if epoch == config["lose_at"] and checkpoint is None and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.zeros(())
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        mean = total.item() / len(loader) / dist.get_world_size()
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, Path(folder, "state.pt"))
            is_writer = dist.get_rank() == 0
            ray.train.report(
                {"epoch": epoch + 1, "loss": mean, "backend": dist.get_backend()},
                checkpoint=Checkpoint.from_directory(folder) if is_writer else None,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--address", help="of a Ray cluster; without it one is started here")
    parser.add_argument("--folder", type=Path, default=Path("output/ray_train"))
    parser.add_argument("--lose_at", type=int, default=-1, help="worker 1 dies here, once")
    parser.add_argument("--encrypt", action="store_true", help="on one machine, too")
    flags = parser.parse_args()
    ray.init(address=flags.address)
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": flags.epochs, "lose_at": flags.lose_at},
        torch_config=PoseidonConfig(encrypt=flags.encrypt or None),
        scaling_config=ScalingConfig(num_workers=flags.workers),
        run_config=RunConfig(
            storage_path=str(flags.folder.absolute()),
            failure_config=FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()
    for _, metrics in result.best_checkpoints:
        print("epoch {epoch}: loss {loss:.9f}, over {backend}".format(**metrics))


if __name__ == "__main__":
    main()
