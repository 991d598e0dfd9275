#!/usr/bin/env python3
"""What the kills of `elastic.py --script` cost jobs of torchrun and torchft.

    sudo python benchmarks/elastic_others.py --kills 20
    sudo python benchmarks/elastic_others.py --kills 20 --torchft /opt/torchft/bin/python

The same transformer trains on the same hosts, with AdamW and DDP over gloo, in clear. One host has
the rendezvous of torchrun or the Lighthouse of torchft and is not killed. SIGKILL ends a worker, or
everything on a host. A supervisor on every host starts its process again at once. torchrun's jobs
write a checkpoint each second, take the newest of all hosts when they start, and wait one second
for further hosts, in place of torchrun's default of 30. torchft (`--torchft` names a Python that has it) continues without the lost replica's records.

Printed for each kill: the longest time without an iteration within the time to the next kill; the
time until all hosts take part again; and the iterations that were computed again, or not at all on
the lost records' host. Neither promises the weights of a job without kills.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.checkout import use_environment

use_environment()

import psutil

from benchmarks.chaos_runs.definitions import TRANSFORMER
from benchmarks.testbed.measurement_lock import alone
from poseidon.errors import JobError
from tests.support.ssh_hosts import SshHost, SshHosts, clean_environment

SHOWN = re.compile(r"Iteration (\d+) of (\d+) workers")
WORKER, HOST = "a worker", "a host"
PORT = 29511
LIMIT_S = 120.0
"""The longest wait for all hosts to take part."""
MODEL = TRANSFORMER.replace("import torch, poseidon", "import torch") % 4000
TORCHRUN = (
    MODEL
    + """
import os, time
import torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
checkpoint, steps = Path("/root/snaps/checkpoint.pt"), 0
if checkpoint.exists():
    steps = torch.load(checkpoint)["steps"]
found = [None] * dist.get_world_size()
dist.all_gather_object(found, steps)
newest = found.index(max(found))
if found[newest]:
    box = [torch.load(checkpoint) if dist.get_rank() == newest else None]
    dist.broadcast_object_list(box, newest)
    net.load_state_dict(box[0]["net"])
    optimizer.load_state_dict(box[0]["optimizer"])
    steps = box[0]["steps"]
model = DistributedDataParallel(net)
sampler = torch.utils.data.DistributedSampler(data)
written_s = time.monotonic()
while True:
    for x, y in torch.utils.data.DataLoader(data, batch_size=12, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if dist.get_rank() == 0:
            print(f"Iteration {steps} of {dist.get_world_size()} workers", file=sys.stderr)
        if time.monotonic() - written_s >= 1:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
            torch.save(state, "/root/snaps/partial")
            os.replace("/root/snaps/partial", checkpoint)
            written_s = time.monotonic()
"""
)
TORCHFT = (
    MODEL
    + """
import socket
from datetime import timedelta
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

store = dist.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)


def load(state):
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    load_state_dict=load,
    state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
    min_replica_size=1,
    rank=0,
    world_size=1,
    store_addr=socket.gethostname(),
    store_port=store.port,
    replica_id=socket.gethostname(),
    timeout=timedelta(seconds=10),
)
model, managed = DistributedDataParallel(manager, net), Optimizer(manager, optimizer)
generator = torch.Generator().manual_seed(int(socket.gethostname()[4:]))
while True:
    chosen = torch.randint(len(data), (12,), generator=generator)
    x, y = data[chosen]
    managed.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    managed.step()
    taking = manager.num_participants()
    print(f"Iteration {manager.current_step()} of {taking} workers", file=sys.stderr)
