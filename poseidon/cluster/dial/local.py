"""An agent in this process, for hosts that are this machine."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from poseidon.cluster.agent.child import ChildSettings
from poseidon.cluster.agent.host import Agent, AgentSettings
from poseidon.cluster.agent.remote import AgentTimeouts, RemoteAgent
from poseidon.cluster.dial.channel import QueueChannel
from poseidon.cluster.dial.dialer import Dialer
from poseidon.cluster.machinefile import Host
from poseidon.errors import JobError

THIS_MACHINE = "this machine"
NEVER_S = 1e9
WITHIN_PROCESS = AgentTimeouts(silence_s=NEVER_S, launcher_silence_s=NEVER_S)
"""Silence says nothing about threads of one process: they wait for a processor. An agent whose
thread ends closes its channel.
"""


def dial_here(label: str = THIS_MACHINE, children: ChildSettings | None = None) -> RemoteAgent:
    """Return an agent on a thread of this process.

    Args:
        label: this machine in messages.
        children: settings of the processes that it starts.
    """
    theirs, ours = QueueChannel.pair()
    agent = Agent(theirs, AgentSettings(children=children or ChildSettings()))
    threading.Thread(target=agent.serve, name="poseidon agent", daemon=True).start()
    remote = RemoteAgent(ours, label, WITHIN_PROCESS)
    remote.connect()
    return remote


class LocalDialer(Dialer):
    """One agent for all hosts; see `Dialer`."""

    here = True

    def dial(self, hosts: Sequence[Host], job: str) -> Mapping[int, RemoteAgent | JobError]:
        """See `Dialer`. A worker may read this process's standard input."""
        return dict.fromkeys(
            (host.id for host in hosts), dial_here(children=ChildSettings(stdin=0))
        )
