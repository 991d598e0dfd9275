"""The hosts of a job on the nodes of a Ray cluster.

Law: a client has a node of its own. A lost client gets another node as soon as Ray has one; its
address is then the new node's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from poseidon.cluster.agent.launcher import AgentLauncher, HostEnvironment
from poseidon.cluster.host_checks import HostNeeds
from poseidon.cluster.machinefile import Host, HostRole
from poseidon.cluster.ray.cluster import RayCluster, connect_to_cluster
from poseidon.cluster.ray.connection import RayConnection
from poseidon.cluster.ray.resources import ANY, Resources, parse_resources, pinned
from poseidon.cluster.remote_python import RemotePython
from poseidon.errors import JobError, UsageError
from poseidon.launch.remote_site import RemoteSite, close_all
from poseidon.launch.request import JobRequest
from poseidon.launch.site import AgentSiteLauncher, read_hosts

ACTOR_S = 60.0
"""How long an actor may take to start on its node; at the start of a job `--ray_timeout` may
give it longer.
"""
PROMPT_S = 2.0
"""How long to wait for nodes before a line says so."""
RETURN_S = 15.0
"""How long one attempt of a restart waits for a node; `--return_timeout` limits all of them."""


class RaySite(RemoteSite):
    """A `Site` on the nodes of a Ray cluster.

    Args:
        request: what the user asks for.

    Raises:
        MachinefileError: a line is wrong.
        UsageError: a flag or an option of the machinefile does not go with Ray.
    """

    def __init__(self, request: JobRequest) -> None:
        super().__init__(_hosts(request))
        self._lines = {host.id: host for host in self._hosts}
        self._request = request
        self._of_clients = parse_resources(request.ray_resources, "--ray_resources")
        self._of_servers = parse_resources(request.ray_server_resources, "--ray_server_resources")
        self._needs: Callable[[Host], HostNeeds] | None = None
        self._cluster: RayCluster | None = None
        self._bundles: dict[int, Resources] = {}

    @property
    def recorded_hosts(self) -> tuple[Host, ...]:
        """See `Site`: none, since nodes need no SSH. The launcher ends the job on all of them."""
        return ()

    def prepare(self, needs: Callable[[Host], HostNeeds]) -> None:
        """See `Site`; has Ray place the clients first."""
        self._cluster = connect_to_cluster(self._request.ray_address)
        self._needs = needs
        self._place()
        super().prepare(needs)

    def connect_each(self, hosts: Sequence[Host]) -> Mapping[int, RayConnection | JobError]:
        """See `RemoteSite`. Clients on other nodes than before are checked."""
        if not hosts:
            return {}
        cluster, labels = self._connected(), {host.id: f"client {host.id}" for host in hosts}
        if self._connections and not cluster.placed(RETURN_S):
            waiting = JobError(
                f"{', '.join(labels.values())}: no node of the Ray cluster within {RETURN_S:g} s; "
                f"{cluster.describe_lack()}"
            )
            return dict.fromkeys(labels, waiting)
        limit_s = ACTOR_S if self._connections else max(ACTOR_S, self._request.ray_timeout)
        outcomes = cluster.connect(labels, limit_s)
        found: dict[int, RayConnection | JobError] = {}
        nodes: dict[int, str] = {}
        for client, outcome in outcomes.items():
            found[client] = outcome if isinstance(outcome, JobError) else outcome[0]
            if not isinstance(outcome, JobError):
                nodes[client] = outcome[1].address
        self._hosts = tuple(
            replace(host, address=nodes[host.id], peer_address=None) if host.id in nodes else host
            for host in self._hosts
        )
        return found

    def drop_missing(self) -> tuple[Host, ...]:
        """See `Site`.

        The others get nodes anew, so that no autoscaler brings one for a client that was left out.
        """
        missing = super().drop_missing()
        if missing:
            close_all(self._connections.values())
            self._place(wait=False)
        return missing

    def names(self) -> Mapping[int, tuple[str, ...]]:
        """See `RemoteSite`."""
        return {host.id: (host.address,) for host in self._hosts}

    def reconnected(self) -> None:
        """See `RemoteSite`: checks the nodes, of which some are new."""
        assert self._needs is not None
        self.check(self._needs)

    def environments(self) -> dict[int, HostEnvironment]:
        """See `RemoteSite`. Without `python=` it is the interpreter of Ray on that node."""
        return {
            host.id: HostEnvironment(
                connection=self._connections[host.id],
                python=replace(
                    RemotePython.of(host, self._own),
                    python=host.python or _python(self._connections[host.id]),
                ),
            )
            for host in self._hosts
        }

    def site_launcher(self, agents: AgentLauncher) -> AgentSiteLauncher:
        """See `RemoteSite`. The CPUs of a client are those that Ray has reserved."""
        return _RaySiteLauncher(agents, self._bundles)

    def close(self) -> None:
        """See `Site`."""
        super().close()
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def _connected(self) -> RayCluster:
        assert self._cluster is not None, "prepare comes first"
        return self._cluster

    def _place(self, *, wait: bool = True) -> None:
        """Have Ray place the clients anew.

        Raises:
            UsageError: no node has the address of a client.
            JobError: not every client has a node in time.
        """
        cluster = self._connected()
        nodes = cluster.nodes
        self._bundles = {
            host.id: pinned(self._resources(host), self._lines[host.id].address, nodes)
            for host in self._hosts
        }
        cluster.request(self._bundles)
        if not wait or cluster.placed(PROMPT_S):
            return
        limit_s = self._request.ray_timeout
        print(f"waiting up to {limit_s:g} s for nodes: {cluster.describe_lack()}", file=sys.stderr)
        if not cluster.placed(limit_s):
            raise JobError(
                f"{cluster.describe_lack()}; after {limit_s:g} s (--ray_timeout) they have none; "
                "add nodes with 'ray start "
                "--address=HEAD:6379', or ask for fewer clients or resources"
            )

    def _resources(self, host: Host) -> Resources:
        """Return what a client asks of its node."""
        request = self._request
        if not host.works:
            return _some(
                {"CPU": float(request.num_comm_channels_per_client), **self._of_servers},
                "--ray_server_resources",
            )
        assert self._needs is not None
        devices = self._needs(host).devices
        if devices and sorted(devices) != list(range(len(devices))):
            numbers = ",".join(map(str, devices))
            raise UsageError(
                f"client {host.id} has GPUs {numbers}; Ray assigns GPUs and numbers them from 0, "
                f"so {len(devices)} of them "
                f"are {','.join(map(str, range(len(devices))))}"
            )
        workers = len(devices) or request.num_app_threads
        usual = {"CPU": float(workers * (request.threads or 1))}
        return _some(
            {**usual, **({"GPU": float(len(devices))} if devices else {}), **self._of_clients},
            "--ray_resources",
        )


class _RaySiteLauncher(AgentSiteLauncher):
    """See `AgentSiteLauncher`."""

    def __init__(self, agents: AgentLauncher, bundles: Mapping[int, Resources]) -> None:
        super().__init__(agents)
        self._bundles = bundles

    def cores(self, host: Host) -> int:
        """See `SiteLauncher`: the CPUs that Ray has reserved."""
        return max(1, min(self.agents.cores(host), int(self._bundles[host.id].get("CPU", 1))))


def _hosts(request: JobRequest) -> tuple[Host, ...]:
    """Return the clients of the machinefile, else as many as the flags ask for."""
    if not request.hostfile:
        working = request.clients or 1
        return tuple(
            Host(
                id=number,
                address=ANY,
                port=0,
                role=HostRole.BOTH if number < working else HostRole.SERVER,
            )
            for number in range(working + request.servers)
        )
    hosts = read_hosts(request.hostfile, request.num_comm_channels_per_client)
    for host in hosts:
        for option, value in (("user", host.user), ("ssh_port", host.ssh_port)):
            if value is not None:
                raise UsageError(
                    f"{request.hostfile}: client {host.id} has {option}={value}, which is for "
                    "SSH; expected none with "
                    "--launcher=ray"
                )
    return hosts


def _some(resources: Resources, flag: str) -> Resources:
    """Return the resources of a client; Ray refuses a bundle of none.

    Raises:
        UsageError: none is above 0.
    """
    if not any(resources.values()):
        raise UsageError(
            f"{flag}: a client asks for nothing of its node; expected a resource above 0, as in "
            "CPU=1"
        )
    return resources


def _python(connection: object) -> str | None:
    return connection.python if isinstance(connection, RayConnection) else None
