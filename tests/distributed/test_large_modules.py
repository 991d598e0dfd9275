"""Modules that `fully_shard` divides among the workers of a host, on two hosts with two workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ddp_processes import run_by_gloo
from tests.support.training_processes import machinefile, poseidon_here

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))

class GPT(nn.Module):
    def __init__(self, words=31, width=48, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.word = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x):
        h = self.word(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))

def loss_of(model, generator):
    x = torch.randint(0, 31, (3, 17), generator=generator)
    return F.cross_entropy(model(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten())
"""

HSDP = (
    MODEL
    + """
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

def train(name, mesh=both, accumulate=1, clip=0.0, checkpoint=False, **how):
    model = GPT()
    for number, block in enumerate(model.blocks):
        if checkpoint:
            block = model.blocks[number] = checkpoint_wrapper(block)
        fully_shard(block, mesh=mesh, **how)
    fully_shard(model, mesh=mesh, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for step in range(8):
        for number in range(accumulate):
            model.set_requires_gradient_sync(number == accumulate - 1)
            loss = loss_of(model, generator) / accumulate
            loss.backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        print(name, step, mean.item() / size, norm.item() if clip else 0.0)

train("plain steps")
train("accumulation", accumulate=2, reshard_after_forward=False)
train("clipping", clip=0.5)
train("checkpoints, mixed", checkpoint=True, mp_policy=mixed)
train("all workers", mesh=init_device_mesh("cpu", (size,)))
"""
)


def run(folder: Path, script: str, *flags: str, workers: int = 2) -> tuple[str, str]:
    """Run a script on two hosts with so many workers; return what it prints, and the messages."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    hosts = f"--hostfile={machinefile(folder, 2)}"
    done = poseidon_here(folder, "run", *flags, hosts, f"--workers={workers}", "train.py")
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_hsdp_has_the_losses_of_torchrun(tmp_path: Path) -> None:
    found, notes = run(tmp_path, HSDP, "--ddp", "--encrypt=on")
    imports = ["torch.distributed.fsdp"]
    expected = run_by_gloo(tmp_path, tmp_path / "train.py", size=4, imports=imports)
    lines = list(zip(found.splitlines(), expected.splitlines(), strict=True))
    assert len(lines) == 40
    for one, other in lines:
        name, loss, norm = one.rsplit(" ", 2)
        name_by_gloo, loss_by_gloo, norm_by_gloo = other.rsplit(" ", 2)
        assert name == name_by_gloo
        assert float(loss) == pytest.approx(float(loss_by_gloo), rel=1e-6, abs=1e-6)
        assert float(norm) == pytest.approx(float(norm_by_gloo), rel=1e-5)
    assert notes.count("divides parameters among workers of several hosts") == 1


TENSOR_PARALLEL = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

x, plan = torch.ones(3, 6), {"0": ColwiseParallel(), "2": RowwiseParallel()}
torch.testing.assert_close(parallelize_module(build(), mesh["tensor"], plan)(x), build()(x))
for crossing in (mesh["replicate"], init_device_mesh("cpu", (4,))):
    try:
        parallelize_module(build(), crossing, plan)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_tensor_parallelism_stays_within_a_host(tmp_path: Path) -> None:
    printed, _ = run(tmp_path, TENSOR_PARALLEL, "--ddp")
    sentence = (
        "UsageError tensor parallelism over workers of several hosts sends every activation "
        "between hosts; expected a mesh of workers of one host for parallelize_module(), such as "
        "init_device_mesh(device, (hosts, workers), mesh_dim_names=('replicate', 'tensor'))"
        "['tensor']"
    )
    assert printed.replace('"', "'").splitlines() == [sentence] * 2
