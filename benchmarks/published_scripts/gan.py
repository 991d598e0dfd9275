"""A GAN with a gradient penalty, lazy regularization, and a moving average of the generator."""

import copy
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import autograd, nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel


def requires_grad(model, flag):
    for p in model.parameters():
        p.requires_grad = flag


def accumulate(ema, model, decay):
    own, new = dict(ema.named_parameters()), dict(model.named_parameters())
    for name in own:
        own[name].data.mul_(decay).add_(new[name].data, alpha=1 - decay)


def gradient_penalty(critic, real, fake):
    alpha = torch.rand(len(real), 1)
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    (gradient,) = autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((gradient.norm(2, dim=1) - 1) ** 2).mean()


def r1(scores, real):
    (gradient,) = autograd.grad(scores.sum(), real, create_graph=True)
    return gradient.pow(2).flatten(1).sum(1).mean()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3)
generator = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 12))
critic = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
g_ema = copy.deepcopy(generator).eval()
generator = DistributedDataParallel(generator, broadcast_buffers=False)
critic = DistributedDataParallel(critic, broadcast_buffers=False)
g_optim = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.99))
d_optim = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.99))
torch.manual_seed(100 + rank)
seconds = []
for step in range(12):
    began = time.perf_counter()
    real = torch.randn(16, 12) * 0.5 + 1
    requires_grad(generator, False)
    requires_grad(critic, True)
    fake = generator(torch.randn(16, 8))
    d_loss = softplus(-critic(real)).mean() + softplus(critic(fake)).mean()
    d_loss = d_loss + 10 * gradient_penalty(critic, real, fake.detach())
    critic.zero_grad()
    d_loss.backward()
    d_optim.step()
    if step % 4 == 3:  # lazy regularization
        real.requires_grad = True
        scores = critic(real)
        critic.zero_grad()
        (5 * r1(scores, real) + 0 * scores[0, 0]).backward()
        d_optim.step()
    requires_grad(generator, True)
    requires_grad(critic, False)
    g_loss = softplus(-critic(generator(torch.randn(16, 8)))).mean()
    generator.zero_grad()
    g_loss.backward()
    g_optim.step()
    accumulate(g_ema, generator.module, 0.9)
    seconds.append(time.perf_counter() - began)
    if rank == 0:
        size = sum(p.norm().item() for p in g_ema.parameters())
        print(f"step {step} loss {d_loss.item():.6f} {g_loss.item():.6f} ema {size:.5f}")
if rank == 0:
    print(f"seconds {median(seconds):.4f}")
dist.destroy_process_group()
