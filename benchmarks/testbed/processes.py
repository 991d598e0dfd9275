"""Processes on hosts: started in their namespaces, watched, and ended.

Law: no process outlives `Processes`. Each leads a session of its own and is killed with all that it
started, by its id.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.hosts import Host
from benchmarks.testbed.links import INTERFACE
from benchmarks.testbed.template import Forked, Template
from poseidon.base.settings import inherited_environment
from poseidon.launcher.processes import child_environment

ROOT = Path(__file__).resolve().parents[2]
LAST_WORDS = 12
END_S = 10.0
ON_HOST = {"GLOO_SOCKET_IFNAME": INTERFACE}
"""Further environment of processes on a host: the interface of gloo."""


def environment() -> dict[str, str]:
    """Return the environment of every measured process: Poseidon's settings of malloc, and one
    thread of arithmetic.
    """
    return {**inherited_environment(), **child_environment(threads=1), "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTime:
    """Processor time of a process."""

    user_s: float
    system_s: float

    def since(self, before: CpuTime) -> CpuTime:
        """Return the difference to `before`."""
        return CpuTime(user_s=self.user_s - before.user_s, system_s=self.system_s - before.system_s)


class Processes:
    """Some processes, each with its output in a file.

    Args:
        folder: folder of the files.
        template: forks modules in place of starting them; None: there is none.
    """

    def __init__(self, folder: Path, template: Template | None = None) -> None:
        self._folder = folder
        self._template = template
        self._running: dict[str, subprocess.Popen[bytes] | Forked] = {}

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        host: Host | None = None,
    ) -> None:
        """Start one.

        Args:
            name: of its file of output, and in errors.
            argv: the program and its arguments.
            host: the host; None: outside all hosts.

        Raises:
            TestbedError: it cannot be started.
        """
        words = [*(host.enter if host else ()), *argv]
        try:
            with self._log(name).open("wb") as log:
                self._running[name] = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env={**environment(), **(ON_HOST if host else {})},
                    start_new_session=True,
                )
        except OSError as error:
            raise TestbedError(f"cannot start {name}: {error}") from error

    def start_module(
        self, name: str, module: str, argv: Sequence[str], *, host: Host | None = None
    ) -> None:
        """Start a module of Python.

        Args:
            name: as for `start`.
            module: its name, as after `python -m`.
            argv: its arguments.
            host: the host; None: outside all hosts.

        Raises:
            TestbedError: it cannot be started.
        """
        if self._template is None:
            self.start(name, [sys.executable, "-m", module, *argv], host=host)
            return
        self._log(name).touch()  # the fork may write later than it is read
        self._running[name] = self._template.fork(
            module,
            argv,
            log=self._log(name),
            namespace=host.name if host else None,
            variables=ON_HOST if host else {},
        )

    def check(self) -> None:
        """Check that all still run, or have ended with status 0.

        Raises:
            TestbedError: one has failed; the text has its last lines.
        """
        for name, process in self._running.items():
            status = process.poll()
            if status:
                last = self.output(name)[-LAST_WORDS:]
                raise TestbedError("\n".join([f"{name} failed with status {status}:", *last]))

    def cpu_time(self, name: str) -> CpuTime:
        """Return a process's processor seconds so far; zero when it is gone."""
        try:
            times = psutil.Process(self._running[name].pid).cpu_times()
        except psutil.Error:
            return CpuTime(user_s=0.0, system_s=0.0)
        return CpuTime(user_s=times.user, system_s=times.system)

    def await_end(self, limit_s: float = END_S) -> None:
        """Wait until all have ended by themselves, or the time is up."""
        end_s = time.monotonic() + limit_s
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end_s - time.monotonic()))

    def output(self, name: str) -> list[str]:
        """Return the lines that a process has written so far."""
        return self._log(name).read_text(encoding="utf-8", errors="replace").splitlines()

    def close(self) -> None:
        """End all that still run. Safe to call twice."""
        for process in self._running.values():
            _signal(process, signal.SIGTERM)
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            _signal(process, signal.SIGKILL)
            process.wait()
        self._running.clear()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '_')}.log"

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _signal(process: subprocess.Popen[bytes] | Forked, number: int) -> None:
    # not reaped: its id, which is also the group's, is still its own
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
