#!/usr/bin/env python3
"""Measure what a step costs a worker as a job gets more workers, beside DDP.

    python benchmarks/scale.py                      # clients with one worker each
    python benchmarks/scale.py --clients 2,8,32 --nets mlp --rounds 3
    python benchmarks/scale.py hosts                # two clients with four workers each
    python benchmarks/scale.py hosts --rate 1000    # on two emulated hosts (root)
    python benchmarks/scale.py forms                # two workers of this machine, in five ways
    python benchmarks/scale.py forms --beside ../before

All clients are on this machine, with a shard and workers of one thread each. With `--rate` each is
a network namespace with a link of so many Mbit/s (0: as fast as the machine), torchrun starts
`poseidon worker` there, and what TCP alone carries with as many connections is printed first. DDP
has as many processes of torchrun, over gloo; in `no exchange` each of them trains alone. Small nets
train by SGD with momentum, by a rule of the shards; GPTs by AdamW. Jobs take turns. Each trains for
a number of steps after some that do not count. `--beside DIR` also runs the jobs of another
checkout, by turns, and adds columns for them.

`core-ms` is the processor time of all processes of a job, for a step and a worker, in
milliseconds; `ms` the time of a step. A machine has fewer processors than workers, so that the
time shows processor time, too. Numbers are medians of the rounds; `ratio` is DDP's over ours, of
processor time and of time. `chunks` is the number of the job's chunks on all shards: a message of
each worker, and a value for each.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

from benchmarks.testbed.hosts import Host, Hosts
from benchmarks.testbed.measurement_lock import alone
from benchmarks.testbed.processes import ON_HOST
from benchmarks.testbed.raw_tcp import mb_s
from benchmarks.testbed.scale_worker import MEASURED, NETS, OF_JOB
from poseidon.base.settings import inherited_environment
from poseidon.exchange.base import Trained
from poseidon.exchange.server.placed import pool_tensors, pools_of
from ps_server.protocol.placement import place
from ps_server.protocol.settings import StoreSpec, TableSpec

CLIENTS = (2, 4, 8, 16, 32)
WORKERS = 4
TIMEOUT_S = 600
STEPS = {"gpt-20m": 10, "large": 10}
SMALL = ("quick", "mlp", "large")
GPTS = ("gpt-2m", "gpt-20m")
OTHER = " beside"
"""Ends the names of the other checkout's jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that is measured.

    Attributes:
        name: in the tables.
        how: the worker trains, see `scale_worker.main`.
        clients: of the job; 0: torchrun starts it.
        workers: of a client.
        flags: of `poseidon run`.
    """

    name: str
    how: str
    clients: int
    workers: int
    flags: tuple[str, ...] = ()


def by_clients(clients: int, workers: int, exchanges: Sequence[str]) -> list[Job]:
    """Return DDP, the net without an exchange, and a rule of the shards by each exchange."""
    ours = [
        Job(name=way, how="rule", clients=clients, workers=workers, flags=(f"--exchange={way}",))
        for way in exchanges
    ]
    processes = clients * workers
    return [
        Job(name="DDP", how="ddp", clients=0, workers=processes),
        Job(name="no exchange", how="alone", clients=0, workers=processes),
        *ours,
    ]


FORMS = (
    Job(name="DDP", how="ddp", clients=0, workers=2),
    Job(name="run --ddp", how="ddp", clients=1, workers=2, flags=("--ddp",)),
    Job(name="distribute", how="optimizer", clients=1, workers=2),
    Job(name="distribute, a rule", how="rule", clients=1, workers=2),
    Job(name="distribute, two clients", how="optimizer", clients=2, workers=1),
)
"""Two workers of one machine: what a user of torch tries first."""


def measure(
    net: str, job: Job, steps: int, checkout: Path, hosts: Sequence[Host] = ()
) -> tuple[float, float]:
    """Run a job. Return its core-ms for a step and a worker, and the milliseconds of a step.

    Args:
        net: of `NETS`.
        job: the job.
        steps: that count.
        checkout: whose Poseidon it is.
        hosts: emulated hosts that it runs on; empty: this machine.
    """
    own = {OF_JOB: str(os.getpid()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    if hosts:
        own |= ON_HOST
    worker = str(ROOT / "benchmarks" / "testbed" / "scale_worker.py")
    with tempfile.TemporaryDirectory() as folder:
        if job.clients:
            hostfile = Path(folder, "hosts")
            hostfile.write_text("".join(f"{i} 127.0.0.1 0\n" for i in range(job.clients)))
            command = [sys.executable, "-m", "poseidon", "run", *job.flags]
            command += [f"--hostfile={hostfile}", f"--output={folder}/out"]
            command += [f"--workers={job.workers}"]
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={job.workers}"]
        command += [worker, net, job.how, str(steps)]
        commands = [command]
        if hosts:
            commands = _on_hosts(hosts, job, [worker, net, job.how, str(steps)], folder)
        running = [
            subprocess.Popen(
                each,
                env={**inherited_environment(), **own},
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for each in commands
        ]
        output = "".join(process.communicate(timeout=TIMEOUT_S)[0] for process in running)
    for line in output.splitlines():
        if MEASURED in line:
            core_ms, ms = line.partition(MEASURED)[2].split()[:2]
            return float(core_ms), float(ms)
    raise SystemExit(f"{' '.join(commands[0])} has not measured:\n{output[-3000:]}")


def _on_hosts(
    hosts: Sequence[Host], job: Job, script: Sequence[str], folder: str
) -> list[list[str]]:
    """Return the command of torchrun on each host."""
    key = Path(folder, "key")
    key.write_text(secrets.token_hex(32), encoding="utf-8")
    key.chmod(0o600)
    ours = ["-m", "poseidon", "worker", f"--key_file={key}", "run"]
    ours += [*job.flags, f"--output={folder}/out"]
    workers = job.workers if job.clients else job.workers // len(hosts)
    return [
        [
            *host.enter,
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"),
            *(f"--node_rank={host.index}", f"--nproc_per_node={workers}"),
            *(f"--master_addr={hosts[0].address}", "--master_port=29500"),
            *(ours if job.clients else ()),
            *script,
        ]
        for host in hosts
    ]


def by_turns(
    net: str,
    jobs: Sequence[Job],
    *,
    steps: int,
    rounds: int,
    beside: Path | None,
    hosts: Sequence[Host] = (),
) -> dict[str, tuple[float, float]]:
    """Measure jobs by turns. Return the medians of what `measure` returns, by the jobs' names.

    The name of a job of the other checkout ends with `OTHER`.
    """
    turns = [(job.name, job, ROOT) for job in jobs]
    if beside is not None:
        turns += [(job.name + OTHER, job, beside) for job in jobs if job.clients]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in turns}
    for _ in range(rounds):
        for name, job, checkout in turns:
            found[name].append(measure(net, job, steps, checkout, hosts))
    return {
        name: (
            statistics.median(core_ms for core_ms, _ in pairs),
            statistics.median(ms for _, ms in pairs),
        )
        for name, pairs in found.items()
    }


def chunks(net: str, workers: int, shards: int) -> int:
    """Return the number of chunks of a net, whose small tensors share tables."""
    module = NETS[net].build()
    tensors = [Trained(name=name, tensor=value) for name, value in module.named_parameters()]
    tables = tuple(
        TableSpec(name=held.name, size=held.tensor.numel())
        for held in pool_tensors(tensors, pools_of(tensors))
    )
    store = StoreSpec(workers=workers, shards=shards, tables=tables, chunks=1)  # one machine
    return sum(map(len, place(store).chunks))


def print_rows(first: str, found: Mapping[str, tuple[float, float]]) -> None:
    """Print a row for each job, with what they share in front."""
    core, seconds = found["DDP"]
    for name, (core_ms, ms) in found.items():
        ratios = "" if name == "DDP" else f"{core / core_ms:>7.2f}{seconds / ms:>6.2f}"
        print(f"{first}  {name:<31}{core_ms:>9.2f}{ms:>9.1f}{ratios}", flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", choices=("clients", "hosts", "forms"))
    parser.add_argument("--clients", help="of a job, a row each (2,4,8,16,32; hosts: 2)")
    parser.add_argument("--workers", type=int, help="of a client (1; hosts: 4)")
    parser.add_argument("--nets", help=f"of {','.join(NETS)}")
    parser.add_argument("--exchange", default="ps", help="ways to exchange: ps, allreduce (ps)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each job (3)")
    parser.add_argument(
        "--rate", type=float, help="Mbit/s of the link of each of two emulated hosts; 0: any"
    )
    parser.add_argument("--steps", type=int, help="steps that count (30; of large nets 10)")
    parser.add_argument("--beside", type=Path, help="another checkout, whose jobs take turns")
    parser.add_argument("--json", type=Path, help="write the medians there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    flags = parse(arguments)
    facts = []
    nets = (flags.nets or ",".join(GPTS if flags.table == "forms" else SMALL)).split(",")
    default = (2,) if flags.table == "hosts" else CLIENTS
    clients = flags.clients or ",".join(map(str, default))
    workers = flags.workers or (WORKERS if flags.table == "hosts" else 1)
    beside = None if flags.beside is None else flags.beside.resolve()
    with alone(print), ExitStack() as stack:
        hosts: Sequence[Host] = ()
        if flags.rate is not None:
            hosts = stack.enter_context(Hosts(2, rate_mbit=flags.rate or None))
            print(f"TCP alone, {workers} connections each way: {mb_s(hosts, workers):.0f} MB/s")
        head = f"{'net':<8}{'workers':>8}{'clients':>8}{'chunks':>8}  {'job':<31}"
        print(f"{head}{'core-ms':>9}{'ms':>9}  ratio")
        for net in nets:
            rows: list[tuple[str, Sequence[Job]]] = [(f"{FORMS[0].workers:>8}", FORMS)]
            if flags.table != "forms":
                ways = flags.exchange.split(",")
                rows = [
                    (
                        f"{count * workers:>8}{count:>8}{chunks(net, count * workers, count):>8}",
                        by_clients(count, workers, ways),
                    )
                    for count in map(int, clients.split(","))
                ]
            for columns, jobs in rows:
                steps = flags.steps or STEPS.get(net, 30)
                found = by_turns(
                    net, jobs, steps=steps, rounds=flags.rounds, beside=beside, hosts=hosts
                )
                print_rows(f"{net:<8}{columns:<24}", found)
                facts += [
                    {"net": net, "job": name, "rate_mbit": flags.rate, "median_s": ms / 1e3}
                    for name, (_, ms) in found.items()
                ]
    if flags.json is not None:
        flags.json.write_text(json.dumps([{"facts": facts}], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
