#!/usr/bin/env python3
"""Kill processes and hosts of one job again and again, and measure what each loss costs.

    sudo python benchmarks/elastic.py --kills 300 --every 15
    sudo python benchmarks/elastic.py --kills 20 --script --exchange=svb    # a transformer, AdamW
    sudo python benchmarks/elastic.py --kills 0 --rounds 5    # the cost of memory snapshots alone

The hosts are namespaces with a network and a file tree each; the launcher is on one more. Each kill
is drawn from a seed: SIGKILL of a worker, of a shard, of all processes of a host, or of everything
on a host, whose sshd then starts again. The next kill comes so many seconds later, once all hosts
take part again. Printed for each kind: the time from the kill to the first iteration after it, the
time until all hosts take part again, and the iterations that were computed again; for the whole job
the part of the time that was lost in neither, and whether a job without kills has the same weights.

`--rounds` runs jobs with and without memory snapshots by turns, without kills.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import psutil

from benchmarks.chaos_runs.definitions import RECORDS, TRANSFORMER, write_job, write_pictures
from benchmarks.testbed.measurement_lock import alone
from poseidon.errors import JobError
from tests.support.ssh_hosts import SshHost, SshHosts, clean_environment

SHOWN = re.compile(r"Iteration (\d+), loss: ")
CURVE = re.compile(r"Iteration \d+, |Train net output|worker.py:\d+\] ")
"""Lines of iterations and of nets."""
GOES_ON = re.compile(r"continuing from .* in memory")
WORKER, SHARD, CLIENT, HOST = "a worker", "a shard", "all processes of a host", "a host"
KINDS = (WORKER, SHARD, CLIENT, HOST)
LIMIT_S = 120.0
"""The longest wait for a line of the job."""
LAST = 0.05
"""The part of the iterations at the end in which nothing is killed."""
BACK_S = 10.0
"""About the time from a kill until all hosts take part again, for the length of the job."""


SCRIPT = (
    TRANSFORMER % 4000
    + """
