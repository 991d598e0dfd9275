"""A student that learns from its own moving average, with several crops and a common center."""

import copy
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import log_softmax, normalize, softmax
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm


class Head(nn.Module):
    def __init__(self, width=32, out=24):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, 16))
        self.last_layer = weight_norm(nn.Linear(16, out, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last_layer(normalize(self.mlp(x), dim=-1))


class MultiCrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        )
        self.head = Head()

    def forward(self, crops):
        sizes = torch.tensor([c.shape[-1] for c in crops])
        ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
        start, output = 0, torch.empty(0)
        for end in ends:
            output = torch.cat((output, self.backbone(torch.cat(crops[start:end]))))
            start = end
        return self.head(output)


class Loss(nn.Module):
    def __init__(self, out=24, crops=4):
        super().__init__()
        self.crops = crops
        self.register_buffer("center", torch.zeros(1, out))

    def forward(self, student, teacher):
        student = (student / 0.1).chunk(self.crops)
        targets = softmax((teacher - self.center) / 0.04, dim=-1).detach().chunk(2)
        total, terms = 0, 0
        for iq, q in enumerate(targets):
            for v, s in enumerate(student):
                if v != iq:
                    total += torch.sum(-q * log_softmax(s, dim=-1), dim=-1).mean()
                    terms += 1
        self.update_center(teacher)
        return total / terms

    @torch.no_grad()
    def update_center(self, teacher):
        center = torch.sum(teacher, dim=0, keepdim=True)
        dist.all_reduce(center)
        center = center / (len(teacher) * dist.get_world_size())
        self.center = self.center * 0.9 + center * 0.1


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
student = MultiCrop()
teacher = copy.deepcopy(student)
student = DistributedDataParallel(student)
for p in teacher.parameters():
    p.requires_grad = False
loss_fn = Loss()
optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
generator, seconds = torch.Generator().manual_seed(10 + rank), []
for step in range(10):
    began = time.perf_counter()
    crops = [torch.randn(4, 3, size, size, generator=generator) for size in (8, 8, 4, 4)]
    loss = loss_fn(student(crops), teacher(crops[:2]))
    optimizer.zero_grad()
    loss.backward()
    for name, p in student.named_parameters():
        if p.grad is not None:
            clip = 3.0 / (p.grad.data.norm(2) + 1e-6)
            if clip < 1:
                p.grad.data.mul_(clip)
            if "last_layer" in name and step < 2:
                p.grad = None
    optimizer.step()
    with torch.no_grad():
        m = 0.99
        for q, k in zip(student.module.parameters(), teacher.parameters(), strict=True):
            k.data.mul_(m).add_((1 - m) * q.detach().data)
    seconds.append(time.perf_counter() - began)
    if rank == 0:
        print(f"step {step} loss {loss.item():.6f} center {loss_fn.center.norm().item():.6f}")
if rank == 0:
    print(f"seconds {median(seconds):.4f}")
dist.destroy_process_group()