"""
)
LIGHTHOUSE = """
import threading
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="[::]:%d", min_replicas=1, join_timeout_ms=100)
threading.Event().wait()
"""
STORE = """
import threading
from torch.distributed import TCPStore
store = TCPStore("0.0.0.0", %d, is_master=True, wait_for_workers=False)
threading.Event().wait()
"""


class SupervisedJob:
    """A job whose process on each host is started again whenever it has ended.

    Args:
        hosts: those that train; then the one that is not killed.
        torchft: a Python with torchft; None: the job is torchrun's.
    """

    def __init__(self, hosts: SshHosts, torchft: str | None) -> None:
        self.workers, desk = hosts[: len(hosts) - 1], hosts[len(hosts) - 1]
        python = torchft or sys.executable
        rendezvous = f"{desk.name}:{PORT}"
        if torchft:
            self._words = ["env", f"TORCHFT_LIGHTHOUSE=http://{rendezvous}", python, "train.py"]
        else:
            self._words = [python, "-m", "torch.distributed.run", f"--nnodes=1:{len(self.workers)}"]
            self._words += ["--nproc_per_node=1", "--max_restarts=100000", "--rdzv_backend=c10d"]
            self._words += [f"--rdzv_endpoint={rendezvous}", "--rdzv_id=job"]
            self._words += [
                "--monitor_interval=0.1",
                "--rdzv_conf=is_host=0,last_call_timeout=1",
                "train.py",
            ]
        for host in self.workers:
            host.outside("/root/snaps").mkdir()
            host.outside("/root/train.py").write_text(TORCHFT if torchft else TORCHRUN)
        self.lines: list[tuple[float, int, int]] = []
        """When an iteration was shown, its number, and how many workers took part in it."""
        self.told: list[str] = []
        self._closing = False
        common = (LIGHTHOUSE if torchft else STORE) % PORT
        self._desk = subprocess.Popen(
            desk.command([python, "-c", common]), env=clean_environment(), stderr=subprocess.DEVNULL
        )
        self._threads = [
            threading.Thread(target=self._supervise, args=(host,)) for host in self.workers
        ]
        for thread in self._threads:
            thread.start()

    def _supervise(self, host: SshHost) -> None:
        for attempt in itertools.count():
            if self._closing:
                return
            # a restarted host gives equal process numbers, by which torchrun would confuse its agents
            forks = f'for i in $(seq {7 * attempt}); do /bin/true; done; exec "$@"'
            with contextlib.suppress(ValueError, psutil.Error, AssertionError):  # the host starts
                process = subprocess.Popen(
                    host.command(["sh", "-c", forks, "sh", *self._words]),
                    env=clean_environment(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                assert process.stderr is not None
                for line in process.stderr:
                    if found := SHOWN.search(line):
                        self.lines.append((time.monotonic(), int(found[1]), int(found[2])))
                    else:
                        self.told.append(f"{host.name}: {line.rstrip()}")
                process.wait()
            time.sleep(0.1)

    def wait_for_all(self, since: int) -> float:
        """Return when all hosts take part in an iteration, from a line on.

        Raises:
            JobError: they do not.
        """
        end_s, number = time.monotonic() + LIMIT_S, since
        while time.monotonic() < end_s:
            while number < len(self.lines):
                shown_s, _, workers = self.lines[number]
                if workers == len(self.workers):
                    return shown_s
                number += 1
            time.sleep(0.05)
        raise JobError("the hosts do not all take part again:\n" + "\n".join(self.told[-30:]))

    def kill(self, kind: str, host: SshHost) -> None:
        """Kill the worker of a host, or the host, which then starts again."""
        if kind == HOST:
            host.crash()
            host.start()
            return
        for process in host.processes():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[-1:] == ["train.py"] and not process.children():
                    process.kill()

    def close(self) -> None:
        """End all processes. The hosts are down then."""
        self._closing = True
        self._desk.kill()
        self._desk.wait()
        for host in self.workers:
            host.close()
        for thread in self._threads:
            thread.join()


def disturb(job: SupervisedJob, kills: int, every_s: float) -> list[tuple[str, float, float, int]]:
    """Kill so often; return kind, stall, time until all take part, and lost iterations of each."""
    losses = []
    job.wait_for_all(0)
    time.sleep(every_s)
    began_s, first = time.monotonic(), job.lines[-1][1]
    for number in range(kills):
        dice = random.Random(number)
        kind, host = dice.choice((WORKER, HOST)), dice.choice(job.workers)
        killed_s, before = time.monotonic(), len(job.lines)
        highest = max(iteration for _, iteration, _ in job.lines)
        job.kill(kind, host)
        while not any(workers < len(job.workers) for _, _, workers in job.lines[before:]):
            if time.monotonic() > killed_s + every_s:
                break  # it was back before the next iteration
            time.sleep(0.05)
        back_s = job.wait_for_all(len(job.lines)) - killed_s
        time.sleep(every_s)
        times = [shown_s for shown_s, _, _ in job.lines[before - 1 :]]
        stall_s = max(later - earlier for earlier, later in itertools.pairwise(times))
        lowest = min(iteration for _, iteration, _ in job.lines[before:])
        losses.append((kind, stall_s, back_s, max(0, highest + 1 - lowest)))
        print(f"  {number}: {kind}, stall {stall_s:.2f} s, all back {back_s:.1f} s", flush=True)
    took_s, made = time.monotonic() - began_s, job.lines[-1][1] - first
    print(f"{made} iterations in {took_s:.0f} s with {kills} kills")
    return losses


def show(losses: Sequence[tuple[str, float, float, int]]) -> None:
    """Print a table of losses by kind."""
    print(
        f"{'killed':12} {'times':>5} {'stall p50':>9} {'most':>6} {'back p50':>8} {'repeated':>8}"
    )
    for kind in (WORKER, HOST, "all"):
        some = [loss for loss in losses if kind in (loss[0], "all")]
        if some:
            _, stalls, backs, repeated = zip(*some, strict=True)
            print(
                f"{kind:12} {len(some):5} {statistics.median(stalls):9.2f} {max(stalls):6.2f} "
                f"{statistics.median(backs):8.1f} {statistics.mean(repeated):8.1f}"
            )


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4, help="with a worker each (4)")
    parser.add_argument("--kills", type=int, default=10, help="how many (10)")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between two (8)")
    parser.add_argument("--torchft", metavar="PYTHON", help="measure torchft, with this Python")
    flags = parser.parse_args()
    with (
        alone(print),
        tempfile.TemporaryDirectory(prefix="poseidon-hosts-") as folder,
        SshHosts(Path(folder), flags.hosts + 1) as hosts,
    ):
        job = SupervisedJob(hosts, flags.torchft)
        try:
            show(disturb(job, flags.kills, flags.every))
        finally:
            job.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
