"""Which jobs a user means, on which hosts, and stopping them there: what `poseidon kill` and the kill scripts have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from poseidon.cluster.jobs.kill import KillPatience, kill_job
from poseidon.cluster.jobs.other_hosts import Ask, FarJob, far_hosts, kill_far, list_far
from poseidon.cluster.jobs.over_ssh import SshAsk
from poseidon.cluster.jobs.registry import JobRecord, Registry
from poseidon.cluster.jobs.selection import far_jobs_of_machinefile, jobs_of_machinefile
from poseidon.cluster.jobs.this_host import readable_records
from poseidon.cluster.machinefile import Host, read_machinefile
from poseidon.cluster.ssh.config import SshSettings
from poseidon.errors import JobError, MachinefileError
from poseidon.launch.site import launcher_environment
from poseidon.metrics.job_statistics import FILE_NAME
from poseidon.settings import read_settings

OUTPUT = Path("output")
"""Where `poseidon train` puts jobs' folders unless it is told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Jobs that are to be stopped.

    Attributes:
        jobs: their ids.
        here: what this machine has on record of them.
        hosts: other machines where processes of them may run; see `far_hosts`.
        seen: what these hosts say of these jobs.
        problems: what could not be learnt, a sentence each.
    """

    jobs: tuple[str, ...]
    here: tuple[JobRecord, ...] = ()
    hosts: tuple[Host, ...] = ()
    seen: tuple[FarJob, ...] = ()
    problems: tuple[str, ...] = ()


def over_ssh(config: str | None) -> SshAsk:
    """How the commands ask other hosts.

    Args:
        config: the file of `--ssh_config`.
    """
    return SshAsk(SshSettings(config=Path(config) if config else None), launcher_environment())


def here_records(registry: Registry) -> list[JobRecord]:
    """All records of this machine that can be read; the others are named on standard error."""
    return readable_records(registry, lambda words: print(f"warning: {words}", file=sys.stderr))


def jobs_by_id(jobs: Sequence[str], registry: Registry, ask: Ask, *, clients: Sequence[Host] = ()) -> Wanted:
    """Jobs, and the hosts of their machinefiles.

    Args:
        jobs: their ids.
        registry: of this machine.
        ask: how to ask a host.
        clients: where they may run as well.
    """
    records = [record for record in here_records(registry) if record.job in jobs]
    hosts = far_hosts([*clients, *(client for record in records for client in record.hosts)])
    far, problems = list_far(hosts, ask)
    seen = tuple(job for job in far if job.seen.record.job in jobs)
    return Wanted(jobs=tuple(jobs), here=tuple(records), hosts=hosts, seen=seen, problems=tuple(problems))


def jobs_of(hostfile: Path, registry: Registry, ask: Ask) -> Wanted:
    """The jobs that were started from a machinefile, by what this machine and its hosts have on record.

    Args:
        hostfile: it need not be there any more.
        registry: of this machine.
        ask: how to ask a host.

    Raises:
        MachinefileError: it is there and wrong, and no job was started from it before.
    """
    clients: tuple[Host, ...] | None = None
    mistake: MachinefileError | None = None
    try:
        clients = read_machinefile(hostfile) if hostfile.exists() else None
    except MachinefileError as error:
        mistake = error  # a job may have been started before the file was spoilt
    here = jobs_of_machinefile(here_records(registry), hostfile.resolve(), clients)
    if not here and mistake is not None:
        raise mistake
    hosts = far_hosts([*(clients or ()), *(client for record in here for client in record.hosts)])
    far, problems = list_far(hosts, ask)
    records = [job.seen.record for job in far]
    there = far_jobs_of_machinefile(records, hostfile.resolve(), clients) if clients else ()
    jobs = tuple(dict.fromkeys(record.job for record in (*here, *there)))
    seen = tuple(job for job in far if job.seen.record.job in jobs)
    return Wanted(jobs=jobs, here=here, hosts=hosts, seen=seen, problems=tuple(problems))


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
        JobError: nothing of the jobs was found anywhere.
    """
    here = [record for record in wanted.here if record.job in wanted.jobs]
    problems: list[str] = []
    count = sum(_stop_here(job, registry, patience, report, problems) for job in wanted.jobs)
    killed = kill_far(wanted.jobs, wanted.hosts, ask, patience=patience, report=report)
    for client, stopped in killed.counts.items():
        before = sum(job.seen.living + job.seen.launcher for job in wanted.seen if job.host == client)
        if before > stopped:
            report(f"{client.address}: {before - stopped} processes had ended with their launcher")
        count += stopped
    problems += killed.problems
    if not (count or problems or here or wanted.seen):
        raise JobError(f"nothing of {_named(wanted.jobs)} is on this machine or on the hosts that were asked")
    for record in here if problems else ():
        with suppress(JobError):  # where it could not be removed either
            registry.write(record)
    if killed.problems and here:
        place = registry.folder / (f"{wanted.jobs[0]}.json" if len(wanted.jobs) == 1 else "")
        problems.append(f"to forget hosts that are gone for good, remove {place}")
    report(_sum(wanted.jobs, count, bool(problems)))
    return problems


def _stop_here(
    job: str, registry: Registry, patience: KillPatience, report: Callable[[str], None], problems: list[str]
) -> int:
    try:
        return kill_job(job, registry, patience=patience, report=report)
    except JobError as error:
        problems.append(str(error))
        return 0


def _named(jobs: Sequence[str]) -> str:
    return f"job {jobs[0]}" if len(jobs) == 1 else f"{len(jobs)} jobs"


def _sum(jobs: Sequence[str], count: int, unfinished: bool) -> str:
    if count or unfinished:
        return f"{_named(jobs)}: {count} processes stopped"
    return f"{_named(jobs)} had already ended; what was on record is removed"


def job_folder(job: str | None) -> Path:
    """The output folder of the job that is meant.

    Args:
        job: its id or its output folder; None: the one that was started last.

    Raises:
        JobError: there is no such job.
    """
    records = here_records(Registry(read_settings().state_folder))
    if job is None:
        return _newest(records)
    for record in records:
        if record.job == job:
            return Path(record.output)
    for folder in (Path(job), OUTPUT / job):
        if folder.is_dir():
            return folder
    raise JobError(f"'{job}' is neither a running job, nor a folder, nor a job in {OUTPUT}/")


def _newest(records: list[JobRecord]) -> Path:
    running = [record for record in records if (Path(record.output) / FILE_NAME).exists()]
    if running:
        return Path(max(running, key=lambda record: record.started_s).output)
    ended = [(path.stat().st_mtime, path.parent) for path in OUTPUT.glob(f"*/{FILE_NAME}")]
    if not ended:
        raise JobError(
            f"no job is running, and {OUTPUT}/ holds none that has ended; expected a job's id or its output folder"
        )
    return max(ended)[1]
