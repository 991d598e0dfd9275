#!/usr/bin/env python3
"""Time scripts of DistributedDataParallel, accelerate, Hugging Face's Trainer, Lightning and
`poseidon.distribute` in a job beside gloo.

    sudo python benchmarks/ddp_scripts.py
    sudo python benchmarks/ddp_scripts.py --rate 100 --rounds 5 --only linear,ddp

The script (`library_loops.py`) is the same for both, with real compute: two hosts (network
namespaces) of one worker with one thread each. Jobs take turns. A row is the median over the rounds
of each job's median seconds a step, from the fifth step on. Poseidon encrypts, gloo does not.
`distribute` and `shards`, with the optimizer on the shards, are compared with DDP's loop. `losses`
are the losses of the last step, which should be equal.
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

from poseidon.cli.entry import use_environment

use_environment()

from benchmarks.testbed.hosts import Host, Hosts
from benchmarks.testbed.measurement_lock import alone
from benchmarks.testbed.processes import ON_HOST
from poseidon.base.settings import inherited_environment
from poseidon.cluster.rendezvous import write_new_key

SCRIPT = ROOT / "benchmarks" / "library_loops.py"
ROWS = {
    "linear": ("linear", "ddp", "ddp"),
    "ddp": ("gpt", "ddp", "ddp"),
    "accelerate": ("gpt", "accelerate", "accelerate"),
    "trainer": ("gpt", "trainer", "trainer"),
    "lightning": ("gpt", "lightning", "lightning"),
    "distribute": ("gpt", "ddp", "distribute"),
    "shards": ("gpt", "ddp", "shards"),
}
"""The net, the loop that runs over gloo, and ours, of `library_loops.py`."""
TIMEOUT_S = 300


def measure(hosts: Sequence[Host], command: Sequence[str], port: int) -> tuple[float, float]:
    """Run a command on each host as torchrun's tasks. Return its seconds a step and the loss."""
    tasks = []
    for host in hosts:
        variables = {
            "RANK": host.index,
            "WORLD_SIZE": len(hosts),
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "GROUP_RANK": host.index,
            "TORCHELASTIC_RUN_ID": "benchmark",
            "ACCELERATE_USE_CPU": "true",
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
    """Print a row for each script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=1000, help="Mbit/s of each link (1000)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each job (3)")
    parser.add_argument("--steps", type=int, default=14, help="steps of a job (14)")
    parser.add_argument("--only", default=",".join(ROWS), help=f"of {','.join(ROWS)}")
    flags = parser.parse_args(arguments)
    rows = {name: ROWS[name] for name in flags.only.split(",")}
    with (
        alone(print),
        tempfile.TemporaryDirectory() as folder,
        Hosts(2, rate_mbit=flags.rate) as hosts,
    ):
        os.chdir(folder)
        key = Path(folder, "key")
        write_new_key(key)
        worker = [sys.executable, "-m", "poseidon", "worker", f"--key_file={key}", "run"]
        jobs: dict[tuple[bool, str, str], list[tuple[float, float]]] = {}
        for net, theirs, ours in rows.values():
            jobs |= {(False, net, theirs): [], (True, net, ours): []}
        port = 29600
        for _ in range(flags.rounds):
            for (is_ours, net, loop), found in jobs.items():
                ddp = ["--ddp"] if loop in ("ddp", "accelerate", "trainer") else []
                command = [*worker, *ddp] if is_ours else [sys.executable]
                port += 1
                words = [*command, str(SCRIPT), net, loop, str(flags.steps)]
                found.append(measure(hosts, words, port))
        print(f"{'script':<12} {'gloo':>8} {'poseidon':>9} {'times as fast':>14} {'losses':>22}")
        for name, (net, theirs, ours) in rows.items():
            found_of = jobs[False, net, theirs], jobs[True, net, ours]
            gloo_s, ours_s = (statistics.median(s for s, _ in found) for found in found_of)
            losses = "  ".join(f"{found[-1][1]:.6f}" for found in found_of)
            print(f"{name:<12} {gloo_s:>8.3f} {ours_s:>9.3f} {gloo_s / ours_s:>14.2f} {losses:>22}")


if __name__ == "__main__":
    main()
