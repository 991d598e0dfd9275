"""Lightning Fabric's loop: accumulation, clipping, gathering, saving and loading.

It takes the strategy as its argument: ddp or poseidon.
"""

import os
import sys
import time
from statistics import median

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if sys.argv[1] == "poseidon":
    import poseidon.lightning  # noqa: F401 - registers the strategy

fabric = Fabric(
    accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy=sys.argv[1]
)
fabric.launch()
fabric.seed_everything(3)
labels = torch.randint(3, (96,))
data = TensorDataset(torch.randn(96, 10) + labels[:, None], labels)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 3))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
seconds = []
for epoch in range(2):
    for number, (x, y) in enumerate(loader):
        began = time.perf_counter()
        waits = number % 2 == 0
        with fabric.no_backward_sync(model, enabled=waits):
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss / 2)
        if not waits:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        fabric.print(f"epoch {epoch} loss {mean.item():.6f}")
    fabric.barrier()
    fabric.save("state.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
remainder = fabric.load("state.ckpt", {"model": model, "optimizer": optimizer})
size = fabric.all_gather(sum(p.detach().norm() for p in model.parameters()))
fabric.print(f"epoch {remainder['epoch']} loaded loss {size.reshape(-1).sum().item():.6f}")
fabric.print(f"seconds {median(seconds):.4f}")
