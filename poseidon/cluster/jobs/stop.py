"""Finds the jobs that a user names, on this machine and other hosts, and stops them.

Selection of the jobs of a machinefile.

Law: a job belongs to a machinefile if it was started from that file. Only if no job was, one that
was started from a file with the same lines does, and only if the lines fix the ports: two running
jobs cannot have those in common, while any two jobs may use "a free port of this machine".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from poseidon.cluster.jobs.kill import AGENT, KillTimeouts, kill_job
from poseidon.cluster.jobs.registry import JobRecord, Registry
from poseidon.cluster.jobs.remote_hosts import (
    AgentOf,
    RemoteJob,
    kill_remote_jobs,
    list_remote_jobs,
    remote_hosts,
)
from poseidon.cluster.jobs.this_host import KillRequest
from poseidon.cluster.machinefile import Host, digest_of, read_machinefile
from poseidon.errors import JobError, MachinefileError, counted


def jobs_of_machinefile(
    records: Sequence[JobRecord], hostfile: Path, hosts: Sequence[Host] | None
) -> tuple[JobRecord, ...]:
    """Return the jobs that were started from a machinefile.

    Args:
        records: all jobs of this user.
        hostfile: absolute path, links resolved.
        hosts: its lines; None when the file is gone.
    """
    same_file = tuple(record for record in records if record.hostfile == str(hostfile))
    if same_file or not hosts or not all(host.port for host in hosts):
        return same_file
    lines = digest_of(hosts)
    return tuple(record for record in records if record.digest == lines)


def remote_jobs_of_machinefile(
    records: Sequence[JobRecord], hostfile: Path, hosts: Sequence[Host]
) -> tuple[JobRecord, ...]:
    """Return the jobs of a machinefile among those that its hosts have recorded.

    Args:
        records: as the hosts sent them; a path in them is one of the machine that the job was
            started from.
        hostfile: absolute path, links resolved, on this machine.
        hosts: its lines.
    """
    lines = digest_of(hosts)
    same = tuple(record for record in records if record.digest == lines)
    if all(host.port for host in hosts):
        return same
    return tuple(record for record in same if record.hostfile == str(hostfile))


MOST_HOSTS = 8
"""Hosts that are named in a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTargets:
    """Jobs that are to be stopped.

    Attributes:
        jobs: their ids.
        records: their records on this machine.
        hosts: other machines where processes of them may run; see `remote_hosts`.
        seen: the jobs that these hosts report, these and others.
        problems: what could not be found out, a sentence each.
    """

    jobs: tuple[str, ...]
    records: tuple[JobRecord, ...] = ()
    hosts: tuple[Host, ...] = ()
    seen: tuple[RemoteJob, ...] = ()
    problems: tuple[str, ...] = ()


def jobs_by_id(
    jobs: Sequence[str],
    records: Sequence[JobRecord],
    agents: AgentOf,
    *,
    more_hosts: Sequence[Host] = (),
) -> StopTargets:
    """Find jobs by their ids.

    Args:
        jobs: their ids.
        records: all of this machine.
        agents: returns the agent of a host.
        more_hosts: where they may run, besides the hosts of their machinefiles.
    """
    own = tuple(record for record in records if record.job in jobs)
    hosts = remote_hosts([*more_hosts, *(host for record in own for host in record.all_hosts)])
    seen, problems = list_remote_jobs(hosts, agents)
    return StopTargets(
        jobs=tuple(jobs), records=own, hosts=hosts, seen=tuple(seen), problems=tuple(problems)
    )


def jobs_of_hostfile(hostfile: Path, records: Sequence[JobRecord], agents: AgentOf) -> StopTargets:
    """Find the jobs that were started from a machinefile, by the records of this machine and its
    hosts.

    Args:
        hostfile: it need not exist any more.
        records: all of this machine.
        agents: returns the agent of a host.

    Raises:
        MachinefileError: it exists and is wrong, and no job was started from it before.
    """
    hosts_of_file: tuple[Host, ...] | None = None
    mistake: MachinefileError | None = None
    try:
        hosts_of_file = read_machinefile(hostfile) if hostfile.exists() else None
    except MachinefileError as error:
        mistake = error  # a job may have been started before the file was spoilt
    own = jobs_of_machinefile(records, hostfile.resolve(), hosts_of_file)
    if not own and mistake is not None:
        raise mistake
    hosts = remote_hosts(
        [*(hosts_of_file or ()), *(host for record in own for host in record.all_hosts)]
    )
    seen, problems = list_remote_jobs(hosts, agents)
    remote_records = [job.reported.record for job in seen]
    remote = (
        remote_jobs_of_machinefile(remote_records, hostfile.resolve(), hosts_of_file)
        if hosts_of_file
        else ()
    )
    jobs = tuple(dict.fromkeys(record.job for record in (*own, *remote)))
    return StopTargets(
        jobs=jobs, records=own, hosts=hosts, seen=tuple(seen), problems=tuple(problems)
    )


