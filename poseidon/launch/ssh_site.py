"""The hosts of a machinefile, reached over SSH.

Law: nothing starts anywhere before all hosts were checked. Connections last as long as the job; a broken one is made anew
for a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from poseidon.cluster.agent.launcher import AgentLauncher, HostEnvironment, open_agents
from poseidon.cluster.host_checks import HostCheck, HostNeeds, check_hosts
from poseidon.cluster.jobs.registry import JobRecord, record_fields
from poseidon.cluster.machinefile import Host, is_loopback
from poseidon.cluster.name_lookup import addresses_of
from poseidon.cluster.parallel import for_each_host, format_problems
from poseidon.cluster.remote_python import RemotePython
from poseidon.cluster.ssh.config import SshConfig, SshSettings
from poseidon.cluster.ssh.connections import (
    SshConnection,
    check_reached,
    close_all,
    connect_all,
    connect_each,
    reached,
)
from poseidon.cluster.ssh.delivery import deliver, sent_file
from poseidon.errors import JobError, JobInterrupted, UsageError
from poseidon.launch.request import JobRequest, LauncherKind
from poseidon.launch.site import (
    AgentSiteLauncher,
    FileSet,
    LocalSite,
    Site,
    SiteLauncher,
    launcher_environment,
    read_hosts,
)
from poseidon.launch.snapshots import RemoteFiles, SnapshotCopies, SnapshotSource

_ANSWER_S = 10.0
NAMES_S = 15.0
"""How long to wait for the addresses of the hosts' names, which may be known on the hosts alone."""


def site_of(request: JobRequest) -> Site:
    """Return the site of a job's machinefile.

    Raises:
        MachinefileError: a line is wrong.
        UsageError: the machines cannot be started as --launcher asks, or cannot reach each other.
    """
    hosts = read_hosts(request.hostfile, request.num_comm_channels_per_client)
    remote = [host for host in hosts if not is_loopback(host.address)]
    if request.launcher is LauncherKind.LOCAL and remote:
        raise UsageError(
            f"--launcher=local starts processes on this machine only, and client {remote[0].id} is on {remote[0].address}"
        )
    if request.launcher is LauncherKind.LOCAL or (request.launcher is LauncherKind.AUTO and not remote):
        return LocalSite(hosts)
    local = [host for host in hosts if is_loopback(host.address)]
    if remote and local:
        raise UsageError(
            f"{request.hostfile}: client {local[0].id} is on {local[0].address}, which the other machines cannot reach; "
            "expected a name or an address of this machine on their network"
        )
    return SshSite(hosts, SshSettings(config=request.ssh_config))


class SshSite(Site):
    """A `Site` over SSH: an agent on each host, behind one connection.

    Args:
        hosts: of the machinefile.
        settings: of the connections.
    """

    def __init__(self, hosts: tuple[Host, ...], settings: SshSettings) -> None:
        self._hosts = hosts
        self._settings = settings
        self._own = launcher_environment()
        self._connections: dict[int, SshConnection] = {}

    @property
    def hosts(self) -> tuple[Host, ...]:
        """See `Site`."""
        return self._hosts

    def prepare(self, needs: Callable[[Host], HostNeeds]) -> None:
        """See `Site`; connects to all hosts first."""
        self._connections = dict(connect_all(self._hosts, self._settings))
        config = SshConfig(self._settings)
        dialled = {host.id: config.endpoint(host).host for host in self._hosts}
        known = addresses_of({*dialled.values(), *(host.address for host in self._hosts)}, NAMES_S)
        asked = {
            host.id: replace(needs(host), addresses=names_of(host, dialled[host.id], known))
            for host in self._hosts
        }
        environments = self._environments()
        first_of: dict[HostEnvironment, int] = {}
        for number, environment in environments.items():
            first_of.setdefault(environment, number)
        addresses = check_hosts(
            [
                HostCheck(
                    connection=self._connections[first_of[environment]],
                    interpreter=environment.python.command(),
                    needs=tuple(
                        asked[number] for number, other in environments.items() if other == environment
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
            return self._connections[writer().id].sftp()

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

    def _silent(self) -> set[SshConnection]:
        connections = list({self._connections[host.id] for host in self._hosts})
        answers = for_each_host(_answers, connections, name="poseidon ask")
        return {connection for connection, up in zip(connections, answers, strict=True) if up is not True}

    def launcher(self, record: JobRecord, files: Callable[[], Sequence[FileSet]]) -> SiteLauncher:
        """See `Site`."""
        launcher = AgentSiteLauncher(self._open_agents(record))
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
            return open_agents(self._environments(), record_fields(record), record.job)
        except JobError as error:
            # A connection behind a jump host may stand and carry nothing any more: the next start makes it anew.
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
        environments = self._environments()

        def send_to(host: Host) -> dict[Path, str]:
            files = [
                replace(file, remote=f"{agents.scratch(host)}/{host.id}/{number}/{file.local.name}")
                for number, group in enumerate(sent)
                for file in group
            ]
            connection = self._connections[host.id]
            deliver(files, connection, name=connection.label, python=environments[host.id].python.command())
            return {file.local: file.remote for file in files}

        working = [host for host in self._hosts if host.works]
        outcomes = for_each_host(send_to, working, name="poseidon bring")
        problems = [str(outcome) for outcome in outcomes if isinstance(outcome, JobError)]
        if problems:
            raise JobInterrupted(format_problems(problems, of=len(working)), iteration=0, while_starting=True)
        return {
            host.id: outcome
            for host, outcome in zip(working, outcomes, strict=True)
            if not isinstance(outcome, JobError)
        }

    def close(self) -> None:
        """See `Site`."""
        close_all(set(self._connections.values()))
        self._connections.clear()

    def _environments(self) -> dict[int, HostEnvironment]:
        return {
            host.id: HostEnvironment(
                connection=self._connections[host.id], python=RemotePython.of(host, self._own)
            )
            for host in self._hosts
        }

    def _reconnect(self) -> None:
        """Make broken connections anew; those that can be made stay, even if others cannot."""
        broken = [host for host in self._hosts if not self._connections[host.id].alive]
        close_all({self._connections[host.id] for host in broken})
        outcomes = connect_each(broken, self._settings)
        self._connections.update(reached(outcomes))
        check_reached(outcomes)


def _answers(connection: SshConnection) -> bool:
    return connection.run(["true"], timeout_s=_ANSWER_S).status == 0


def names_of(host: Host, dialled: str, known: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of a host: as in the machinefile, as SSH dials it, and their addresses as known here.

    Args:
        host: as in the machinefile.
        dialled: what SSH dials.
        known: the addresses of names.
    """
    names = [host.address, dialled]
    names += [address for name in (host.address, dialled) for address in known.get(name, ())]
    return tuple(name for name in dict.fromkeys(names) if name == host.address or not is_loopback(name))
