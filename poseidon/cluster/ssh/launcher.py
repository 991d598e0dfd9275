"""Starting the processes of a job over SSH: an agent on each host, behind one channel.

Law: what goes to a host's shell is a fixed script with its words quoted (`poseidon.cluster.ssh.quoting`); everything
about the job travels over the agent's standard input.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from poseidon.cluster.agent.launcher import AgentLauncher, close_links
from poseidon.cluster.agent.line_channel import LineChannel
from poseidon.cluster.agent.link import AgentLink, LinkSettings
from poseidon.cluster.all_at_once import all_at_once
from poseidon.cluster.machinefile import Host
from poseidon.cluster.remote_python import LauncherEnvironment, module_words, python_words
from poseidon.cluster.ssh.connections import listed
from poseidon.errors import JobError, printable

MOST_LAST_WORDS = 20


class Talk(LineChannel, Protocol):
    """A program on a host, talked to in lines."""

    def receive_error(self) -> bytes | None:
        """The next line of its standard error; None at the end."""


class ReachedHost(Protocol):
    """A host on which programs can be started: over SSH, or by a task of a meeting (`met_host.py`)."""

    @property
    def words(self) -> str:
        """Who it is, for messages."""

    def open(self, argv: Sequence[str], *, timeout_s: float = 15.0) -> Talk:
        """Start a program and talk to it; see `SshHost.open`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEnvironment:
    """Where and with what a client's processes run.

    Attributes:
        host: the connection to its host.
        own: where the launcher runs.
        python: see `Host`.
        workdir: see `Host`.
    """

    host: ReachedHost
    own: LauncherEnvironment
    python: str | None = None
    workdir: str | None = None

    def module(self, module: str, *arguments: str) -> tuple[str, ...]:
        """The words that run one of our modules there."""
        return module_words(self._client, self.own, module, *arguments)

    def interpreter(self, *arguments: str) -> tuple[str, ...]:
        """The words that run the interpreter there."""
        return python_words(self._client, self.own, *arguments)

    @property
    def _client(self) -> Host:
        return Host(id=0, address="", port=0, python=self.python, workdir=self.workdir)


def open_agents(
    places: Mapping[int, HostEnvironment],
    record: Mapping[str, object],
    job: str,
    settings: LinkSettings | None = None,
) -> AgentLauncher:
    """Start an agent at every place, all at once; clients in one place share one.

    Args:
        places: of each client, by its id.
        record: the job, as `record_fields` writes it.
        job: its id.
        settings: how long to wait for what.

    Raises:
        JobError: lists what is in the way, host by host; no agent is left.
    """
    distinct = list(dict.fromkeys(places.values()))

    opened = all_at_once(
        lambda place: _open(place, record, job, settings or LinkSettings()), distinct, name="poseidon agents"
    )
    outcomes = dict(zip(distinct, opened, strict=True))
    links = {place: link for place, link in outcomes.items() if isinstance(link, AgentLink)}
    problems = [str(outcome) for outcome in outcomes.values() if isinstance(outcome, JobError)]
    if problems:
        close_links(links.values())
        raise JobError(listed(problems, of=len(distinct)))
    return AgentLauncher({client: links[place] for client, place in places.items()})


def _open(
    place: HostEnvironment, record: Mapping[str, object], job: str, settings: LinkSettings
) -> AgentLink:
    lines = place.host.open(place.module("poseidon.cluster.agent", "--job", job), timeout_s=settings.greet_s)
    last_words = _LastWords(lines)
    link = AgentLink(lines, place.host.words, settings)
    try:
        link.greet(record)
    except JobError as error:
        link.close()
        said = last_words.text()
        raise JobError(f"{error}" + (f"; it last said: {printable(said)}" if said else "")) from error
    return link


class _LastWords:
    """Reads what an agent writes to its standard error, and keeps the end of it."""

    def __init__(self, lines: Talk) -> None:
        self._lines = lines
        self._kept: deque[str] = deque(maxlen=MOST_LAST_WORDS)
        self._thread = threading.Thread(target=self._read, name="poseidon agent stderr", daemon=True)
        self._thread.start()

    def text(self) -> str:
        """The last line, once there are no more."""
        self._thread.join(2.0)
        return next((line for line in reversed(self._kept) if line.strip()), "")

    def _read(self) -> None:
        while (line := self._lines.receive_error()) is not None:
            self._kept.append(line.decode("utf-8", errors="replace"))