def stop_jobs(
    targets: StopTargets,
    registry: Registry,
    agents: AgentOf,
    timeouts: KillTimeouts,
    report: Callable[[str], None],
) -> list[str]:
    """Stop jobs, where their launcher runs first: it ends its job on all hosts, after a complete
    iteration.

    Args:
        targets: the jobs.
        registry: of this machine. A job of which something may be left keeps its record.
        agents: returns the agent of a host.
        timeouts: of the kill.
        report: takes a line for each job.

    Returns:
        What could not be done, a sentence each.

    Raises:
        JobError: nothing of the jobs was found anywhere.
    """
    own = [record for record in targets.records if record.job in targets.jobs]
    problems: list[str] = []
    seen = [job for job in targets.seen if job.reported.record.job in targets.jobs]
    leading = _leading_hosts(seen, targets.records)
    others = [host for host in targets.hosts if host not in leading]
    kill = KillRequest(jobs=targets.jobs, timeouts=timeouts)
    stopped, unreached = kill_remote_jobs(kill, leading, agents)
    here = {job: _stop_local(job, registry, timeouts, problems) for job in targets.jobs}
    further, more = kill_remote_jobs(kill, others, agents)
    stopped, unreached = {**stopped, **further}, [*unreached, *more]
    problems += unreached
    counts = {
        job: {"this machine": here[job], **_elsewhere(job, stopped, seen)} for job in targets.jobs
    }
    if not (problems or own or seen or any(any(count.values()) for count in counts.values())):
        raise JobError(
            f"no process of {_named(targets.jobs)} is on this machine or on the hosts that were "
            "asked"
        )
    for record in own if problems else ():
        with suppress(JobError):  # where it could not be removed either
            registry.write(record)
    if unreached and own:
        place = registry.folder / (f"{targets.jobs[0]}.json" if len(targets.jobs) == 1 else "")
        problems.append(f"to forget hosts that will not come back, remove {place}")
    for job, count in counts.items():
        report(
            _sum(job, {host: number for host, number in count.items() if number}, bool(problems))
        )
    return problems


def _leading_hosts(seen: Sequence[RemoteJob], records: Sequence[JobRecord]) -> list[Host]:
    """Return the other machines on which the launcher of a job runs."""
    here = [record.launcher for record in records]
    found = {
        job.host: None
        for job in seen
        if job.reported.launcher
        and (own := job.reported.record.launcher).name != AGENT
        and own not in here
    }
    return list(found)


def _stop_local(job: str, registry: Registry, timeouts: KillTimeouts, problems: list[str]) -> int:
    try:
        return kill_job(job, registry, timeouts=timeouts)
    except JobError as error:
        problems.append(str(error))
        return 0


def _named(jobs: Sequence[str]) -> str:
    return f"job {jobs[0]}" if len(jobs) == 1 else f"{len(jobs)} jobs"


def _elsewhere(
    job: str, killed: Mapping[tuple[str, Host], int], seen: Sequence[RemoteJob]
) -> dict[str, int]:
    """Return how many processes of a job ended on other machines, by address.

    A process that ran before and was not stopped there has ended with its launcher, which was asked
    first.
    """
    before = {
        each.host: each.reported.living + each.reported.launcher
        for each in seen
        if each.reported.record.job == job
    }
    found: dict[str, int] = {}
    for (name, host), count in killed.items():
        if name == job:  # two accounts of one machine are one address
            found[host.name] = found.get(host.name, 0) + max(count, before.get(host, 0))
    return found


def _sum(job: str, counts: Mapping[str, int], unfinished: bool) -> str:
    """Return the line on a job: how many processes were stopped, by host if that is not this
    machine alone.
    """
    if not (counts or unfinished):
        return f"job {job} had already ended; its record is removed"
    stopped = f"job {job}: {counted(sum(counts.values()), 'process')} stopped"
    if counts.keys() <= {"this machine"}:
        return stopped
    named = list(counts.items())[:MOST_HOSTS]
    more = list(counts.values())[MOST_HOSTS:]
    parts = [f"{number} on {host}" for host, number in named]
    parts += [f"{sum(more)} on {len(more)} more hosts"] if more else []
    return f"{stopped} ({', '.join(parts)})"
