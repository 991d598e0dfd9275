#!/usr/bin/env python3
"""Measure a GPT that is divided among the workers of a host, on two emulated hosts (root).

    sudo python benchmarks/large_modules.py
    sudo python benchmarks/large_modules.py --rate 1000 --only hsdp,ps --rounds 3

Each host is a network namespace with two workers of one thread, and a link of `--rate` Mbit/s. The
jobs take turns; a row is the median over the rounds. `hsdp` is torch's HSDP over gloo, `ddp` and
`ddp_int8` the same script by `poseidon run --ddp`, the others are `poseidon.distribute`, and `whole` with a module
that is not divided. Columns: seconds a step; MB that the first host sends in a step, by the counter
of its link; bytes of memory that a worker has of its own for each parameter after the steps, more
than before the module was made; and the loss of the last step.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import psutil
import torch
import torch.distributed as dist

from benchmarks.testbed.computed import COMPUTED
from benchmarks.testbed.hosts import Host, Hosts
from benchmarks.testbed.links import INTERFACE
from benchmarks.testbed.measurement_lock import alone
from benchmarks.testbed.processes import ON_HOST
from poseidon.base.settings import inherited_environment

NET = "gpt-20m"
LOCAL, WARM_UP = 2, 2
MEASURED = "measured "
JOBS: dict[str, tuple[str, ...]] = {
    "hsdp": (),
    "ddp": ("--ddp",),
    "ddp_int8": ("--ddp", "--compress=int8"),
    "ps": ("--exchange=ps",),
    "allreduce": ("--exchange=allreduce",),
    "int8": ("--exchange=ps", "--compress=int8"),
    "powersgd": ("--exchange=ps", "--compress=powersgd:4"),
    "rounds": ("--exchange=ps", "--local_steps=10,outer_lr=1"),
    "whole": ("--exchange=ps",),
}
"""The flags of each job; without any it is torchrun's."""


def sent_bytes() -> int:
    """Return the bytes that the link of this host has sent."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def own_bytes() -> int:
    """Return the memory that this process shares with no other one."""
    return int(psutil.Process().memory_full_info().uss)


def work(how: str, steps: int) -> None:
    """Train as one worker; the first one prints what was measured."""
    from torch.distributed.fsdp import fully_shard

    import poseidon

    torch.set_num_threads(1)
    torch.manual_seed(0)
    by_script = not JOBS[how] or "--ddp" in JOBS[how]
    if by_script:
        dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    memory = own_bytes()
    net = COMPUTED[NET]
    model = net.build()
    count = sum(parameter.numel() for parameter in model.parameters())
    mesh: Any = None
    if by_script:
        names = ("replicate", "shard")
        mesh = dist.init_device_mesh("cpu", (size // LOCAL, LOCAL), mesh_dim_names=names)
    elif how != "whole":
        mesh = poseidon.host_mesh()
    if mesh is not None:
        for child in model.modules():
            if type(child).__name__ == "GptBlock":
                fully_shard(child, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    group = None if by_script else poseidon.distribute(model, optimizer)
    began, sent = 0.0, 0
    for number, inputs in zip(
        range(WARM_UP + steps), net.batches(rank=rank, rows=net.rows), strict=False
    ):
        if number == WARM_UP:
            dist.barrier()
            began, sent = time.perf_counter(), sent_bytes()
        loss = model(*inputs)
        loss.backward()
        if group is None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            group.step()
    dist.barrier()
    seconds = (time.perf_counter() - began) / steps
    megabytes = (sent_bytes() - sent) / steps / 1e6
    of_each = (own_bytes() - memory) / count
    if rank == 0:
        print(f"{MEASURED}{seconds} {megabytes} {of_each} {loss.item()} {count}", flush=True)
    if group is not None:
        group.close()


def measure(name: str, hosts: Sequence[Host], steps: int) -> list[float]:
    """Run a job on the hosts. Return what its first worker has measured."""
    script = [str(Path(__file__).resolve()), "--worker", name, "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "key")
        key.write_text(secrets.token_hex(32), encoding="utf-8")
        key.chmod(0o600)
        ours = ["-m", "poseidon", "worker", f"--key_file={key}", "run", *JOBS[name]]
        running = [
            subprocess.Popen(
                [
                    *host.enter,
                    *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"),
                    *(f"--node_rank={host.index}", f"--nproc_per_node={LOCAL}"),
                    *(f"--master_addr={hosts[0].address}", "--master_port=29500"),
                    *([] if name == "hsdp" else [*ours, f"--output={folder}/out"]),
                    *script,
                ],
                env={
                    **inherited_environment(),
                    **ON_HOST,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(ROOT),
                },
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in hosts
        ]
        output = "".join(process.communicate(timeout=900)[0] for process in running)
    for line in output.splitlines():
        if MEASURED in line:
            return [float(word) for word in line.partition(MEASURED)[2].split()]
    raise SystemExit(f"{name} has not measured:\n{output[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worker", metavar="NAME", help="train as one worker of a job")
    parser.add_argument("--rate", type=float, default=100, help="Mbit/s of each link (100)")
    parser.add_argument("--steps", type=int, default=10, help="steps that count (10)")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each job (1)")
    parser.add_argument("--only", default=",".join(JOBS), help="jobs")
    flags = parser.parse_args()
    if flags.worker:
        work(flags.worker, flags.steps)
        return
    found: dict[str, list[list[float]]] = {name: [] for name in flags.only.split(",")}
    with alone(print), Hosts(2, rate_mbit=flags.rate or None) as hosts:
        for _ in range(flags.rounds):
            for name, each in found.items():
                each.append(measure(name, hosts, flags.steps))
                seconds, megabytes, of_each, loss, _ = map(
                    statistics.median, zip(*each, strict=True)
                )
                print(
                    f"{name:<12}{seconds:>9.3f} s{megabytes:>9.1f} MB{of_each:>8.1f} bytes a "
                    f"parameter, loss {loss:.6f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
