"""Which jobs a user means, on which hosts, and stopping them there: what `poseidon kill` and the kill scripts have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from poseidon.cluster.far_jobs import Ask, FarJob, far_hosts, kill_far, list_far
from poseidon.cluster.job_selection import far_jobs_of_machinefile, jobs_of_machinefile
from poseidon.cluster.jobs_here import readable_records
from poseidon.cluster.kill import KillPatience, kill_job
from poseidon.cluster.machinefile import Client, read_machinefile
from poseidon.cluster.registry import JobRecord, Registry
from poseidon.cluster.remote_python import OwnPlaces
from poseidon.cluster.ssh_ask import SshAsk
from poseidon.cluster.ssh_config import SshSettings
from poseidon.errors import MachinefileError
from poseidon.proto.paths import repository_root


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Jobs that are to be stopped.

    Attributes:
        jobs: their ids.
        hosts: other machines where processes of them may run; see `far_hosts`.
        seen: what these hosts say of these jobs.
        problems: what could not be learnt, a sentence each.
    """

    jobs: tuple[str, ...]
    hosts: tuple[Client, ...] = ()
    seen: tuple[FarJob, ...] = ()
    problems: tuple[str, ...] = ()


def over_ssh() -> SshAsk:
    """How the commands ask other hosts."""
    root = repository_root()
    own = OwnPlaces(python=sys.executable, checkout=str(root) if root else "", folder=os.getcwd())
    return SshAsk(SshSettings(), own)


def here_records(registry: Registry) -> list[JobRecord]:
    """All records of this machine that can be read; the others are named on standard error."""
    return readable_records(registry, lambda words: print(f"warning: {words}", file=sys.stderr))


def jobs_by_id(
    jobs: Sequence[str], registry: Registry, ask: Ask, *, clients: Sequence[Client] = ()
) -> Wanted:
    """Jobs, and the hosts of their machinefiles.

    Args:
        jobs: their ids.
        registry: of this machine.
        ask: how to ask a host.
        clients: where they may run as well.
    """
    records = [record for record in here_records(registry) if record.job in jobs]
    hosts = far_hosts([*clients, *(client for record in records for client in record.clients)])
    far, problems = list_far(hosts, ask)
    seen = tuple(job for job in far if job.seen.record.job in jobs)
    return Wanted(jobs=tuple(jobs), hosts=hosts, seen=seen, problems=tuple(problems))


def jobs_of(hostfile: Path, registry: Registry, ask: Ask) -> Wanted:
    """The jobs that were started from a machinefile, by what this machine and its hosts have on record.

    Args:
        hostfile: it need not be there any more.
        registry: of this machine.
        ask: how to ask a host.

    Raises:
        MachinefileError: it is there and wrong, and no job was started from it before.
    """
    clients: tuple[Client, ...] | None = None
    mistake: MachinefileError | None = None
    try:
        clients = read_machinefile(hostfile) if hostfile.exists() else None
    except MachinefileError as error:
        mistake = error  # a job may have been started before the file was spoilt
    here = jobs_of_machinefile(here_records(registry), hostfile.resolve(), clients)
    if not here and mistake is not None:
        raise mistake
    hosts = far_hosts([*(clients or ()), *(client for record in here for client in record.clients)])
    far, problems = list_far(hosts, ask)
    records = [job.seen.record for job in far]
    there = far_jobs_of_machinefile(records, hostfile.resolve(), clients) if clients else ()
    jobs = tuple(dict.fromkeys(record.job for record in (*here, *there)))
    seen = tuple(job for job in far if job.seen.record.job in jobs)
    return Wanted(jobs=jobs, hosts=hosts, seen=seen, problems=tuple(problems))


def stop_jobs(
    wanted: Wanted, registry: Registry, ask: Ask, patience: KillPatience, report: Callable[[str], None]
) -> list[str]:
    """Stop jobs, here first: a launcher that lives ends its own on all hosts.

    Args:
        wanted: which.
        registry: of this machine. A job of which something may be left keeps its record.
        ask: how to ask a host.
        patience: how long to wait.
        report: hears what was stopped.

    Returns:
        What could not be done, a sentence each.

    Raises:
        JobError: a process of this machine could not be stopped.
    """
    records = {job: registry.read(job) for job in wanted.jobs}
    counts = {job: kill_job(job, registry, patience=patience, report=report) for job in wanted.jobs}
    if not wanted.hosts:
        for job, count in counts.items():
            report(_sum(job, count))
        return []
    killed = kill_far(wanted.jobs, wanted.hosts, ask, patience=patience, report=report)
    for client, count in killed.counts.items():
        before = sum(job.seen.living + job.seen.launcher for job in wanted.seen if job.client == client)
        if before > count:
            report(f"{client.host}: {before - count} processes had ended with their launcher")
    far = sum(killed.counts.values())
    for job, count in counts.items():
        if killed.problems and (record := records[job]) is not None:
            registry.write(record)
        if len(counts) == 1:
            report(_sum(job, count + far))
    if len(counts) > 1:
        report(f"{len(counts)} jobs: {sum(counts.values()) + far} processes stopped")
    return list(killed.problems)


def _sum(job: str, count: int) -> str:
    return (
        f"job {job}: {count} processes stopped"
        if count
        else f"job {job} had already ended; its record is removed"
    )
