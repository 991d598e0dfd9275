#!/usr/bin/env python3
"""Measure what a step costs a worker as a job gets more clients, beside DDP.

    python benchmarks/scale.py
    python benchmarks/scale.py --clients 2,8,32 --nets mlp --rounds 3

All clients are on this machine: a worker of one thread and a shard each, SGD with momentum on the
shards. DDP has as many processes, over gloo, with torch's SGD. Jobs take turns. Each trains for a
number of steps after some that do not count.

`core-ms` is the processor time of all processes of a job, for a step and a worker, in
milliseconds; `ms` the time of a step. A machine has fewer processors than clients, so that the
time shows processor time, too. Numbers are medians of the rounds. `chunks` is the number of the
job's chunks on all shards: a message of each worker, and a value for each.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.checkout import use_environment

use_environment()

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import poseidon
from benchmarks.testbed.measurement_lock import alone
from benchmarks.torch_models import CifarQuick
from poseidon.settings import inherited_environment
from ps_server.protocol.placement import place
from ps_server.protocol.settings import StoreSpec, TableSpec

CLIENTS = (2, 4, 8, 16, 32)
OF_JOB = "SCALE_JOB"
"""The environment variable with the process whose descendants are the job's processes."""
WARM_UP = 5
LEAST_S = 3.0
TIMEOUT_S = 600


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers of these widths with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


NETS = {
    "quick": CifarQuick,
    "mlp": lambda: mlp(512, 512, 512, 10),
    "large": lambda: mlp(1024, *[2048] * 5, 1000),
}
"""0.15, 0.53 and 20.9 million parameters."""


def batch_of(net: str) -> tuple[Tensor, ...]:
    """Return the inputs of a net's forward pass."""
    if net == "quick":
        return torch.randn(2, 3, 32, 32), torch.randint(0, 10, (2,))
    return (torch.randn(2, 512 if net == "mlp" else 1024),)


def processor_s() -> float:
    """Return the processor time of all processes of this job so far, in seconds."""
    total = 0.0
    for process in psutil.Process(int(os.environ[OF_JOB])).children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def train(net: str, how: str, steps: int) -> None:
    """Train on one worker; the first one prints the processor time and the time of a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = NETS[net]()
    batch = batch_of(net)
    if how == "ddp":
        dist.init_process_group("gloo")
        trained: nn.Module = DistributedDataParallel(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.001, momentum=0.9)
        step, first, size = optimizer.step, dist.get_rank() == 0, dist.get_world_size()
    else:
        trained = module
        group = poseidon.distribute(module, poseidon.SGD(lr=0.001, momentum=0.9))
        step, first, size = group.step, group.rank == 0, group.size
    began = (0.0, 0.0)
    for number in range(WARM_UP + steps):
        if number == WARM_UP and first:
            began = (processor_s(), time.perf_counter())
        loss = trained(*batch)
        (loss if loss.ndim == 0 else loss.square().mean()).backward()
        step()
        if how == "ddp":
            optimizer.zero_grad()
    if first:
        core_s, seconds = processor_s() - began[0], time.perf_counter() - began[1]
        print(f"measured {1e3 * core_s / steps / size} {1e3 * seconds / steps}", flush=True)


def measure(net: str, how: str, clients: int, steps: int) -> tuple[float, float]:
    """Run a job. Return its core-ms for a step and a worker, and the milliseconds of a step."""
    own = {OF_JOB: str(os.getpid()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [__file__, "--train", net, how, str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        if how == "ddp":
            python = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*python, f"--nproc_per_node={clients}", *words]
        else:
            hosts = Path(folder, "hosts")
            hosts.write_text("".join(f"{i} 127.0.0.1 0\n" for i in range(clients)))
            python = [sys.executable, "-m", "poseidon", "run"]
            flags = [f"--hostfile={hosts}", f"--exchange={how}", f"--output={folder}/out"]
            command = [*python, *flags, *words]
        ended = subprocess.run(
            command,
            env={**inherited_environment(), **own},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    for line in ended.stdout.splitlines():
        if "measured " in line:
            core_ms, ms = line.partition("measured ")[2].split()
            return float(core_ms), float(ms)
    raise SystemExit(
        f"{' '.join(command)} has not measured:\n{(ended.stdout + ended.stderr)[-3000:]}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each net and number of clients."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", default=",".join(map(str, CLIENTS)), help="of a job")
    parser.add_argument("--nets", default=",".join(NETS), help=f"of {','.join(NETS)}")
    parser.add_argument("--exchange", default="ps", help="ways to exchange: ps, allreduce (ps)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each job (3)")
    parser.add_argument("--steps", type=int, default=30, help="steps that count (30)")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.train:
        train(*flags.train[:2], int(flags.train[2]))
        return
    ways = ["ddp", *flags.exchange.split(",")]
    with alone(print):
        print(f"{'net':<8}{'clients':>8}{'chunks':>8}", end="")
        print("".join(f"{way + ' core-ms':>20}{'ms':>8}" for way in ways) + f"{'ratio':>8}")
        for net in flags.nets.split(","):
            tables = [
                TableSpec(name=name, size=value.numel())
                for name, value in NETS[net]().named_parameters()
            ]
            for clients in map(int, flags.clients.split(",")):
                store = StoreSpec(workers=clients, shards=clients, tables=tuple(tables))
                chunks = sum(map(len, place(store).chunks))
                found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
                for _ in range(flags.rounds):
                    for way in ways:
                        found[way].append(measure(net, way, clients, flags.steps))
                print(f"{net:<8}{clients:>8}{chunks:>8}", end="")
                medians = {
                    way: [statistics.median(column) for column in zip(*pairs, strict=True)]
                    for way, pairs in found.items()
                }
                for core_ms, ms in medians.values():
                    print(f"{core_ms:>20.2f}{ms:>8.1f}", end="")
                print(f"{medians[ways[1]][0] / medians['ddp'][0]:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
