"""Hosts that a connection of their own reaches, with an agent on each: over SSH, or through Ray.

Law: nothing starts anywhere before all hosts were checked. Connections last as long as the
job; a broken one is made anew for a restart.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from poseidon.cluster.agent.launcher import (
    AgentLauncher,
    HostEnvironment,
    RemoteChannel,
    open_agents,
)
from poseidon.cluster.host_checks import HostCheck, HostNeeds, check_hosts
from poseidon.cluster.jobs.registry import JobRecord, record_fields
from poseidon.cluster.machinefile import Host
from poseidon.cluster.parallel import close_each, for_each_host, format_problems
from poseidon.cluster.remote_python import RemotePython
from poseidon.cluster.ssh.channel import Finished
from poseidon.cluster.ssh.delivery import deliver, sent_file
from poseidon.errors import JobError, JobInterrupted
from poseidon.launch.site import (
    AgentSiteLauncher,
    FileSet,
    Site,
    SiteLauncher,
    launcher_environment,
)
from poseidon.launch.snapshots import RemoteFiles, SnapshotCopies, SnapshotSource

ANSWER_S = 10.0
CLOSE_S = 5.0


class RemoteConnection(Protocol):
    """A connection to a host that runs programs and copies files."""

    @property
    def label(self) -> str:
        """The host in messages."""

    @property
    def alive(self) -> bool:
        """Whether the connection is up: no loss was noticed yet."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Finished:
        """Run a program to its end."""

    def open(self, argv: Sequence[str], *, timeout_s: float = 15.0) -> RemoteChannel:
        """Start a program and connect to its standard streams."""

    def sftp(self) -> Any:
        """Open a session for files; see `Sftp` and `RemoteFiles`."""

    def close(self) -> None:
        """Close the connection. May be called twice."""


