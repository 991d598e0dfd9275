"""Train a small CNN with DistributedDataParallel. The script knows nothing of Poseidon.

poseidon run --ddp --hostfile=machinefiles/localserver examples/ddp/train.py
torchrun --nproc_per_node=2 examples/ddp/train.py
"""

from __future__ import annotations

import argparse
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = 4


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="of each worker")
    parser.add_argument("--accumulate", type=int, default=2, help="batches of a step")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--amp", action="store_true", help="float16 where autocast has it")
    parser.add_argument("--checkpoint", type=Path, help="written after each epoch, and resumed")
    parser.add_argument("--lose_at", type=int, help="the last worker dies in this step, once")
    return parser.parse_args()


def stripes(count: int, seed: int) -> TensorDataset:
    """Return noisy pictures (count, 1, 12, 12) of stripes in one of four directions."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=random)
    angle = labels * torch.pi / CLASSES
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    phase = torch.rand(count, generator=random) * 6
    across = torch.outer(angle.cos(), x.flatten()) + torch.outer(angle.sin(), y.flatten())
    pictures = (across + phase.unsqueeze(1)).sin().view(count, 1, 12, 12)
    return TensorDataset(pictures + torch.randn(pictures.shape, generator=random), labels)


def build_model() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ),
        *(
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ),
        *(nn.Flatten(), nn.Linear(32 * 9, CLASSES)),
    )


class Training:
    """A model and all that its training changes."""

    def __init__(self, flags: argparse.Namespace, device: torch.device) -> None:
        self.flags = flags
        self.device = device
        self.data = stripes(480, seed=1)
        self.sampler = DistributedSampler(self.data, seed=3)
        self.loader = DataLoader(self.data, flags.batch, sampler=self.sampler)
        ids = [device.index] if device.type == "cuda" else None
        self.model = DistributedDataParallel(build_model().to(device), device_ids=ids)
        self.optimizer = torch.optim.SGD(self.model.parameters(), flags.rate, momentum=0.9)
        steps = flags.epochs * (len(self.loader) // flags.accumulate)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.scaler = torch.amp.GradScaler(device.type, enabled=flags.amp)
        self.epoch = self.steps = 0
        self.is_resumed = False

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        if self.flags.checkpoint is None or not self.flags.checkpoint.exists():
            return
        state = torch.load(self.flags.checkpoint, map_location=self.device)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.epoch, self.steps = state["epoch"], state["steps"]
        self.is_resumed = True

    def save(self) -> None:
        """Write the checkpoint on rank 0: under another name first, so that it is never half
        written.
        """
        path = self.flags.checkpoint
        if path is not None and dist.get_rank() == 0:
            state = {
                name: getattr(self, name).state_dict()
                for name in ("optimizer", "scheduler", "scaler")
            }
            state |= {"model": self.model.module.state_dict()}
            torch.save(state | {"epoch": self.epoch, "steps": self.steps}, f"{path}.new")
            os.replace(f"{path}.new", path)
        dist.barrier()

    def train_epoch(self) -> float:
        """Train for an epoch. Return the mean loss of all workers."""
        self.model.train()
        self.sampler.set_epoch(self.epoch)
        total = torch.zeros((), device=self.device)
        for number, (x, y) in enumerate(self.loader, 1):
            is_last = number % self.flags.accumulate == 0
            with nullcontext() if is_last else self.model.no_sync():
                loss = self.loss(x, y)
                self.scaler.scale(loss / self.flags.accumulate).backward()
            total += loss.detach()
            if is_last:
                self.step()
        self.epoch += 1
        dist.all_reduce(total)
        return total.item() / len(self.loader) / dist.get_world_size()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.float16, enabled=self.flags.amp):
            scores = self.model(x.to(self.device))
            return nn.functional.cross_entropy(scores, y.to(self.device))

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.steps += 1
        is_last_rank = dist.get_rank() == dist.get_world_size() - 1
        if self.steps == self.flags.lose_at and is_last_rank and not self.is_resumed:
            os.kill(os.getpid(), signal.SIGKILL)

    @torch.no_grad()
    def validate(self) -> float:
        """Return the accuracy over all workers, each with its share of the pictures."""
        self.model.eval()
        data = stripes(200, seed=2)
        right = torch.zeros((), device=self.device)
        for x, y in DataLoader(data, 20, sampler=DistributedSampler(data, shuffle=False)):
            right += (self.model(x.to(self.device)).argmax(1) == y.to(self.device)).sum()
        dist.all_reduce(right)
        return right.item() / len(data)


def main() -> None:
    flags = read_flags()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(1)
    training = Training(flags, device)
    training.resume()
    while training.epoch < flags.epochs:
        loss = training.train_epoch()
        accuracy = training.validate()
        if dist.get_rank() == 0:
            print(f"epoch {training.epoch}: loss {loss:.9f}, accuracy {accuracy:.1%}", flush=True)
        training.save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
