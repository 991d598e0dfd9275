"""Lists and kills the jobs of one host: the services `list` and `kill` of its agent.

Law: only this user's jobs, and of these only processes that `poseidon.cluster.jobs.kill` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

from poseidon.base.settings import read_settings
from poseidon.cluster.jobs.kill import KillTimeouts, job_processes, kill_job, live_process
from poseidon.cluster.jobs.registry import JobRecord, Registry, check_job_id
from poseidon.cluster.machinefile import is_loopback
from poseidon.errors import JobError, PoseidonError, UsageError

LONGEST_WAIT_S = 3600.0
LOOKS_FOR_LISTENER = 3
"""The kernel's table of sockets is read in pieces: an entry can be missed while others come and
go.
"""
_ANY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJob:
    """A job as one host reports it.

    Attributes:
        record: that the host has.
        launcher: whether the process that started it on that host runs.
        living: how many processes of the record run there; not those that they or an agent have
            started besides.
    """

    record: JobRecord
    launcher: bool
    living: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobList:
    """The answer of `list`: the jobs of a host, and a sentence for each problem."""

    jobs: tuple[HostJob, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRequest:
    """The request of `kill`: the ids of jobs."""

    jobs: tuple[str, ...]
    timeouts: KillTimeouts

    def __post_init__(self) -> None:
        for job in self.jobs:
            check_job_id(job)


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """The answer of `kill`: how many processes of each job ended, and a sentence for each problem."""

    counts: Mapping[str, int]
    problems: tuple[str, ...] = ()


def jobs_here(registry: Registry, warn: Callable[[str], None]) -> list[HostJob]:
    """Return the jobs of this user on this host; remove the records of those whose processes
    have all ended.

    Args:
        registry: with their records.
        warn: called with a sentence about a record that cannot be read or removed.

    Raises:
        JobError: the folder of records cannot be read.
    """
    found = []
    for record in readable_records(registry, warn):
        launcher = live_process(record.launcher) is not None
        living = sum(live_process(process) is not None for process in record.processes)
        if launcher or living or may_live_elsewhere(record) or job_processes(record.job, record):
            found.append(HostJob(record=record, launcher=launcher, living=living))
            continue
        try:
            registry.remove(record.job)
        except JobError as error:
            warn(str(error))
    return found


def readable_records(registry: Registry, warn: Callable[[str], None]) -> list[JobRecord]:
    """Return all records; call `warn` for those that cannot be read."""
    records = []
    for job in registry.jobs():
        try:
            record = registry.read(job)
        except JobError as error:
            warn(str(error))
            continue
        if record is not None:
            records.append(record)
    return records


def job_at(address: str, port: int) -> str | None:
    """Return the running job of this user that listens at an address of this host; None where no
    recorded one does.

    Raises:
        JobError: the folder of records cannot be read.
    """
    registry = Registry(read_settings().state_folder)
    records = readable_records(registry, lambda _: None)
    for record in records * LOOKS_FOR_LISTENER:
        launcher = live_process(record.launcher)
        processes = [
            *([launcher] if launcher is not None else []),
            *job_processes(record.job, record),
        ]
        if any(_listens(process, address.partition("%")[0], port) for process in processes):
            return record.job
    return None


def _listens(process: psutil.Process, address: str, port: int) -> bool:
    try:
        connections = process.net_connections(kind="tcp")
    except psutil.Error:
        return False
    own = [each.laddr for each in connections if each.status == psutil.CONN_LISTEN]
    return any(bound.port == port and bound.ip in (address, *_ANY_ADDRESS) for bound in own)


def may_live_elsewhere(record: JobRecord) -> bool:
    """Return whether processes were started on other hosts, whose state is not known here."""
    return any(not is_loopback(process.host) for process in record.processes)


def list_jobs(registry: Registry) -> JobList:
    """Return the jobs of this user on this host."""
    problems: list[str] = []
    try:
        return JobList(jobs=tuple(jobs_here(registry, problems.append)), problems=tuple(problems))
    except JobError as error:
        return JobList(problems=(*problems, str(error)))


def kill_jobs(kill: KillRequest, registry: Registry) -> Killed:
    """Stop jobs of this user on this host.

    Raises:
        UsageError: another machine asks for a longer wait than `LONGEST_WAIT_S`.
    """
    if max(kill.timeouts.launcher_s, kill.timeouts.grace_s) > LONGEST_WAIT_S:
        raise UsageError(f"a kill waits for at most {LONGEST_WAIT_S:g} seconds")
    counts: dict[str, int] = {}
    problems: list[str] = []
    for job in kill.jobs:
        try:
            counts[job] = kill_job(job, registry, timeouts=kill.timeouts)
        except PoseidonError as error:
            problems.append(str(error))
    return Killed(counts=counts, problems=tuple(problems))
