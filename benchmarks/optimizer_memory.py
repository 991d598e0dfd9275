#!/usr/bin/env python3
"""Measure the memory of a worker and the bytes of its link, for each place where AdamW may run.

    sudo python benchmarks/optimizer_memory.py
    sudo python benchmarks/optimizer_memory.py --layers 24 --optimizer Muon

Each row is a job of two workers on this machine that trains `--layers` linear layers of 2048 x 2048:

* DDP over gloo, with buckets beside the gradients and with gradients in the buckets, by torchrun;
* ours with the optimizer on the workers, and on the shards: shards beside the workers, and two
  dedicated ones, of these also with parameters of bfloat16.

How to read it: `memory` is a worker's anonymous memory, at most, in bytes a parameter, less what it
had before the module was made. So it has no Python and no torch, and no messages in memory that the
worker shares with a shard of this machine. `sent` and
`received` are bytes a parameter and step of a worker: ours by its counters of messages to all
shards, also the one beside it; DDP's by the counter of a network namespace of its own (root and
`unshare`; without them the columns are empty).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

from poseidon.base.settings import inherited_environment

WORKERS = 2
TOGETHER = "0 127.0.0.1 0\n1 127.0.0.1 0\n"
APART = (
    "0 127.0.0.1 0 role=worker\n1 127.0.0.1 0 role=worker\n"
    "2 127.0.0.1 0 role=server\n3 127.0.0.1 0 role=server\n"
)
COMMON = """
import json, sys
import torch
from torch import nn

WIDTH, STEPS = 2048, 6

def private_bytes():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon")) * 1024

def build():
    torch.manual_seed(0)
    # no biases: Muon is for matrices
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(int(sys.argv[1]))))
    model = model.to(torch.bfloat16 if "bfloat16" in sys.argv else torch.float32)
    optimizer = getattr(torch.optim, sys.argv[2])(model.parameters(), lr=1e-4)
    return model, optimizer, sum(p.numel() for p in model.parameters())

before = private_bytes()
peak = 0

def train(module, optimizer, at_step=lambda: None):
    global peak
    x = torch.randn(8, WIDTH).to(next(module.parameters()).dtype)
    for step in range(STEPS):
        at_step()
        module(x).square().mean().backward()
        peak = max(peak, private_bytes())
        optimizer.step()
        peak = max(peak, private_bytes())
        optimizer.zero_grad()
    at_step()
"""
OURS = (
    COMMON
    + """
import poseidon
model, optimizer, parameters = build()
with poseidon.distribute(model, optimizer, on=sys.argv[3]) as group:
    train(model, optimizer)
    found = group.gather([peak - before, parameters])
    if group.rank == 0:
        print(json.dumps(found), flush=True)
"""
)
DDP = (
    COMMON
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
sent = []

def counted():
    dist.barrier()
    (line,) = (line for line in open("/proc/net/dev") if line.strip().startswith("lo:"))
    sent.append(int(line.split()[9]))
    dist.barrier()

model, optimizer, parameters = build()
net = DistributedDataParallel(model, gradient_as_bucket_view=sys.argv[3] == "views")
train(net, optimizer, counted)
steps = [later - earlier for earlier, later in zip(sent, sent[1:])]
found = [None] * dist.get_world_size()
dist.all_gather_object(found, [peak - before, parameters])
if dist.get_rank() == 0:
    print(json.dumps([*found, min(steps) / dist.get_world_size()]), flush=True)
dist.destroy_process_group()
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of a job.

    Attributes:
        name: of the job.
        memory: bytes a parameter of the worker that holds most.
        sent: bytes a parameter and step of a worker; None: not counted.
        received: the same.
    """

    name: str
    memory: float
    sent: float | None
    received: float | None

    def __str__(self) -> str:
        traffic = ("-" if x is None else f"{x:.2f}" for x in (self.sent, self.received))
        return f"| {self.name} | {self.memory:.1f} | {' | '.join(traffic)} |"


def run_ddp(name: str, layers: int, optimizer: str, buckets: str) -> Row:
    """Run a job of DDP. Return its row."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(DDP, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
        command += ["--standalone", "--local_addr=127.0.0.1"]
        command += [str(script), str(layers), optimizer, buckets]
        alone = os.geteuid() == 0
        if alone:
            inside = 'ip link set lo up && exec "$@"'
            command = ["unshare", "--net", "sh", "-c", inside, "sh", *command]
        first, second, sent = _printed(command)
    memory, parameters = max(first, second)
    each = sent / parameters if alone else None
    return Row(name=name, memory=memory / parameters, sent=each, received=each)


def run_ours(
    name: str, layers: int, optimizer: str, on: str, machines: str, dtype: str = "float32"
) -> Row:
    """Run a job of Poseidon. Return its row."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        script, hosts = folder / "train.py", folder / "machines"
        script.write_text(OURS, encoding="utf-8")
        hosts.write_text(machines, encoding="utf-8")
        command = [sys.executable, "-m", "poseidon", "run", f"--hostfile={hosts}", "--exchange=ps"]
        command += [f"--output={folder / 'job'}", str(script), str(layers), optimizer, on, dtype]
        memory, parameters = max(_printed(command))
        statistics = json.loads(next(folder.glob("job/**/statistics.json")).read_text("utf-8"))
    worker = statistics["workers"]["0"]
    sent, received = (
        sum(tensor[key] for tensor in worker["tensors"]) / worker["iterations"] / parameters
        for key in ("bytes_out", "bytes_in")
    )
    return Row(name=name, memory=memory / parameters, sent=sent, received=received)


def _printed(command: Sequence[str]) -> list[list[float]]:
    environment = {**inherited_environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, text=True
    )
    found: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run all jobs, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12, help="of 4.2 M parameters each")
    parser.add_argument("--optimizer", default="AdamW", help="a class of torch.optim")
    flags = parser.parse_args(arguments)
    job = flags.layers, flags.optimizer
    print("| job | memory | sent | received |\n|---|---|---|---|", flush=True)
    print(run_ddp("DDP", *job, "buckets"), flush=True)
    print(run_ddp("DDP, gradient_as_bucket_view", *job, "views"), flush=True)
    print(run_ours("on the workers", *job, "workers", TOGETHER), flush=True)
    print(run_ours("on the shards", *job, "shards", TOGETHER), flush=True)
    print(run_ours("on two dedicated shards", *job, "shards", APART), flush=True)
    name = "on two dedicated shards, bfloat16"
    print(run_ours(name, *job, "shards", APART, "bfloat16"), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
