"""Contrastive learning with a queue and a momentum encoder, both inside the DDP module."""

import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel


@torch.no_grad()
def concat_all_gather(tensor):
    gathered = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor, async_op=False)
    return torch.cat(gathered, dim=0)


def encoder():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))


class MoCo(nn.Module):
    def __init__(self, dim=8, K=64, m=0.99, T=0.07):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = encoder(), encoder()
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        keys = concat_all_gather(keys)
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + len(keys)] = keys.T
        self.queue_ptr[0] = (ptr + len(keys)) % self.K

    @torch.no_grad()
    def _batch_shuffle_ddp(self, x):
        own = x.shape[0]
        x_gather = concat_all_gather(x)
        idx_shuffle = torch.randperm(x_gather.shape[0])
        dist.broadcast(idx_shuffle, src=0)
        idx_unshuffle = torch.argsort(idx_shuffle)
        idx_this = idx_shuffle.view(-1, own)[dist.get_rank()]
        return x_gather[idx_this], idx_unshuffle

    @torch.no_grad()
    def _batch_unshuffle_ddp(self, x, idx_unshuffle):
        own = x.shape[0]
        x_gather = concat_all_gather(x)
        return x_gather[idx_unshuffle.view(-1, own)[dist.get_rank()]]

    def forward(self, im_q, im_k):
        q = normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            im_k, idx_unshuffle = self._batch_shuffle_ddp(im_k)
            k = normalize(self.encoder_k(im_k), dim=1)
            k = self._batch_unshuffle_ddp(k, idx_unshuffle)
        l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        self._dequeue_and_enqueue(k)
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = DistributedDataParallel(MoCo())
optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
generator, seconds = torch.Generator().manual_seed(rank), []
for step in range(12):
    began = time.perf_counter()
    base = torch.randn(8, 16, generator=generator)
    views = [base + 0.1 * torch.randn(8, 16, generator=generator) for _ in range(2)]
    output, target = model(*views)
    loss = nn.functional.cross_entropy(output, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seconds.append(time.perf_counter() - began)
    if rank == 0:
        print(f"step {step} loss {loss.item():.6f} queue {model.module.queue.sum().item():.4f}")
if rank == 0:
    print(f"seconds {median(seconds):.4f}")
dist.destroy_process_group()
