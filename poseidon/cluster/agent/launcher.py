"""Launching the processes of a job through agents, one agent on each host.

Law: every agent runs before the first process is started anywhere, and `close` leaves none behind.
What goes to a host's shell is a fixed script with quoted arguments
(`poseidon.cluster.ssh.quoting`); everything about the job travels over the agent's standard input.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from poseidon.cluster.agent.line_channel import LineChannel
from poseidon.cluster.agent.link import AgentLink, LinkSettings
from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.machinefile import Host
from poseidon.cluster.parallel import close_each, for_each_host, format_problems
from poseidon.cluster.process import Listener, ProcessSpec
from poseidon.cluster.remote_python import RemotePython
from poseidon.errors import JobError, printable

LOGGER = logging.getLogger("poseidon.cluster.agent")
STDERR_LINES = 20
STDERR_S = 2.0
"""How long to wait for the end of a failed agent's standard error."""


class RemoteChannel(LineChannel, Protocol):
    """The standard streams of a program on a host, line by line."""

    def receive_error(self) -> bytes | None:
        """Return the next line of its standard error; None at the end."""


class HostConnection(Protocol):
    """A connection that starts programs on a host: over SSH, or through a task of the
    rendezvous.
    """

    @property
    def label(self) -> str:
        """The host in messages, `ml@node3`."""

    def open(self, argv: Sequence[str], *, timeout_s: float = 15.0) -> RemoteChannel:
        """Start a program and connect to its standard streams; see `SshConnection.open`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEnvironment:
    """Where the processes of a host run; equal environments share an agent.

    Attributes:
        connection: to the host.
        python: how Python is run there.
    """

    connection: HostConnection
    python: RemotePython


class AgentLauncher:
    """A `Launcher` over agents, whatever connects to them.

    Args:
        links: the agent of each host, by the host's id; lines of the machinefile for one host may
            share one. Owned from here on.
    """

    def __init__(self, links: Mapping[int, AgentLink]) -> None:
        self._links = dict(links)

    def start(self, spec: ProcessSpec, host: Host, listener: Listener) -> RemoteProcess:
        """Start a process on a host; see `Launcher.start`."""
        return self._links[host.id].start(spec, listener)

    def scratch(self, host: Host) -> str:
        """Return a folder on the host that only this user can enter; it lasts as long as the
        agent there.
        """
        return self._links[host.id].scratch

    def cores(self, host: Host) -> int:
        """Return how many CPUs the host's processes may use: a share where several lines name
        one host.
        """
        link = self._links[host.id]
        return max(1, link.cores // sum(other is link for other in self._links.values()))

    def close(self) -> None:
        """End what still runs, and the agents. May be called twice."""
        close_links(self._links.values())


def open_agents(
    environments: Mapping[int, HostEnvironment],
    record: Mapping[str, object],
    job: str,
    settings: LinkSettings | None = None,
) -> AgentLauncher:
    """Start an agent in every environment, in parallel; hosts in one environment share an agent.

    Args:
        environments: of each host, by its id.
        record: the job, as `record_fields` writes it.
        job: its id.
        settings: the time limits.

    Raises:
        JobError: lists the problems host by host; no agent is left.
    """
    distinct = list(dict.fromkeys(environments.values()))
    opened = for_each_host(
        lambda environment: _open(environment, record, job, settings or LinkSettings()),
        distinct,
        name="poseidon agents",
    )
    outcomes = dict(zip(distinct, opened, strict=True))
    links = {
        environment: link for environment, link in outcomes.items() if isinstance(link, AgentLink)
    }
    problems = [str(outcome) for outcome in outcomes.values() if isinstance(outcome, JobError)]
    if problems:
        close_links(links.values())
        raise JobError(format_problems(problems, of=len(distinct)))
    return AgentLauncher({host: links[environment] for host, environment in environments.items()})


def close_links(links: Iterable[AgentLink]) -> None:
    """Close all in parallel: each may have processes to end.

    `AgentLink.close` has limits of its own.
    """
    close_each(set(links), name="poseidon agent close")


def _open(
    environment: HostEnvironment, record: Mapping[str, object], job: str, settings: LinkSettings
) -> AgentLink:
    argv = environment.python.module_command("poseidon.cluster.agent", "--job", job)
    channel = environment.connection.open(argv, timeout_s=settings.hello_s)
    stderr = _StderrTail(channel, environment.connection.label)
    link = AgentLink(channel, environment.connection.label, settings)
    try:
        link.connect(record)
    except JobError as error:
        link.close()
        last = stderr.last_line()
        raise JobError(
            f"{error}" + (f"; its last line of standard error: {printable(last)}" if last else "")
        ) from error
    return link


class _StderrTail:
    """Reads an agent's standard error and keeps the end of it."""

    def __init__(self, channel: RemoteChannel, label: str) -> None:
        self._channel = channel
        self._label = label
        self._kept: deque[str] = deque(maxlen=STDERR_LINES)
        self._thread = threading.Thread(
            target=self._read, name="poseidon agent stderr", daemon=True
        )
        self._thread.start()

    def last_line(self) -> str:
        """Return the last line that is not blank, once the output has ended."""
        self._thread.join(STDERR_S)
        return next((line for line in reversed(self._kept) if line.strip()), "")

    def _read(self) -> None:
        try:
            while (line := self._channel.receive_error()) is not None:
                self._kept.append(line.decode("utf-8", errors="backslashreplace"))
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: the job does not depend on this
            LOGGER.warning("%s: the agent's standard error cannot be read: %r", self._label, error)
