"""The hosts of a machinefile: on this machine, over SSH, or through Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poseidon.cluster.machinefile import Host, is_loopback
from poseidon.cluster.name_lookup import addresses_of
from poseidon.cluster.ssh.config import SshConfig, SshSettings
from poseidon.cluster.ssh.connections import SshConnection, connect_each
from poseidon.errors import JobError, UsageError
from poseidon.launch.ray_site import RaySite
from poseidon.launch.remote_site import RemoteSite
from poseidon.launch.request import JobRequest, LauncherKind
from poseidon.launch.site import LocalSite, Site, read_hosts

NAMES_S = 15.0
"""How long to wait for the addresses of the hosts' names, which may be known on the hosts alone."""


def site_of(request: JobRequest) -> Site:
    """Return the site of a job's machinefile.

    Raises:
        MachinefileError: a line is wrong.
        UsageError: the machines cannot be started as --launcher asks, or cannot reach each other.
    """
    if request.launcher is LauncherKind.RAY:
        return RaySite(request)
    hosts = read_hosts(request.hostfile, request.num_comm_channels_per_client)
    remote = [host for host in hosts if not is_loopback(host.address)]
    if request.launcher is LauncherKind.LOCAL and remote:
        raise UsageError(
            f"--launcher=local starts processes on this machine only, and client {remote[0].id} "
            f"is on {remote[0].address}"
        )
    if request.launcher is LauncherKind.LOCAL or (
        request.launcher is LauncherKind.AUTO and not remote
    ):
        return LocalSite(hosts)
    local = [host for host in hosts if is_loopback(host.address)]
    if remote and local:
        raise UsageError(
            f"{request.hostfile}: client {local[0].id} is on {local[0].address}, which the other "
            "machines cannot reach; "
            "expected a name or an address of this machine on their network"
        )
    return SshSite(hosts, SshSettings(config=request.ssh_config))


class SshSite(RemoteSite):
    """A `Site` over SSH: an agent on each host, behind one connection.

    Args:
        hosts: of the machinefile.
        settings: of the connections.
    """

    def __init__(self, hosts: tuple[Host, ...], settings: SshSettings) -> None:
        super().__init__(hosts)
        self._settings = settings

    def connect_each(self, hosts: Sequence[Host]) -> Mapping[int, SshConnection | JobError]:
        """See `RemoteSite`."""
        return connect_each(hosts, self._settings)

    def names(self) -> Mapping[int, tuple[str, ...]]:
        """See `RemoteSite`."""
        config = SshConfig(self._settings)
        dialled = {host.id: config.endpoint(host).host for host in self._hosts}
        known = addresses_of({*dialled.values(), *(host.address for host in self._hosts)}, NAMES_S)
        return {host.id: names_of(host, dialled[host.id], known) for host in self._hosts}


def names_of(host: Host, dialled: str, known: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of a host: as in the machinefile, as SSH dials it, and their addresses as
    known here.

    Args:
        host: as in the machinefile.
        dialled: what SSH dials.
        known: the addresses of names.
    """
    names = [host.address, dialled]
    names += [address for name in (host.address, dialled) for address in known.get(name, ())]
    return tuple(
        name for name in dict.fromkeys(names) if name == host.address or not is_loopback(name)
    )