with poseidon.distribute(net, optimizer, batch_size=4, clip=1.0) as group:
    loader = group.loader(data, batch_size=4)
    group.resume()
    while group.steps < int(sys.argv[1]):
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            if group.step() and group.rank == 0:
                print(f"Iteration {group.steps}, loss: {loss.item():g}", file=sys.stderr)
            if group.steps == int(sys.argv[1]):
                break
    group.settle()
    if group.rank == 0:
        torch.save(net.state_dict(), f"/root/snaps/snap_iter_{group.steps}.pt")
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What one kill has cost.

    Attributes:
        kind: what was killed.
        stall_s: from the kill to the first iteration after it.
        back_s: from the kill until all hosts take part again.
        repeated: iterations that were computed again.
    """

    kind: str
    stall_s: float
    back_s: float
    repeated: int


class RunningJob:
    """A job on the hosts, and the lines that its launcher prints, with their times."""

    def __init__(self, desk: SshHost, *words: str) -> None:
        words = (sys.executable, "-m", "poseidon", *words)
        self._launcher = subprocess.Popen(
            desk.command(list(words)),
            env=clean_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._launcher.stderr is not None
        for line in self._launcher.stderr:
            with self._arrived:
                self.lines.append((time.monotonic(), line.rstrip()))
                self._arrived.notify_all()
        with self._arrived:
            self._arrived.notify_all()

    def wait_for(self, wanted: re.Pattern[str], since: int) -> int:
        """Return the number of the first line from `since` on that is wanted.

        Raises:
            JobError: it did not come.
        """
        end_s, number = time.monotonic() + LIMIT_S, since
        with self._arrived:
            while True:
                while number < len(self.lines):
                    if wanted.search(self.lines[number][1]):
                        return number
                    number += 1
                if time.monotonic() > end_s or not self._reader.is_alive():
                    told = [line for _, line in self.lines if not CURVE.search(line)]
                    last = "\n".join(told[-20:])
                    raise JobError(f"no line '{wanted.pattern}' came; the last ones:\n{last}")
                self._arrived.wait(1.0)

    def iteration(self, before: int) -> int:
        """Return the last iteration shown before a line."""
        for _, line in reversed(self.lines[:before]):
            if found := SHOWN.search(line):
                return int(found[1])
        return 0

    def seconds_between(self, first: int, last: int) -> float:
        """Return the seconds from one iteration to another, both shown once."""
        at = {int(found[1]): s for s, line in self.lines if (found := SHOWN.search(line))}
        return at[last] - at[first]

    def finish(self) -> None:
        """Wait for its end.

        Raises:
            JobError: it has failed.
        """
        status = self._launcher.wait()
        self._reader.join()
        if status:
            raise JobError("\n".join(line for _, line in self.lines[-20:]))

    def stop(self) -> None:
        """End it, if it still runs."""
        self._launcher.terminate()
        self._launcher.wait()
        self._reader.join()


class Cluster:
    """The hosts of the jobs, with their data, and the launcher's.

    Args:
        hosts: the launcher's host is the last.
        flags: of each job.
        script: whether the jobs run a script.
    """

    def __init__(self, hosts: SshHosts, flags: Sequence[str], *, script: bool) -> None:
        self.workers, self._desk = hosts[: len(hosts) - 1], hosts[len(hosts) - 1]
        self._flags, self._script = flags, script
        lines = [f"{number} {host.name} 0\n" for number, host in enumerate(self.workers)]
        self._desk.outside("/root/machines").write_text("".join(lines))
        self._job = self._desk.outside("/root/job")
        for host in self.workers:
            for name in ("snaps", "data"):
                host.outside(f"/root/{name}").mkdir()
            write_pictures(host.outside("/root/data/train_lmdb"), 0, RECORDS)

    def start(self, name: str, iterations: int, *flags: str) -> RunningJob:
        """Start a job of so many iterations."""
        for host in self.workers:
            for path in host.outside("/root/snaps").glob("snap_*"):
                path.unlink()
        flags = (
            f"--job={name}",
            "--hostfile=machines",
            f"--output=output_{name}",
            "--elastic=max_rejoins=100000",
            *self._flags,
            *flags,
        )
        if self._script:
            self._desk.outside("/root/train.py").write_text(SCRIPT)
            flags = (*flags, "--max_restarts=3", "train.py", str(iterations))
            return RunningJob(self._desk, "run", *flags)
        write_job(
            self._job,
            iterations,
            source="/root/data/train_lmdb",
            prefix="/root/snaps/snap",
            shared=True,
        )
        own = ("--solver=job/solver.prototxt", "--set=display=1", "--set=snapshot=0")
        return RunningJob(self._desk, "train", *own, *flags)

    def train(self, name: str, iterations: int, *flags: str) -> RunningJob:
        """Train a job of so many iterations to its end."""
        job = self.start(name, iterations, *flags)
        try:
            job.finish()
        finally:
            job.stop()
        return job

    def model(self, iterations: int) -> str:
        """Return the SHA-256 of the weights that a job has written, on whichever host."""
        name = f"/root/snaps/snap_iter_{iterations}.{'pt' if self._script else 'caffemodel'}"
        found = [path for host in self.workers if (path := host.outside(name)).exists()]
        return hashlib.sha256(found[0].read_bytes()).hexdigest()

    def kill(self, kind: str, host: SshHost) -> None:
        """Kill processes of a host."""
        if kind == HOST:
            host.crash()
            host.start()
            return
        wanted = {WORKER: ("--rank",), SHARD: ("--shard",)}.get(kind, ("--rank", "--shard"))
        for process in host.processes():
            with contextlib.suppress(psutil.Error):
                if set(wanted) & set(process.cmdline()):
                    process.kill()


def disturb(cluster: Cluster, kills: int, every_s: float, iterations: int) -> list[Loss]:
    """Train a job of so many iterations, and kill so often; return what each kill has cost."""
    everybody = re.compile(rf": {len(cluster.workers)} clients, ")
    job = cluster.start("disturbed", iterations)
    losses: list[Loss] = []
    try:
        job.wait_for(SHOWN, job.wait_for(everybody, 0))
        for number in range(kills):
            time.sleep(every_s)
            if job.iteration(len(job.lines)) > (1 - LAST) * iterations:
                break  # it has been faster than measured
            dice = random.Random(number)
            kind, host = dice.choice(KINDS), dice.choice(cluster.workers)
            began_s, before = time.monotonic(), len(job.lines)
            cluster.kill(kind, host)
            went_on = job.wait_for(GOES_ON, before)
            first = job.wait_for(SHOWN, went_on)
            found = SHOWN.search(job.lines[first][1])
            assert found is not None
            again = job.wait_for(SHOWN, job.wait_for(everybody, went_on))
            losses.append(
                Loss(
                    kind=kind,
                    stall_s=job.lines[first][0] - began_s,
                    back_s=job.lines[again][0] - began_s,
                    repeated=max(0, job.iteration(went_on) + 1 - int(found[1])),
                )
            )
            print(f"  {number}: {losses[-1]}", flush=True)
        job.finish()
    finally:
        job.stop()
    return losses


def show(losses: Sequence[Loss]) -> None:
    """Print a table of losses by kind."""
    print(f"{'killed':30} {'times':>5} {'stall p50':>9} {'p99':>6} {'back p50':>8} {'repeated':>8}")
    for kind in (*KINDS, "all"):
        some = [loss for loss in losses if kind in (loss.kind, "all")]
        if some:
            stalls = sorted(loss.stall_s for loss in some)
            p99 = stalls[min(len(stalls) - 1, round(0.99 * len(stalls)))]
            back = statistics.median(loss.back_s for loss in some)
            repeated = statistics.mean(loss.repeated for loss in some)
            print(
                f"{kind:30} {len(some):5} {statistics.median(stalls):9.2f} {p99:6.2f} {back:8.1f} "
                f"{repeated:8.1f}"
            )


def cost(cluster: Cluster, rounds: int, iterations: int) -> None:
    """Train with and without memory snapshots by turns, and print the seconds of an iteration."""
    found: dict[str, list[float]] = {"--elastic=1": [], "--elastic=0": []}
    for number in range(rounds):
        for flag, seconds in found.items():
            job = cluster.train(f"cost{number}{flag[-1]}", iterations, flag)
            first = iterations // 4  # the first snapshots measure their own cost
            seconds.append(job.seconds_between(first, iterations - 1) / (iterations - 1 - first))
            print(f"  {flag}: {1000 * seconds[-1]:.2f} ms an iteration", flush=True)
    with_them, without = (statistics.median(seconds) for seconds in found.values())
    print(f"with memory snapshots {1000 * with_them:.2f} ms, without {1000 * without:.2f} ms")
    print(f"they cost {100 * (with_them / without - 1):.1f} %")


def main() -> int:
    """Run the command; return 1 if the weights differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4, help="with a worker and a shard each (4)")
    parser.add_argument("--virtual_workers", type=int, default=12, help="of the job (12)")
    parser.add_argument("--exchange", default="auto", help="of each job (auto)")
    parser.add_argument("--script", action="store_true", help="train a transformer by a script")
    parser.add_argument("--kills", type=int, default=20, help="how many (20)")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two (15)")
    parser.add_argument("--rounds", type=int, default=0, help="of jobs without kills (0)")
    parser.add_argument("--iterations", type=int, default=400, help="of a job without kills (400)")
    flags = parser.parse_args()
    with (
        alone(print),
        tempfile.TemporaryDirectory(prefix="poseidon-hosts-") as folder,
        SshHosts(Path(folder), flags.hosts + 1) as hosts,
    ):
        own = (f"--virtual_workers={flags.virtual_workers}", f"--exchange={flags.exchange}")
        cluster = Cluster(hosts, own, script=flags.script)
        if flags.rounds:
            cost(cluster, flags.rounds, flags.iterations)
        if not flags.kills:
            return 0
        return compare(cluster, flags.kills, flags.every, flags.iterations)


def compare(cluster: Cluster, kills: int, every_s: float, iterations: int) -> int:
    """Disturb a job that is long enough for all kills, and compare it with one that is not
    disturbed.
    """
    job = cluster.train("measured", iterations)
    each_s = job.seconds_between(iterations // 4, iterations - 1) / (iterations * 3 / 4)
    length = round(kills * (every_s + BACK_S) / each_s)
    print(f"{1000 * each_s:.1f} ms an iteration; {length} iterations with {kills} kills")
    began_s = time.monotonic()
    losses = disturb(cluster, kills, every_s, length)
    took_s = time.monotonic() - began_s
    disturbed = cluster.model(length)
    show(losses)
    lost_s = sum(loss.stall_s + each_s * loss.repeated for loss in losses)
    print(
        f"goodput: {100 * (1 - lost_s / took_s):.1f} % ({len(losses)} kills in {took_s:.0f} s cost "
        f"{lost_s:.1f} s in stalls and repeated iterations)"
    )
    cluster.train("undisturbed", length)
    same = cluster.model(length) == disturbed
    print(f"the weights are {'the same' if same else 'DIFFERENT'}: sha256 {disturbed}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
