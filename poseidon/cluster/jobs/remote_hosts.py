"""Jobs on remote hosts: listed and stopped by a request to each host, in parallel.

    with SshAsk(SshSettings(), launcher_environment) as ask:
        jobs, problems = list_remote_jobs(remote_hosts(hosts), ask)

Law: a host that cannot be asked does not keep the others from being asked; its problem is reported.
What a host answers reaches a terminal as plain text only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from poseidon.cluster.agent.messages import Service
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial.dialer import close_agents
from poseidon.cluster.dial.ssh import dial_all
from poseidon.cluster.jobs.kill import KillTimeouts
from poseidon.cluster.jobs.this_host import Answer, HostJob
from poseidon.cluster.machinefile import Host, is_loopback
from poseidon.cluster.parallel import for_each_host
from poseidon.cluster.remote_python import LauncherEnvironment
from poseidon.cluster.ssh.config import SshSettings
from poseidon.errors import JobError, printable

MAX_PARALLEL = 64
ANSWER_TIMEOUT_S = 120.0

Ask = Callable[[Host, Mapping[str, object]], Sequence[Answer]]
"""Sends a host a request of `poseidon.cluster.jobs.this_host`; returns the answers or raises
JobError.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteJob:
    """A job on a remote host.

    Attributes:
        host: a line of the machinefile for that host.
        reported: the job as that host reports it.
    """

    host: Host
    reported: HostJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """The result of stopping jobs on remote hosts.

    Attributes:
        counts: how many processes of each job were stopped on each host that answered.
        problems: what failed, a sentence each.
    """

    counts: Mapping[tuple[str, Host], int]
    problems: tuple[str, ...]


def remote_hosts(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return one host for each account on another machine, in the order given."""
    found: dict[tuple[str, str | None, int | None], Host] = {}
    for host in hosts:
        if not is_loopback(host.address):
            found.setdefault((host.address.lower(), host.user, host.ssh_port), host)
    return tuple(found.values())


def list_remote_jobs(hosts: Sequence[Host], ask: Ask) -> tuple[list[RemoteJob], list[str]]:
    """List the jobs of this user on remote hosts.

    Args:
        hosts: see `remote_hosts`.
        ask: sends a request to one.

    Returns:
        The jobs host by host, and what failed, a sentence each.
    """
    jobs: list[RemoteJob] = []
    problems: list[str] = []
    for host, answers in _ask_all(hosts, ask, {"do": "list"}, problems):
        for answer in answers:
            if "job" not in answer:
                continue
            try:
                jobs.append(RemoteJob(host=host, reported=HostJob.from_fields(answer)))
            except JobError as error:
                problems.append(f"{host.address}: {error}")
    return jobs, problems


def kill_remote_jobs(
    jobs: Sequence[str],
    hosts: Sequence[Host],
    ask: Ask,
    *,
    timeouts: KillTimeouts,
) -> Killed:
    """Stop all processes of jobs on remote hosts.

    Args:
        jobs: their ids.
        hosts: see `remote_hosts`.
        ask: sends a request to one.
        timeouts: on each host.
    """
    request = {
        "do": "kill",
        "jobs": list(jobs),
        "launcher_s": timeouts.launcher_s,
        "grace_s": timeouts.grace_s,
    }
    problems: list[str] = []
    counts = {}
    for host, answers in _ask_all(hosts, ask, request, problems):
        for answer in answers:
            job, count = answer.get("killed"), answer.get("count")
            if job in jobs and isinstance(job, str) and isinstance(count, int):
                counts[job, host] = count
    return Killed(counts=counts, problems=tuple(problems))


def _ask_all(
    hosts: Sequence[Host], ask: Ask, request: Mapping[str, object], problems: list[str]
) -> list[tuple[Host, Sequence[Answer]]]:
    """Return the answers by host; add the problems of those that failed, and those in the
    answers, to `problems`.
    """
    outcomes = for_each_host(
        lambda host: ask(host, request), hosts, name="poseidon ask", limit=MAX_PARALLEL
    )
    answered = []
    for host, outcome in zip(hosts, outcomes, strict=True):
        if isinstance(outcome, JobError):
            problems.append(str(outcome))
            continue
        reported = (answer.get("problem") for answer in outcome)
        problems += [
            f"{host.address}: {printable(text)}" for text in reported if isinstance(text, str)
        ]
        if not any(answer.get("end") for answer in outcome):
            problems.append(f"{host.address}: its answer is incomplete")
        answered.append((host, outcome))
    return answered


class SshAsk:
    """Sends requests over SSH, to an agent on the host.

    One agent a host for as long as the block lasts; thread-safe, since several hosts are asked in
    parallel.

    Args:
        settings: of the connections.
        launcher: where this process runs.
    """

    def __init__(self, settings: SshSettings, launcher: LauncherEnvironment) -> None:
        self._settings = settings
        self._launcher = launcher
        self._agents: dict[Host, RemoteAgent] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> SshAsk:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        close_agents(self._agents.values())
        self._agents.clear()

    def __call__(self, host: Host, request: Mapping[str, object]) -> Sequence[Answer]:
        """Send a request to a host.

        Raises:
            JobError: it cannot be reached, or has no Poseidon that answers.
        """
        agent = self._agent(host)
        lines = agent.ask(Service.JOBS, request, ANSWER_TIMEOUT_S).get("lines")
        if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
            raise JobError(f"{agent.label}: its answer cannot be read")
        return lines

    def _agent(self, host: Host) -> RemoteAgent:
        with self._lock:
            agent = self._agents.get(host)
        if agent is not None and agent.lost is None:
            return agent
        agent = dial_all([host], self._settings, self._launcher)[host.id]
        with self._lock:
            self._agents[host] = agent
        return agent
