"""What a process of a job is to its launcher, wherever it runs.

The launcher starts a `ProcessSpec` on a client and from then on knows a `RunningProcess`: it sends lines,
and a `Listener` hears events, log lines and, last of all, the exit status. `LocalLauncher` does it with
child processes; one over SSH is a second implementation of `Launcher` and nothing else changes.

Law: secrets travel in the first line of standard input only, never in argv or the environment. No call
blocks for long, and no listener is called after `exited`.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from poseidon.cluster.machinefile import Host
from poseidon.cluster.plan import ProcessName


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """How to start one process.

    Attributes:
        name: who it is.
        argv: the program and its arguments; carries the job's id as a marker (`--job`, id) and no secret.
        environment: variables to add to those the launcher itself has.
        first_line: what it reads first on standard input, without the line end: one JSON document.
    """

    name: ProcessName
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    first_line: bytes = field(repr=False)


class Listener(Protocol):
    """Hears what a process says. Called from the launcher's threads, for one process in order."""

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """A JSON object with an `event` came on its standard output."""

    def log(self, name: ProcessName, line: str) -> None:
        """A line of free text came, without its line end."""

    def exited(self, name: ProcessName, status: int) -> None:
        """The process has ended; nothing follows.

        Args:
            name: which process.
            status: its exit status, or the negative number of the signal that killed it.
        """


class RunningProcess(Protocol):
    """A process that was started."""

    @property
    def name(self) -> ProcessName:
        """Who it is."""

    @property
    def pid(self) -> int:
        """Its process id on its own host."""

    @property
    def created_s(self) -> float:
        """When it was created, seconds since 1970 by its host; with the pid, which process it is."""

    def send_line(self, line: bytes) -> None:
        """Queue one line for its standard input. Returns at once; lost when the process is gone."""

    def poll(self) -> int | None:
        """Its exit status as `Listener.exited` gives it, or None while it runs."""

    def terminate(self) -> None:
        """Ask it to end (SIGTERM), also if it is stopped. Nothing happens when it is gone."""

    def kill(self) -> None:
        """End it and everything it started (SIGKILL). Nothing happens when it is gone."""

    def close(self) -> None:
        """Let go of its pipes and threads; kills it if it still runs. May be called twice."""


class Launcher(Protocol):
    """Starts processes on clients."""

    def start(self, spec: ProcessSpec, host: Host, listener: Listener) -> RunningProcess:
        """Start a process; its first line is on its way when this returns.

        Raises:
            JobError: it cannot be started; the text says what, where and why.
        """


def exit_words(status: int) -> str:
    """How a process ended, as the end of a sentence: `was killed by signal 9 (SIGKILL)`."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"was killed by signal {-status}"
