#!/usr/bin/env python3
"""Train for a long time, kill a process of the job every few minutes, and report each process's
memory.

    python benchmarks/soak.py --minutes=60 --kill_every=180 --hosts --clients=3

How to read it: one row for each life of a process that lasted long enough: resident memory when it
had warmed up and at the end of that life. The launcher lives all the time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import psutil

from benchmarks.chaos_runs.harness import Harness
from benchmarks.chaos_runs.local import LocalHarness
from benchmarks.chaos_runs.remote import RemoteHarness
from tests.support.ssh_hosts import SshHosts

LOOK_S = 2.0
WARM_S = 30.0
ENDLESS = 100_000_000


@dataclass(slots=True, kw_only=True)
class Life:
    """The memory of one process, from its start to its end."""

    name: str
    began_s: float
    warm_bytes: int = 0
    last_bytes: int = 0
    lasted_s: float = 0.0


@dataclass(slots=True)
class Lives:
    """The memory of all processes of a job so far, by pid and time of creation."""

    found: dict[tuple[int, float], Life] = field(default_factory=dict)

    def look(self, harness: Harness, job: str, now: float) -> None:
        """Note the memory of every process."""
        alive = [(process, _name(words)) for process, words in harness.processes(job)]
        alive += [(process, "launcher") for process in harness.launchers(job)]
        for process, name in alive:
            with contextlib.suppress(psutil.Error):
                key = (process.pid, process.create_time())
                life = self.found.setdefault(key, Life(name=name, began_s=now))
                life.last_bytes, life.lasted_s = process.memory_info().rss, now - life.began_s
                if life.lasted_s <= WARM_S:
                    life.warm_bytes = life.last_bytes

    def table(self) -> list[str]:
        """Return a table in Markdown, without processes that ended before they had warmed up."""
        lines = ["| process | lasted | RSS when warm | RSS at the end | |", "|---|---|---|---|---|"]
        for life in self.found.values():
            if life.lasted_s > 2 * WARM_S:
                grown = life.last_bytes / life.warm_bytes - 1
                mib = [f"{size / 2**20:.0f} MiB" for size in (life.warm_bytes, life.last_bytes)]
                lines.append(
                    f"| {life.name} | {life.lasted_s:.0f} s | {mib[0]} | {mib[1]} | {grown:+.1%} |"
                )
        return lines


def _name(words: list[str]) -> str:
    for mark, name in (("--rank", "worker"), ("--shard", "shard")):
        if mark in words:
            return f"{name} {words[words.index(mark) + 1]}"
    return "agent" if "poseidon.cluster.agent" in words else "launcher"


def soak(harness: Harness, *, seconds: float, kill_every_s: float, seed: int) -> list[str]:
    """Train for a time. Return the lines of the report."""
    harness.max_restarts = 10_000
    job, dice, lives = f"soak-{os.getpid()}", random.Random(seed), Lives()
    launcher = harness.start(job)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(launcher.stderr or ()))
    reader.start()
    began_s = time.monotonic()
    kill_s, kills = began_s + kill_every_s, 0
    while (now := time.monotonic()) < began_s + seconds and launcher.poll() is None:
        lives.look(harness, job, now)
        if now >= kill_s:
            kill_s = now + kill_every_s
            victims = [
                process for process, words in harness.processes(job) if _name(words) != "launcher"
            ]
            kills += bool(victims)
            with contextlib.suppress(psutil.Error, IndexError):
                dice.choice(victims).kill()
        time.sleep(LOOK_S)
    for process in harness.launchers(job):
        process.send_signal(signal.SIGTERM)
    status = launcher.wait(120)
    reader.join(10)
    last = [line.strip() for line in lines if line.strip()][-1:]
    left = len(harness.processes(job))
    return [
        *lives.table(),
        "",
        f"{kills} kills; exit {status}: {' '.join(last)}; {left} processes left",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Soak, and print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (60)")
    parser.add_argument(
        "--kill_every", type=float, default=180.0, help="seconds between two kills (180)"
    )
    parser.add_argument("--clients", type=int, default=3, help="of the job (3)")
    parser.add_argument("--hosts", action="store_true", help="on hosts of their own; needs root")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of victims (0)")
    flags = parser.parse_args(arguments)
    how = {"seconds": flags.minutes * 60, "kill_every_s": flags.kill_every}
    with tempfile.TemporaryDirectory(prefix="poseidon-soak-") as name:
        folder = Path(name)
        if flags.hosts:
            with SshHosts(folder, flags.clients + 1) as hosts:
                report = soak(RemoteHarness(folder, hosts, ENDLESS), seed=flags.seed, **how)
        else:
            report = soak(LocalHarness(folder, flags.clients, ENDLESS), seed=flags.seed, **how)
    print("\n".join(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
