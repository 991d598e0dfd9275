"""Sharpness-aware minimization as its repositories run it on several GPUs: the first backward pass
under `no_sync`, so each worker moves its weights by its own gradients before the second one.
"""

import time
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        of_groups = [(group, p) for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for _, p in of_groups]).norm()
        for group, p in of_groups:
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad * group["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"]
        self.base.step()
        self.zero_grad()


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)))
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
generator, seconds = torch.Generator().manual_seed(rank), []
for step in range(20):
    began = time.perf_counter()
    x = torch.randn(8, 6, generator=generator)
    y = torch.randint(3, (8,), generator=generator)
    with model.no_sync():
        F.cross_entropy(model(x), y).backward()
    optimizer.first_step()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.second_step()
    seconds.append(time.perf_counter() - began)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step} loss {mean.item() / size:.6f}")
if rank == 0:
    print(f"seconds {median(seconds):.4f}")
dist.barrier()
dist.destroy_process_group()
