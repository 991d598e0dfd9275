"""Jobs on remote hosts: listed and stopped by a request to each host, in parallel.

    with SshAgents(SshSettings(), launcher_environment()) as agents:
        jobs, problems = list_remote_jobs(remote_hosts(hosts), agents)

Law: a host that cannot be asked does not keep the others from being asked; its problem is reported.
What a host answers reaches a terminal as plain text only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from poseidon.cluster.agent.messages import Service
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial.dialer import close_agents
from poseidon.cluster.jobs.this_host import HostJob, JobList, Killed, KillRequest
from poseidon.cluster.machinefile import Host, SshSettings
from poseidon.cluster.process import for_each_host
from poseidon.cluster.python_command import LauncherEnvironment
from poseidon.errors import JobError, printable

MAX_PARALLEL = 64
ANSWER_TIMEOUT_S = 120.0

AgentOf = Callable[[Host], RemoteAgent]
"""Returns the agent of a host, or raises JobError."""
_A = TypeVar("_A", JobList, Killed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteJob:
    """A job on a remote host.

    Attributes:
        host: a line of the machinefile for that host.
        reported: the job as that host reports it.
    """

    host: Host
    reported: HostJob


Account = tuple[str, str | None, int | None]


def account_of(host: Host) -> Account:
    """Return what is dialled for a host: its address, user and port of SSH."""
    return host.address.lower(), host.user, host.ssh_port


def remote_hosts(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return one host for each account on another machine, in the order given."""
    found: dict[Account, Host] = {}
    for host in hosts:
        if not host.is_here:
            found.setdefault(account_of(host), host)
    return tuple(found.values())


def list_remote_jobs(hosts: Sequence[Host], agents: AgentOf) -> tuple[list[RemoteJob], list[str]]:
    """List the jobs of this user on remote hosts.

    Returns:
        The jobs host by host, and what failed, a sentence each.
    """
    jobs: list[RemoteJob] = []
    problems: list[str] = []
    for host, listed in _ask_all(hosts, agents, problems, JobList, Service.LIST):
        jobs += [RemoteJob(host=host, reported=job) for job in listed.jobs]
    return jobs, problems


def kill_remote_jobs(
    kill: KillRequest, hosts: Sequence[Host], agents: AgentOf
) -> tuple[dict[tuple[str, Host], int], list[str]]:
    """Stop all processes of jobs on remote hosts.

    Returns:
        How many processes of each job were stopped on each host that answered; and what failed, a
        sentence each.
    """
    problems: list[str] = []
    counts = {}
    for host, killed in _ask_all(hosts, agents, problems, Killed, Service.KILL, kill):
        counts.update(
            {(job, host): killed.counts[job] for job in kill.jobs if job in killed.counts}
        )
    return counts, problems


def _ask_all(
    hosts: Sequence[Host],
    agents: AgentOf,
    problems: list[str],
    kind: type[_A],
    service: Service,
    request: object = None,
) -> list[tuple[Host, _A]]:
    """Return the answers by host; add the problems of hosts that failed, and those in the answers,
    to `problems`.
    """
    outcomes = for_each_host(
        lambda host: agents(host).ask_for(kind, service, request, ANSWER_TIMEOUT_S),
        hosts,
        name="poseidon ask",
        limit=MAX_PARALLEL,
    )
    answered: list[tuple[Host, _A]] = []
    for host, outcome in zip(hosts, outcomes, strict=True):
        if isinstance(outcome, JobError):
            problems.append(str(outcome))
        else:
            problems += [f"{host.name}: {printable(text)}" for text in outcome.problems]
            answered.append((host, outcome))
    return answered


class SshAgents:
    """Agents over SSH; each is dialled when it is first asked for.

    One agent a host for as long as the block lasts; thread-safe, since several hosts are asked in
    parallel.

    Args:
        settings: of hosts that `own` does not name.
        launcher: what starts the agents.
        own: settings of accounts (`account_of`) whose job had a --ssh_config.
    """

    def __init__(
        self,
        settings: SshSettings,
        launcher: LauncherEnvironment,
        own: Mapping[Account, SshSettings] | None = None,
    ) -> None:
        self._settings = settings
        self._own = own or {}
        self._launcher = launcher
        self._agents: dict[Host, RemoteAgent] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> SshAgents:
        return self

    def __exit__(self, *_: object) -> None:
        close_agents(self._agents.values())
        self._agents.clear()

    def __call__(self, host: Host) -> RemoteAgent:
        """Return the agent of a host.

        Raises:
            JobError: it cannot be reached, or has no Poseidon that answers.
        """
        with self._lock:
            agent = self._agents.get(host)
        if agent is not None and agent.lost is None:
            return agent
        # imports paramiko, which takes longer than all else of a command that asks no host
        from poseidon.cluster.dial.ssh import dial_all

        settings = self._own.get(account_of(host), self._settings)
        agent = dial_all([host], settings, self._launcher)[host.id]
        with self._lock:
            self._agents[host] = agent
        return agent
