"""A GPT with tied weights that accumulates gradients by `require_backward_grad_sync`."""

import math
import os
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

WORDS, WIDTH, LENGTH, PARTS, STEPS = 64, 64, 32, 4, 10


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.words.weight = self.head.weight

    def forward(self, words, targets):
        x = self.words(words) + self.places(torch.arange(LENGTH))
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        scores = self.head(self.blocks(x, mask, is_causal=True))
        return scores, cross_entropy(scores.flatten(0, 1), targets.flatten())


dist.init_process_group("gloo")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(1337 + rank)  # initial weights are rank 0's
model = DistributedDataParallel(Gpt())
decayed = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def get_batch():
    words = torch.randint(WORDS, (4, LENGTH + 1))
    words[:, 1::2] = words[:, 0:-1:2]  # something to learn
    return words[:, :-1], words[:, 1:]


seconds = []
for step in range(STEPS):
    began = time.perf_counter()
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
    for part in range(PARTS):
        model.require_backward_grad_sync = part == PARTS - 1
        _, loss = model(*get_batch())
        (loss / PARTS).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seconds.append(time.perf_counter() - began)
    if rank == 0:
        print(f"step {step} loss {loss.item():.6f} norm {norm.item():.5f}")
model.eval()
with torch.no_grad():
    total = model(*get_batch())[1]
dist.all_reduce(total)
if rank == 0:
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "ckpt.pt")
    print(f"val loss {total.item() / size:.6f}")
    print(f"seconds {median(seconds):.4f}")
dist.destroy_process_group()
