"""The contract of what opens channels to the agents of a job's hosts: local, SSH, tasks, Ray."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from poseidon.cluster.agent.child import ChildSettings
from poseidon.cluster.agent.host import Agent, AgentSettings
from poseidon.cluster.agent.remote import AgentTimeouts, RemoteAgent
from poseidon.cluster.dial.channel import QueueChannel
from poseidon.cluster.host_probe import HostNeeds
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import format_problems
from poseidon.errors import JobError
from ps_server.monitor import owned_thread

LOGGER = logging.getLogger("poseidon.cluster.dial")
CLOSE_S = 10.0

Needs = Callable[[Host], HostNeeds]
"""Returns what the processes of a host need."""


class Dialer(ABC):
    """Opens agents on hosts. Each kind says here how its hosts differ from the others'."""

    here = False
    """Whether the hosts are this machine: processes open their files where the job has checked
    them.
    """
    moves = False
    """Whether a host that is dialled again may be another machine, which has to be checked. Such
    hosts have no address that `poseidon ps` and `poseidon kill` may ask over SSH.
    """
    given = False
    """Whether the agents were there before the dialer: whoever made it ends them, and a lost one
    does not come back.
    """

    @property
    def takes_files(self) -> bool:
        """Whether the launcher's files are sent to the hosts, and snapshots copied from them; else
        all have the same under the same paths.
        """
        return not (self.here or self.given)

    @abstractmethod
    def dial(self, hosts: Sequence[Host], job: str) -> Mapping[int, RemoteAgent | JobError]:
        """Open the agents of hosts, in parallel; hosts may share one.

        Args:
            hosts: some hosts of the job.
            job: its id.

        Returns:
            The agent of each host, connected, or the error, by the host's id.
        """

    def place(  # noqa: B027 - most have nothing to choose
        self, hosts: Sequence[Host], needs: Needs
    ) -> None:
        """Choose the machines of hosts that are about to be dialled, where the user has not."""

    def located(self, hosts: Sequence[Host]) -> tuple[Host, ...]:
        """Return hosts with the addresses that dialling them has found."""
        return tuple(hosts)

    def names(self, hosts: Sequence[Host]) -> Mapping[int, tuple[str, ...]]:
        """Return the names and addresses at which each host may be reached by the others, best
        first, by its id.
        """
        return {host.id: (host.address,) for host in hosts}

    def cores(self, host: Host, found: int) -> int:
        """Return how many CPUs a host's processes may use.

        Args:
            host: the host.
            found: its part of those that its agent may use.
        """
        return found

    def resume_command(self, command: str, changes: Mapping[str, str]) -> str:
        """Return how a user resumes the job.

        Args:
            command: resumes it, if the job was started by a command.
            changes: the flags in it that the job did not have: values by name.
        """
        return command

    def close(self) -> None:  # noqa: B027 - most have nothing of their own
        """End what the dialer holds besides its agents. May be called twice."""


def opened(outcomes: Mapping[int, RemoteAgent | JobError]) -> dict[int, RemoteAgent]:
    """Return the agents that were opened."""
    return {host: agent for host, agent in outcomes.items() if isinstance(agent, RemoteAgent)}


def check_opened(outcomes: Mapping[int, RemoteAgent | JobError]) -> None:
    """Raise an error if not every host has its agent.

    Raises:
        JobError: lists the problems host by host.
    """
    distinct = dict.fromkeys(outcomes.values())
    problems = [str(outcome) for outcome in distinct if isinstance(outcome, JobError)]
    if problems:
        raise JobError(format_problems(problems, of=len(distinct)))


def close_agents(agents: Iterable[RemoteAgent]) -> None:
    """Close agents in parallel, within `CLOSE_S`: a dead host answers late. A failure is logged."""

    said = "%s: closing the connection failed: %r"
    threads = [
        owned_thread("poseidon agent close", each.close, partial(LOGGER.warning, said, each.label))
        for each in set(agents)
    ]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + CLOSE_S
    for thread in threads:
        thread.join(max(until_s - time.monotonic(), 0.0))


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
