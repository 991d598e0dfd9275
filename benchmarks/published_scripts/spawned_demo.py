"""Three small demonstrations, each of which spawns its workers and joins them."""

import os
import tempfile
import time
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

CHECKPOINT = os.path.join(tempfile.gettempdir(), f"toy_{os.getuid()}.checkpoint")


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12955"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def train(rank, model, steps):
    loss_fn, optimizer, seconds = nn.MSELoss(), optim.SGD(model.parameters(), lr=0.01), []
    for step in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_fn(model(torch.randn(20, 10)), torch.randn(20, 5))
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}")
    return seconds


def demo_basic(rank, world_size):
    setup(rank, world_size)
    torch.manual_seed(rank)
    seconds = train(rank, DDP(ToyModel()), 10)
    if rank == 0:
        print(f"seconds {median(seconds):.4f}", flush=True)
    cleanup()


def demo_checkpoint(rank, world_size):
    setup(rank, world_size)
    torch.manual_seed(10 + rank)
    model = DDP(ToyModel())
    if rank == 0:
        torch.save(model.state_dict(), CHECKPOINT)
    dist.barrier()
    model.load_state_dict(torch.load(CHECKPOINT, map_location="cpu", weights_only=True))
    train(rank, model, 3)
    dist.barrier()
    if rank == 0:
        os.remove(CHECKPOINT)
        print("checkpoint loaded", flush=True)
    cleanup()


def run_demo(demo, world_size):
    mp.spawn(demo, args=(world_size,), nprocs=world_size, join=True)


if __name__ == "__main__":
    run_demo(demo_basic, 2)
    run_demo(demo_checkpoint, 2)
