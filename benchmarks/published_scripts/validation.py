"""An image classifier with mixup, EMA, distributed statistics, and validation in inference mode."""

import copy
import os
import random
import time
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Images(Dataset):
    def __init__(self, count, augment):
        generator = torch.Generator().manual_seed(count)
        self.labels = torch.randint(4, (count,), generator=generator)
        self.images = torch.randn(count, 3, 10, 10, generator=generator)
        self.images += 0.3 * self.labels[:, None, None, None]
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:
            if random.random() < 0.5:
                image = image.flip(-1)
            y, x = np.random.randint(0, 3, 2)
            image = image[:, y : y + 8, x : x + 8] + 0.01 * torch.randn(3, 8, 8)
        else:
            image = image[:, 1:9, 1:9]
        return image, self.labels[index]


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        own, new = self.module.state_dict().values(), model.state_dict().values()
        for ema_v, model_v in zip(own, new, strict=True):
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


def reduce_tensor(tensor, n):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    return rt / n


def distribute_bn(model, world_size):
    for name, buffer in model.named_buffers(recurse=True):
        if "running_mean" in name or "running_var" in name:
            dist.all_reduce(buffer, op=dist.ReduceOp.SUM)
            buffer /= float(world_size)


def validate(model, loader, loss_fn, size):
    losses, correct, count = 0.0, 0.0, 0
    model.eval()
    with torch.inference_mode():
        for images, target in loader:
            output = model(images)
            loss = reduce_tensor(loss_fn(output, target).data, size)
            acc1 = reduce_tensor((output.argmax(1) == target).float().mean(), size)
            losses += loss.item() * len(target)
            correct += acc1.item() * len(target)
            count += len(target)
    return losses / count, correct / count


dist.init_process_group(backend="gloo", init_method="env://")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(42 + rank)
np.random.seed(42 + rank)
random.seed(42 + rank)
model = nn.Sequential(
    *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(2)),
    *(nn.Flatten(), nn.Linear(32, 4)),
)
ema = ModelEma(model, 0.9)
for part in (model, ema):
    for value in part.state_dict().values():
        dist.broadcast(value, 0)
model = DistributedDataParallel(model, broadcast_buffers=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
train, held_out = Images(96, True), Images(40, False)
sampler = DistributedSampler(train, seed=1)
loader = DataLoader(train, 12, sampler=sampler, num_workers=1, persistent_workers=True)
val_loader = DataLoader(held_out, 10, sampler=DistributedSampler(held_out, shuffle=False))
loss_fn, seconds = nn.CrossEntropyLoss(label_smoothing=0.1), []
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for images, target in loader:
        began = time.perf_counter()
        lam = np.random.beta(0.8, 0.8)
        images = images * lam + images.flip(0) * (1 - lam)
        output = model(images)
        loss = lam * loss_fn(output, target) + (1 - lam) * loss_fn(output, target.flip(0))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update(model.module)
        seconds.append(time.perf_counter() - began)
        reduced = reduce_tensor(loss.detach(), size)
        if rank == 0:
            print(f"epoch {epoch} loss {reduced.item():.6f}")
    distribute_bn(model.module, size)
    found, found_ema = (validate(m, val_loader, loss_fn, size) for m in (model, ema.module))
    if rank == 0:
        torch.save({"epoch": epoch, "state_dict": model.module.state_dict()}, "last.pth.tar")
        print(f"epoch {epoch} val loss {found[0]:.6f} acc {found[1]:.6f} ema {found_ema[0]:.6f}")
if rank == 0:
    print(f"seconds {median(seconds):.4f}")
    assert os.path.exists("last.pth.tar")
