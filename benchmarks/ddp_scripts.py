#!/usr/bin/env python3
"""Time a script of DistributedDataParallel under `poseidon run --ddp` beside gloo.

    sudo python benchmarks/ddp_scripts.py
    sudo python benchmarks/ddp_scripts.py --rate 100 --rounds 5

The script is the same for both, with real compute: two hosts (network namespaces) of one worker
with one thread each. Jobs take turns. A row is the median over the rounds of each job's median
seconds a step, from the fifth step on. Poseidon encrypts, gloo does not. `losses` are the losses of
the last step, which should be equal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.checkout import use_environment

use_environment()

from benchmarks.testbed.hosts import Host, Hosts
from benchmarks.testbed.measurement_lock import alone
from benchmarks.testbed.processes import ON_HOST
from poseidon.cluster.rendezvous.key import write_new_key
from poseidon.settings import inherited_environment

NETS = ("linear", "transformer")
TIMEOUT_S = 300
TRAINS = """
import statistics, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

name, steps = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
if name == "linear":
    net = nn.Sequential(
        nn.Linear(3072, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )
    x, y = torch.randn(32, 3072), torch.randint(0, 10, (32,))
else:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    net = nn.Sequential(nn.Embedding(256, 256), encoder, nn.Linear(256, 256), nn.Flatten(0, 1))
    x = torch.randint(0, 256, (4, 128))
    y = x.flatten()
ddp = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
seconds = []
for _ in range(steps):
    began_s = time.perf_counter()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(x), y)
    loss.backward()
    optimizer.step()
    seconds.append(time.perf_counter() - began_s)
if dist.get_rank() == 0:
    print("measured", statistics.median(seconds[4:]), loss.item(), flush=True)
"""


def measure(hosts: Sequence[Host], command: Sequence[str], port: int) -> tuple[float, float]:
    """Run a command on each host as torchrun's tasks. Return its seconds a step and the loss."""
    tasks = []
    for host in hosts:
        variables = {
            "RANK": host.index,
            "WORLD_SIZE": len(hosts),
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
            "PYTHONPATH": ROOT,
        }
        own = {name: str(value) for name, value in variables.items()}
        on_host = ON_HOST if host.enter else {}
        environment = {**inherited_environment(), **own, **on_host}
        tasks.append(
            subprocess.Popen(
                [*host.enter, *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [task.communicate(timeout=TIMEOUT_S) for task in tasks]
    for line in outputs[0][0].splitlines():
        if line.startswith("measured "):
            _, seconds, loss = line.split()
            return float(seconds), float(loss)
    raise SystemExit(f"{' '.join(command)} has not measured:\n{outputs[0][1][-2000:]}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each net."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=1000, help="Mbit/s of each link (1000)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each job (3)")
    parser.add_argument("--steps", type=int, default=14, help="steps of a job (14)")
    flags = parser.parse_args(arguments)
    with (
        alone(print),
        tempfile.TemporaryDirectory() as folder,
        Hosts(2, rate_mbit=flags.rate) as hosts,
    ):
        os.chdir(folder)
        script, key = Path(folder, "train.py"), Path(folder, "key")
        script.write_text(TRAINS, encoding="utf-8")
        write_new_key(key)
        job = [sys.executable, "-m", "poseidon", "worker", f"--key_file={key}", "run", "--ddp"]
        kinds = {"gloo": [sys.executable], "poseidon": job}
        print(f"{'net':<12} {'gloo':>8} {'poseidon':>9} {'times as fast':>14} {'losses':>22}")
        port = 29600
        for net in NETS:
            found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
            for _ in range(flags.rounds):
                for kind, command in kinds.items():
                    port += 1
                    words = [*command, str(script), net, str(flags.steps)]
                    found[kind].append(measure(hosts, words, port))
            gloo, ours = (statistics.median(s for s, _ in found[kind]) for kind in kinds)
            losses = "  ".join(f"{found[kind][-1][1]:.6f}" for kind in kinds)
            print(f"{net:<12} {gloo:>8.3f} {ours:>9.3f} {gloo / ours:>14.2f} {losses:>22}")


if __name__ == "__main__":
    main()
