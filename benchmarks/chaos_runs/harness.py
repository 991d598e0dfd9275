"""A harness that runs a job and injects faults, on this host or on others.

Law: a run ends with the job's last process, and with every fault undone.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path

import psutil

from benchmarks.chaos_runs.faults import STARTING, Fault, Kind
from benchmarks.chaos_runs.outcome import Ended

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400.0
GONE_S = 90.0
START_S = 8.0
"""Approximate time that a job takes to start."""


class Harness(ABC):
    """Runs a job and injects faults.

    Args:
        folder: folder of the data, the snapshots and the logs.
        clients: number of clients.
        iterations: iterations of a run.
    """

    kinds: tuple[Kind, ...]
    """The kinds of faults that this harness can inject."""

    def __init__(self, folder: Path, clients: int, iterations: int) -> None:
        self.clients = clients
        self.folder = folder
        self.iterations = iterations
        self.max_restarts = 3
        self._expected = b""

    @abstractmethod
    def start(self, job: str) -> subprocess.Popen[str]:
        """Start the command. It logs to its standard error."""

    @abstractmethod
    def strike(self, job: str, launcher: subprocess.Popen[str], fault: Fault) -> int:
        """Inject a fault. Return the number of the job's processes that it hit."""

    @abstractmethod
    def processes(self, job: str) -> list[tuple[psutil.Process, list[str]]]:
        """Return the processes of a job without the launcher, with their arguments."""

    @abstractmethod
    def launchers(self, job: str) -> list[psutil.Process]:
        """Return the launchers of a job that run."""

    @abstractmethod
    def snapshots(self) -> Path:
        """Return the folder of the snapshots."""

    @abstractmethod
    def mend(self) -> None:
        """Undo the effects of a fault outside the job."""

    def undisturbed(self) -> float:
        """Run the job once without a fault, for its weights, unless an earlier call in this
        folder did. Return its seconds.
        """
        weights, seconds = self.folder / "expected.caffemodel", self.folder / "expected.seconds"
        if not seconds.exists():
            began_s = time.monotonic()
            ended = self.run(-1, None)
            if ended.status != 0:
                raise RuntimeError(f"the undisturbed job fails: {ended.last}")
            weights.write_bytes(self._model().read_bytes())
            seconds.write_text(str(time.monotonic() - began_s))
        self._expected = weights.read_bytes()
        return float(seconds.read_text())

    def run(self, seed: int, fault: Fault | None) -> Ended:
        """Run the job and inject a fault."""
        for path in self.snapshots().glob("snap_*"):
            path.unlink()
        job = f"chaos-{os.getpid()}-{seed + 1}"
        began_s = time.monotonic()
        launcher = self.start(job)
        lines: list[str] = []
        reader = threading.Thread(target=_read, args=(launcher, lines))
        reader.start()
        at_s, hit = 0.0, 0
        if fault is not None:
            self._await_moment(launcher, lines, fault)
            at_s = time.monotonic() - began_s
            hit = self.strike(job, launcher, fault)
        status = launcher.wait(LIMIT_S)
        killed = status < 0 or (fault is not None and fault.kind is Kind.LAUNCHER)
        left = self._left(job, GONE_S if killed else 10.0)
        self.mend()
        took_s = time.monotonic() - began_s - at_s
        reader.join(10)
        model = self._model()
        same = model.read_bytes() == self._expected if status == 0 and model.exists() else None
        printed = [line for line in lines if line.strip()]
        shown = fault or Fault(kind=Kind.WORKER, client=0, after=1.0, delay_s=0.0)
        return Ended(
            seed=seed,
            fault=shown,
            hit=hit,
            at_s=at_s,
            took_s=took_s,
            status=status,
            last=printed[-1].strip() if printed else "",
            traceback="Traceback" in "".join(lines),
            same_bits=same,
            left=left,
        )

    def _await_moment(
        self, launcher: subprocess.Popen[str], lines: list[str], fault: Fault
    ) -> None:
        """Wait until the job has reached the moment of the fault, or has ended."""
        if fault.after < STARTING:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(fault.after / STARTING * START_S)
        else:
            while launcher.poll() is None and _iteration(lines) < fault.after * self.iterations:
                time.sleep(0.02)
        time.sleep(fault.delay_s)

    def _left(self, job: str, limit_s: float) -> int:
        """Return the number of processes of a job that run longer than a limit after its end."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s and self.processes(job):
            time.sleep(0.2)
        return len(self.processes(job))

    def _model(self) -> Path:
        return self.snapshots() / f"snap_iter_{self.iterations}.caffemodel"


def _read(launcher: subprocess.Popen[str], lines: list[str]) -> None:
    assert launcher.stderr is not None
    for line in launcher.stderr:
        lines.append(line)


def _iteration(lines: list[str]) -> int:
    """Return the last iteration that the log shows."""
    for line in reversed(lines):
        if found := re.search(r"Iteration (\d+), loss", line):
            return int(found[1])
    return 0


def is_meant(kind: Kind, words: list[str]) -> bool:
    return ("--shard" if kind is Kind.SHARD else "--rank") in words


def number_of(words: list[str]) -> int:
    """Return the number of a process: with one worker and one shard a client, its client."""
    mark = "--shard" if "--shard" in words else "--rank"
    return int(words[words.index(mark) + 1])
