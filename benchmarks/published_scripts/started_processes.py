"""Workers started one by one as `multiprocessing.Process`, which average gradients themselves."""

import os
import time
from math import ceil
from random import Random
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.functional import nll_loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(144, 4)

    def forward(self, x):
        return self.fc(self.dropout(self.conv(x).relu().flatten(1))).log_softmax(1)


def partition(size, rank):
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(4, (96,), generator=generator)
    images = torch.randn(96, 1, 8, 8, generator=generator) + labels[:, None, None, None]
    order = list(range(96))
    Random(1234).shuffle(order)
    own = order[rank * 96 // size : (rank + 1) * 96 // size]
    return torch.utils.data.TensorDataset(images[own], labels[own])


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run(rank, size):
    torch.manual_seed(1234)
    data = torch.utils.data.DataLoader(partition(size, rank), batch_size=16, shuffle=True)
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    seconds = []
    for epoch in range(3):
        epoch_loss = 0.0
        for images, target in data:
            began = time.perf_counter()
            optimizer.zero_grad()
            loss = nll_loss(model(images), target)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            seconds.append(time.perf_counter() - began)
        if rank == 0:
            print(f"epoch {epoch} loss {epoch_loss / ceil(96 / 16 / size):.6f}")
    if rank == 0:
        print(f"seconds {median(seconds):.4f}", flush=True)


def init_process(rank, size, fn, backend="gloo"):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29574"
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = 2
    processes = []
    mp.set_start_method("spawn")
    for rank in range(world_size):
        p = mp.Process(target=init_process, args=(rank, world_size, run))
        p.start()
        processes.append(p)
    for p in processes:
        p.join()
        assert p.exitcode == 0
