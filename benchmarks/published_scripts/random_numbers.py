"""A script of DistributedDataParallel that seeds torch, numpy and random as reproducibility guides
say: first the same on all workers, then by rank.

It prints the numbers of both workers: dropout, crops and flips in this process and in the loader's,
and what each generator gives next.
"""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Crops(Dataset):
    """Pictures, cropped at random."""

    def __init__(self):
        numbers = torch.Generator().manual_seed(1)
        self.pictures_NHW = torch.rand(24, 12, 12, generator=numbers)

    def __len__(self):
        return len(self.pictures_NHW)

    def __getitem__(self, index):
        top, left = random.randrange(4), int(torch.randint(4, ()))
        picture = self.pictures_NHW[index, top : top + 8, left : left + 8]
        if np.random.rand() < 0.5:
            picture = picture.flip(1)
        return picture, torch.tensor([top, left, np.random.rand(), random.random()])


def seed_worker(number):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
masks = []
for by_rank in (0, 1):
    seed_all(3 + rank * by_rank)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1)
    )
    model = DistributedDataParallel(net)
    net[3].register_forward_hook(lambda _m, _i, output: masks.append(output.detach() != 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for processes in (0, 2):
        sampler = DistributedSampler(Crops(), shuffle=True, seed=by_rank)
        loader = DataLoader(
            Crops(), 4, sampler=sampler, num_workers=processes, worker_init_fn=seed_worker
        )
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for step, (pictures, drawn) in enumerate(loader):
                optimizer.zero_grad()
                loss = model(pictures).square().mean()
                loss.backward()
                optimizer.step()
                places = torch.arange(1.0, 33.0)
                mask = masks.pop().float().mv(places).tolist()
                own = [loss.item(), *drawn.flatten().tolist(), *mask]
                own += [torch.rand(()).item(), np.random.rand(), random.random()]
                every = [None] * size
                dist.all_gather_object(every, own)
                if rank == 0:
                    numbers = " ".join(f"{number:.9f}" for one in every for number in one)
                    print(f"{by_rank} {processes} {epoch} {step}: loss and numbers {numbers}")
dist.destroy_process_group()
