"""A harness for a job of several clients on this host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from benchmarks.chaos_runs.definitions import write_job
from benchmarks.chaos_runs.faults import LOCAL, Fault, Kind
from benchmarks.chaos_runs.harness import ROOT, Harness, is_meant, number_of


class LocalHarness(Harness):
    """See `Harness`."""

    kinds = LOCAL

    def __init__(self, folder: Path, clients: int, iterations: int) -> None:
        super().__init__(folder, clients, iterations)
        self._solver = write_job(
            folder, iterations, source="train_lmdb", prefix="snap", shared=True
        )
        self._hosts = folder / "hosts"
        self._hosts.write_text("".join(f"{client} 127.0.0.1 0\n" for client in range(clients)))

    def start(self, job: str) -> subprocess.Popen[str]:
        """See `Harness`."""
        words = [
            sys.executable,
            "-m",
            "poseidon",
            "train",
            f"--solver={self._solver}",
            f"--job={job}",
        ]
        words += [f"--hostfile={self._hosts}", f"--output={self.folder / 'output'}", "--threads=1"]
        words += [f"--max_restarts={self.max_restarts}", "--stall_timeout=8", "--snapshot_keep=3"]
        environment = {
            **os.environ,
            "POSEIDON_HOME": str(self.folder / "home"),
            "PYTHONPATH": str(ROOT),
        }
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def strike(self, job: str, launcher: subprocess.Popen[str], fault: Fault) -> int:
        """See `Harness`."""
        if fault.kind is Kind.LAUNCHER:
            launcher.kill()
            return 1
        hit = 0
        for process, words in self.processes(job):
            if number_of(words) == fault.client and (
                fault.kind is Kind.CLIENT or is_meant(fault.kind, words)
            ):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(
                        signal.SIGSTOP if fault.kind is Kind.STOPPED else signal.SIGKILL
                    )
                    hit += 1
        return hit

    def processes(self, job: str) -> list[tuple[psutil.Process, list[str]]]:
        """See `Harness`."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if job in words and ("--rank" in words or "--shard" in words):
                    found.append((process, words))
        return found

    def launchers(self, job: str) -> list[psutil.Process]:
        """See `Harness`."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                found += [process] if f"--job={job}" in process.cmdline() else []
        return found

    def snapshots(self) -> Path:
        """See `Harness`."""
        return self.folder

    def mend(self) -> None:
        """See `Harness`. A stopped process was killed with its job."""
