"""Starting the processes of a job through agents, one on each host.

Law: an agent is there before the first process is started anywhere, and `close` leaves none behind.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from poseidon.cluster.agent.link import AgentLink
from poseidon.cluster.agent.remote_process import FarProcess
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import Listener, ProcessSpec


class AgentLauncher:
    """A `Launcher` over agents, however they are reached.

    Args:
        links: the agent of each client, by the client's id; clients of one host may share one. Owned from here on.
    """

    def __init__(self, links: Mapping[int, AgentLink]) -> None:
        self._links = dict(links)

    def start(self, spec: ProcessSpec, host: Host, listener: Listener) -> FarProcess:
        """Start a process on a client's host; see `Launcher.start`."""
        return self._links[host.id].start(spec, listener)

    def scratch(self, host: Host) -> str:
        """A folder on a client's host that only this user can enter, until the agent there goes."""
        return self._links[host.id].scratch

    def cores(self, host: Host) -> int:
        """CPUs that the processes of a client may use, its share where several clients are on one host."""
        link = self._links[host.id]
        return max(1, link.cores // sum(other is link for other in self._links.values()))

    def close(self) -> None:
        """End what still runs, and the agents. May be called twice."""
        close_links(self._links.values())


def close_links(links: Iterable[AgentLink]) -> None:
    """Close all at once: each may have processes to end."""
    threads = [
        threading.Thread(target=link.close, name=f"poseidon {link.where} close", daemon=True)
        for link in set(links)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
