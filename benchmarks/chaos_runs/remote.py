"""A harness for a job on hosts with only the network in common, started over SSH."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from benchmarks.chaos_runs.definitions import RECORDS, write_job, write_pictures
from benchmarks.chaos_runs.faults import CUT_S, FAR, Fault, Kind
from benchmarks.chaos_runs.harness import Harness, is_meant, number_of
from tests.support.ssh_hosts import SshHost, SshHosts, clean_environment

_AGENT = "poseidon.cluster.agent"
DOWN_S = 5.0
"""Time that a host without power stays down."""


class RemoteHarness(Harness):
    """See `Harness`.

    Args:
        folder: folder of the hosts' files.
        hosts: one for each client, and the launcher's.
        iterations: iterations of a run.
    """

    kinds = FAR

    def __init__(self, folder: Path, hosts: SshHosts, iterations: int) -> None:
        super().__init__(folder, len(hosts) - 1, iterations)
        self._hosts, self._desk = hosts[: len(hosts) - 1], hosts[len(hosts) - 1]
        self._mending: list[threading.Timer] = []
        lines = [f"{client} {host.name} 0\n" for client, host in enumerate(self._hosts)]
        self._desk.outside("/root/machines").write_text("".join(lines))
        prefix, source = "/root/snaps/snap", "/root/data/train_lmdb"
        write_job(
            self._desk.outside("/root/job"), iterations, source=source, prefix=prefix, shared=False
        )
        share = RECORDS // self.clients
        for client, host in enumerate(self._hosts):
            for name in ("snaps", "data"):
                host.outside(f"/root/{name}").mkdir()
            part = host.outside(f"/root/data/train_lmdb_{client}")
            write_pictures(part, client * share, (client + 1) * share)

    def start(self, job: str) -> subprocess.Popen[str]:
        """See `Harness`."""
        words = [
            sys.executable,
            "-m",
            "poseidon",
            "train",
            "--solver=job/solver.prototxt",
            f"--job={job}",
        ]
        words += [
            "--hostfile=machines",
            "--output=output",
            "--threads=1",
            "--stall_timeout=30",
            f"--max_restarts={self.max_restarts}",
            "--snapshot_keep=3",
        ]
        return subprocess.Popen(
            self._desk.command(words),
            env=clean_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def strike(self, job: str, launcher: subprocess.Popen[str], fault: Fault) -> int:
        """See `Harness`."""
        host = self._hosts[fault.client]
        if fault.kind is Kind.LAUNCHER:
            found = self.launchers(job)
            for process in found:
                process.kill()
            return len(found)
        if fault.kind in CUT_S:
            host.cut()
            self._later(CUT_S[fault.kind], host.mend)
            return len(self._on(host, job))
        if fault.kind is Kind.HOST:
            hit = len(self._on(host, job))
            host.crash()
            time.sleep(DOWN_S)
            host.start()  # by this thread: a host ends with the thread that started it
            return hit
        return self._kill(job, fault)

    def _kill(self, job: str, fault: Fault) -> int:
        hit = 0
        for process, words in self._on(self._hosts[fault.client], job):
            agent = _AGENT in words
            if fault.kind is Kind.AGENT:
                meant = agent
            else:
                meant = (
                    not agent
                    and number_of(words) == fault.client
                    and (fault.kind is Kind.CLIENT or is_meant(fault.kind, words))
                )
            if meant:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    hit += 1
        return hit

    def _on(self, host: SshHost, job: str) -> list[tuple[psutil.Process, list[str]]]:
        """Return the job's processes on a host, its agent among them, with their arguments."""
        found = []
        for process in host.processes():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                ours = job in words or _AGENT in words or f"--job={job}" in words
                found += [(process, words)] if ours else []
        return found

    def _later(self, seconds: float, act: object) -> None:
        assert callable(act)
        self._mending.append(threading.Timer(seconds, act))
        self._mending[-1].start()

    def processes(self, job: str) -> list[tuple[psutil.Process, list[str]]]:
        """See `Harness`."""
        found = []
        for host in (*self._hosts, self._desk):
            with contextlib.suppress(AssertionError, psutil.Error, ValueError):  # it is down
                found += self._on(host, job)
        return found

    def launchers(self, job: str) -> list[psutil.Process]:
        """See `Harness`."""
        return self._desk.processes_of(f"--job={job}")

    def snapshots(self) -> Path:
        """See `Harness`."""
        return self._hosts[0].outside("/root/snaps")

    def mend(self) -> None:
        """See `Harness`."""
        for timer in self._mending:
            timer.join()
        self._mending.clear()
        for host in self._hosts:
            host.wait_until_up()