class RemoteSite(Site):
    """A `Site` of remote hosts: an agent on each, behind one connection.

    Args:
        hosts: in the order of their ids.
    """

    def __init__(self, hosts: tuple[Host, ...]) -> None:
        self._hosts = hosts
        self._own = launcher_environment()
        self._connections: dict[int, RemoteConnection] = {}
        self._unchecked = False

    @abstractmethod
    def connect_each(self, hosts: Sequence[Host]) -> Mapping[int, RemoteConnection | JobError]:
        """Connect to hosts in parallel; return the connection to each, or the error, by the
        host's id.
        """

    @abstractmethod
    def names(self) -> Mapping[int, tuple[str, ...]]:
        """Return the names and addresses at which each host may be reached by the others, best
        first, by its id.
        """

    def reconnected(self) -> None:
        """Check what may have changed with new connections.

        Raises:
            JobError: lists the problems host by host.
        """

    @property
    def hosts(self) -> tuple[Host, ...]:
        """See `Site`."""
        return self._hosts

    def prepare(self, needs: Callable[[Host], HostNeeds]) -> None:
        """See `Site`; connects to all hosts first."""
        self._connections = self._connect_all()
        self.check(needs)

    def check(self, needs: Callable[[Host], HostNeeds]) -> None:
        """Check all hosts, and note their addresses; see `prepare`."""
        names = self.names()
        asked = {host.id: replace(needs(host), addresses=names[host.id]) for host in self._hosts}
        environments = self.environments()
        first_of: dict[HostEnvironment, int] = {}
        for number, environment in environments.items():
            first_of.setdefault(environment, number)
        addresses = check_hosts(
            [
                HostCheck(
                    connection=self._connections[first_of[environment]],
                    interpreter=environment.python.command(),
                    needs=tuple(
                        asked[number]
                        for number, other in environments.items()
                        if other == environment
                    ),
                )
                for environment in first_of
            ]
        )
        self._hosts = tuple(replace(host, peer_address=addresses[host.id]) for host in self._hosts)

    def snapshot_source(
        self, writer: Callable[[], Host], folder: Path, warn: Callable[[str], None]
    ) -> SnapshotSource:
        """See `Site`."""

        def connect() -> RemoteFiles:
            session: RemoteFiles = self._connections[writer().id].sftp()
            return session

        return SnapshotCopies(folder, connect, warn)

    def drop_missing(self) -> tuple[Host, ...]:
        """See `Site`."""
        silent = self._silent()
        missing = tuple(host for host in self._hosts if self._connections[host.id] in silent)
        left = tuple(host for host in self._hosts if host not in missing)
        if not any(host.works for host in left):
            return ()
        self._hosts = left
        return missing

    def _silent(self) -> set[RemoteConnection]:
        connections = list({self._connections[host.id] for host in self._hosts})
        answers = for_each_host(_answers, connections, name="poseidon ask")
        return {
            connection
            for connection, up in zip(connections, answers, strict=True)
            if up is not True
        }

    def launcher(self, record: JobRecord, files: Callable[[], Sequence[FileSet]]) -> SiteLauncher:
        """See `Site`."""
        launcher = self.site_launcher(self._open_agents(record))
        try:
            sets = files()
            if sets:
                launcher.sent = self._send(sets, launcher.agents)
        except BaseException:
            launcher.close()
            raise
        return launcher

    def _open_agents(self, record: JobRecord) -> AgentLauncher:
        try:
            self._reconnect()
            return open_agents(self.environments(), record_fields(record), record.job)
        except JobError as error:
            # A connection behind a jump host may stand and carry nothing any more: the next start
            # makes it anew.
            close_all(self._silent())
            raise JobInterrupted(str(error), iteration=0, while_starting=True) from error

    def _send(self, sets: Sequence[FileSet], agents: AgentLauncher) -> dict[int, dict[Path, str]]:
        """Send files to all hosts that work, into the folders that their agents remove.

        Returns:
            The path of each file on a host, by the host's id.

        Raises:
            JobInterrupted: lists the hosts that could not take them.
        """
        sent = [[sent_file(path, "") for path in paths] for paths in sets]
        environments = self.environments()

        def send_to(host: Host) -> dict[Path, str]:
            files = [
                replace(file, remote=f"{agents.scratch(host)}/{host.id}/{number}/{file.local.name}")
                for number, group in enumerate(sent)
                for file in group
            ]
            connection = self._connections[host.id]
            deliver(
                files,
                connection,
                name=connection.label,
                python=environments[host.id].python.command(),
            )
            return {file.local: file.remote for file in files}

        working = [host for host in self._hosts if host.works]
        outcomes = for_each_host(send_to, working, name="poseidon bring")
        problems = [str(outcome) for outcome in outcomes if isinstance(outcome, JobError)]
        if problems:
            raise JobInterrupted(
                format_problems(problems, of=len(working)), iteration=0, while_starting=True
            )
        return {
            host.id: outcome
            for host, outcome in zip(working, outcomes, strict=True)
            if not isinstance(outcome, JobError)
        }

    def close(self) -> None:
        """See `Site`."""
        close_all(self._connections.values())
        self._connections.clear()

    def site_launcher(self, agents: AgentLauncher) -> AgentSiteLauncher:
        """Return what starts processes through agents."""
        return AgentSiteLauncher(agents)

    def environments(self) -> dict[int, HostEnvironment]:
        """Return where the processes of each host run, by its id."""
        return {
            host.id: HostEnvironment(
                connection=self._connections[host.id], python=RemotePython.of(host, self._own)
            )
            for host in self._hosts
        }

    def _connect_all(self) -> dict[int, RemoteConnection]:
        outcomes = self.connect_each(self._hosts)
        connections = reached(outcomes)
        try:
            check_reached(outcomes)
        except JobError:
            close_all(connections.values())
            raise
        return connections

    def _reconnect(self) -> None:
        """Make broken connections anew; those that can be made stay, even if others cannot."""
        broken = [host for host in self._hosts if not self._connections[host.id].alive]
        close_all(self._connections[host.id] for host in broken)
        outcomes = self.connect_each(broken)
        self._connections.update(reached(outcomes))
        check_reached(outcomes)
        self._unchecked = self._unchecked or bool(broken)
        if self._unchecked:
            self.reconnected()
            self._unchecked = False


def reached(outcomes: Mapping[int, RemoteConnection | JobError]) -> dict[int, RemoteConnection]:
    """Return the connections that were made."""
    return {
        host: outcome for host, outcome in outcomes.items() if not isinstance(outcome, JobError)
    }


def check_reached(outcomes: Mapping[int, RemoteConnection | JobError]) -> None:
    """Raise an error if not every host was reached.

    Raises:
        JobError: lists the problems host by host.
    """
    distinct = dict.fromkeys(outcomes.values())
    problems = [str(outcome) for outcome in distinct if isinstance(outcome, JobError)]
    if problems:
        raise JobError(format_problems(problems, of=len(distinct)))


def close_all(connections: Iterable[RemoteConnection]) -> None:
    """Close connections in parallel: a dead host answers late."""
    close_each(set(connections), name="poseidon remote close", limit_s=CLOSE_S)


def _answers(connection: RemoteConnection) -> bool:
    return connection.run(["true"], timeout_s=ANSWER_S).status == 0
