"""A job of several clients on this machine, and the hand that disturbs it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from benchmarks.chaos_runs.definitions import write_job
from benchmarks.chaos_runs.faults import LOCAL, Fault, Kind
from benchmarks.chaos_runs.verdict import Ended

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
GONE_S = 90.0


class LocalScene:
    """See the module's head.

    Args:
        folder: of the data, the snapshots and the logs.
        clients: how many.
        iterations: of a run.
    """

    kinds = LOCAL

    def __init__(self, folder: Path, clients: int, iterations: int) -> None:
        self.clients = clients
        self._folder = folder
        self._iterations = iterations
        self._solver = write_job(folder, iterations, shared=True)
        self._hosts = folder / "hosts"
        self._hosts.write_text("".join(f"{client} 127.0.0.1 0\n" for client in range(clients)))
        self._whole_s, self._expected = 0.0, b""

    def undisturbed(self) -> float:
        """Run the job once, to know its weights and its time in seconds; what an earlier call in this folder found holds."""
        weights, seconds = self._folder / "expected.caffemodel", self._folder / "expected.seconds"
        if not seconds.exists():
            self._measure(weights, seconds)
        self._whole_s, self._expected = float(seconds.read_text()), weights.read_bytes()
        return self._whole_s

    def _measure(self, weights: Path, seconds: Path) -> None:
        began_s = time.monotonic()
        ended = self.run(-1, None)
        if ended.status != 0:
            raise RuntimeError(f"the undisturbed job fails: {ended.last}")
        took_s = time.monotonic() - began_s
        weights.write_bytes(self._model().read_bytes())
        seconds.write_text(str(took_s))

    def run(self, seed: int, fault: Fault | None) -> Ended:
        """Run the job and let a fault happen to it."""
        for path in self._folder.glob("snap_*"):
            path.unlink()
        job = f"chaos-{os.getpid()}-{seed + 1}"
        began_s = time.monotonic()
        launcher = self._start(job)
        lines: list[str] = []
        reader = threading.Thread(target=_read, args=(launcher, lines))
        reader.start()
        at_s = 0.0
        if fault is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(fault.after * self._whole_s)
            at_s = time.monotonic() - began_s
            self._strike(job, launcher, fault)
        status = launcher.wait(LIMIT_S)
        left = _left(job, GONE_S if status < 0 else 10.0)
        took_s = time.monotonic() - began_s - at_s
        reader.join(10)
        model = self._model()
        same = model.read_bytes() == self._expected if status == 0 and model.exists() else None
        told = [line for line in lines if line.strip()]
        shown = fault or Fault(kind=Kind.WORKER, client=0, after=1.0)
        return Ended(
            seed=seed,
            fault=shown,
            at_s=at_s,
            took_s=took_s,
            status=status,
            last=told[-1].strip() if told else "",
            traceback="Traceback" in "".join(lines),
            same_bits=same,
            left=left,
        )

    def _start(self, job: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "poseidon", "train", f"--solver={self._solver}", f"--job={job}"]
        words += [f"--hostfile={self._hosts}", f"--output={self._folder / 'output'}", "--threads=1"]
        words += ["--max_restarts=3", "--stall_timeout=8", "--snapshot_keep=3"]
        environment = {**os.environ, "POSEIDON_HOME": str(self._folder / "home"), "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            words,
            cwd=self._folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _strike(self, job: str, launcher: subprocess.Popen[str], fault: Fault) -> None:
        if fault.kind is Kind.LAUNCHER:
            launcher.kill()
            return
        for process, words in _processes(job):
            with contextlib.suppress(psutil.NoSuchProcess):
                if fault.kind is Kind.CLIENT and _number(words) == fault.client:
                    process.kill()
                elif _is(fault.kind, words) and _number(words) == fault.client:
                    process.send_signal(signal.SIGSTOP if fault.kind is Kind.STOPPED else signal.SIGKILL)

    def _model(self) -> Path:
        return self._folder / f"snap_iter_{self._iterations}.caffemodel"


def _read(launcher: subprocess.Popen[str], lines: list[str]) -> None:
    assert launcher.stderr is not None
    lines.extend(launcher.stderr)


def _is(kind: Kind, words: list[str]) -> bool:
    return ("--shard" if kind is Kind.SHARD else "--rank") in words


def _number(words: list[str]) -> int:
    """With one worker and one shard a client, the client."""
    mark = "--shard" if "--shard" in words else "--rank"
    return int(words[words.index(mark) + 1])


def _processes(job: str) -> list[tuple[psutil.Process, list[str]]]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if job in words and ("--rank" in words or "--shard" in words):
                found.append((process, words))
    return found


def _left(job: str, limit_s: float) -> int:
    """How many processes of a job outlive its end by more than a time."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s and _processes(job):
        time.sleep(0.2)
    return len(_processes(job))
