"""Contrastive losses over the features of all workers, gathered with and without gradients."""

import time
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel


class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        output = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(output, x)
        return tuple(output)

    @staticmethod
    def backward(ctx, *grads):
        all_gradients = torch.stack(grads)
        dist.all_reduce(all_gradients)
        return all_gradients[dist.get_rank()]


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(20, 16), nn.Linear(12, 16)
        self.logit_scale = nn.Parameter(torch.ones([]) * 2.0)

    def forward(self, image, text):
        return (
            normalize(self.image(image), dim=-1),
            normalize(self.text(text), dim=-1),
            self.logit_scale.exp(),
        )


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(11)
model = DistributedDataParallel(Towers(), gradient_as_bucket_view=True, static_graph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
generator, seconds = torch.Generator().manual_seed(rank), []
for step in range(10):
    began = time.perf_counter()
    image = torch.randn(6, 20, generator=generator)
    features = model(image, image[:, :12] + 0.1)
    images, texts, scale = features
    if step % 2:
        all_images, all_texts = (
            torch.cat(GatherLayer.apply(images)),
            torch.cat(GatherLayer.apply(texts)),
        )
    else:
        all_images = torch.cat(torch.distributed.nn.all_gather(images))
        all_texts = torch.cat(torch.distributed.nn.all_gather(texts))
    labels = torch.arange(6) + 6 * rank
    loss = cross_entropy(scale * images @ all_texts.T, labels)
    loss = (loss + cross_entropy(scale * texts @ all_images.T, labels)) / 2
    correlation = all_images.T @ all_texts / (6 * size)
    loss = loss + 0.1 * (correlation - torch.eye(16)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.module.logit_scale.clamp_(0, 4.6)
    seconds.append(time.perf_counter() - began)
    if rank == 0:
        print(f"step {step} loss {loss.item():.6f} scale {scale.item():.6f}")
if rank == 0:
    print(f"seconds {median(seconds):.4f}")
dist.destroy_process_group()
