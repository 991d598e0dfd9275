"""Starts a job's processes on hosts: a `Launcher` for `run_job`, whose clients are hosts by
their addresses.

    with Hosts(2, rate_mbit=250) as hosts:
        clients = [machinefile.Host(id=host.index, address=host.address, port=9000) for host in
        hosts] run_job(plan_job(clients, ...), make_spec, HostLauncher(hosts), ...)

Law: processes start as an agent starts them, except that they have their host's network.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from benchmarks.testbed.hosts import Host
from poseidon.cluster import machinefile
from poseidon.cluster.agent.child import ChildProcess, start_child
from poseidon.cluster.process import Listener, ProcessSpec
from poseidon.errors import JobError


class HostLauncher:
    """Starts each client's processes on the host that has its address.

    Args:
        hosts: entered.
    """

    def __init__(self, hosts: Iterable[Host]) -> None:
        self._hosts = {host.address: host for host in hosts}

    def start(
        self, spec: ProcessSpec, client: machinefile.Host, listener: Listener
    ) -> ChildProcess:
        """Start a process; see `Launcher.start`."""
        host = self._hosts.get(client.address)
        if host is None:
            known = ", ".join(self._hosts)
            raise JobError(
                f"client {client.id} is on {client.address}, which is none of the hosts: {known}"
            )
        inside = replace(spec, argv=(*host.enter, *spec.argv))
        return start_child(inside, listener)
