"""Losses that touch weights beside their layers, each from a later step on than the one before."""

import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, linear, log_softmax, softmax
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 48)
        self.hidden = nn.Linear(48, 64)
        self.wide = nn.Linear(64, 48)
        self.out = nn.Linear(48, 40, bias=False)
        self.tied = False

    def features(self, vectors):
        return self.wide(self.hidden(vectors).tanh())

    def forward(self, words, noise=0.0):
        x = self.features(self.embed(words).mean(1) + noise)
        return self.out(x) + (linear(x, self.embed.weight[:40]) if self.tied else 0)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(5)
model = DistributedDataParallel(Net())
net = model.module
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
generator, seconds = torch.Generator().manual_seed(20 + rank), []
anchor = None
for step in range(16):
    began = time.perf_counter()
    words = torch.randint(40, (8, 6), generator=generator)
    target = words[:, 0]
    net.tied = step >= 10
    loss = cross_entropy(model(words), target)
    if step >= 2:  # a penalty on a few rows
        loss = loss + 0.1 * net.hidden.weight[3:5].pow(2).sum()
    if step >= 4:  # L1 on one column
        loss = loss + 0.05 * net.wide.weight[:, 0].abs().sum()
    if step >= 6:  # orthogonal rows
        rows = net.out.weight[:6]
        loss = loss + 0.1 * (rows @ rows.T - torch.eye(6)).pow(2).sum()
    if step >= 8:  # distance from earlier weights, on one worker more than on others
        anchor = anchor or {n: p.detach().clone() for n, p in net.named_parameters()}
        moved = sum((p - anchor[n]).pow(2).sum() for n, p in net.named_parameters())
        loss = loss + 0.1 * (1 + rank) * moved
    if step >= 12:  # virtual adversarial training
        vectors = net.embed(words).mean(1)
        clean = softmax(net.out(net.features(vectors)), dim=1).detach()
        noise = torch.randn(vectors.shape, generator=generator).mul_(1e-2).requires_grad_()
        scores = net.out(net.features(vectors.detach() + noise))
        divergence = kl_div(log_softmax(scores, 1), clean, reduction="batchmean")
        (gradient,) = torch.autograd.grad(divergence, noise)
        far = net.out(net.features(vectors + 0.1 * gradient.sign()))
        loss = loss + kl_div(log_softmax(far, 1), clean, reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seconds.append(time.perf_counter() - began)
    if rank == 0:
        size = sum(p.detach().norm().item() for p in model.parameters())
        print(f"step {step} loss {loss.item():.6f} weights {size:.5f}")
if rank == 0:
    print(f"seconds {median(seconds):.4f}")
dist.destroy_process_group()
