"""Real jobs in processes, for tests that kill them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registry

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job whose processes run: its id, its launcher, their pids (shards first)."""

    job: str
    launcher: subprocess.Popen[str]
    pids: tuple[int, ...]

    def kill_launcher(self) -> None:
        """Kill the launcher with SIGKILL."""
        self.launcher.kill()
        self.launcher.wait(30)


def environment(state_folder: Path) -> dict[str, str]:
    """Return the environment of commands that share a folder of job records."""
    return {**os.environ, "POSEIDON_HOME": str(state_folder), "PYTHONPATH": str(ROOT)}


@contextmanager
def job_that_listens(state_folder: Path, job: str) -> Iterator[int]:
    """Run a registered job whose one process listens on a port of 127.0.0.1, until the block ends.

    Yield the port.
    """
    program = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"
    command = [sys.executable, "-I", "-S", "-c", program, "--job", job]
    gone = RecordedProcess(name="launcher", host="127.0.0.1", pid=2**22 + 1, created="1.0")
    record = JobRecord(
        job=job, launcher=gone, hostfile=None, hosts=(), output="/nowhere", started_s=1.0
    )
    Registry(state_folder).write(record)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        yield int(child.stdout.readline())
        child.communicate()


@contextmanager
def running_job(state_folder: Path, stem: str, hostfile: Path) -> Iterator[RunningJob]:
    """Run a job until the block ends; processes that are left are killed.

    Its id begins with the stem and is like no other on this machine: tests that run beside this one
    find processes by their job's id too.
    """
    job = f"{stem}-{uuid.uuid4().hex[:8]}"
    command = [
        sys.executable,
        "-m",
        "tests.support.job_launcher",
        str(state_folder),
        job,
        str(hostfile),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids: list[int] = json.loads(launcher.stdout.readline() or "[]")
        try:
            assert pids, "the job did not start"
            yield RunningJob(job=job, launcher=launcher, pids=tuple(pids))
        finally:
            launcher.kill()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
