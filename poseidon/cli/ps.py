"""`poseidon ps`: the running jobs of this user, on this machine and on the hosts of a machinefile."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from poseidon.base.settings import read_settings
from poseidon.base.text_columns import aligned
from poseidon.cluster.jobs.registry import JobRecord, Registry
from poseidon.cluster.jobs.remote_hosts import RemoteJob, list_remote_jobs, remote_hosts
from poseidon.cluster.jobs.selection import jobs_of_machinefile
from poseidon.cluster.jobs.this_host import HostJob, jobs_here
from poseidon.cluster.machinefile import Host, is_loopback, read_machinefile
from poseidon.errors import JobError, printable
from poseidon.launcher.site import ssh_agents
from poseidon.observe.metrics.job_statistics import FILE_NAME, read_statistics
from poseidon.observe.metrics.progress import JobProgress

_HEADER = ("JOB", "STARTED", "LAUNCHER", "PROCESSES", "ITERATION", "RATE", "ETA", "OUTPUT")
_HERE = "(here)"


def run(arguments: argparse.Namespace) -> int:
    """Print one line a job and host. A record whose processes have all gone is removed."""
    problems: list[str] = []
    here = jobs_here(Registry(read_settings().state_folder), problems.append)
    records = [job.record for job in here]
    hosts = _hosts_of(Path(arguments.hostfile), records) if arguments.hostfile else ()
    remote: list[RemoteJob] = []
    if hosts:
        with ssh_agents(arguments.ssh_config, records) as agents:
            remote, failures = list_remote_jobs(hosts, agents)
        problems += failures
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    if arguments.json:
        print(json.dumps([_fields(name, job) for name, job in _by_host(here, remote)], indent=1))
    elif here or remote:
        print(_listing(here, remote, bool(hosts)))
    else:
        print(
            "no job was found; the warnings name hosts that could not be asked"
            if problems
            else "no job is running"
        )
    return 1 if hosts and problems else 0


def _hosts_of(hostfile: Path, records: Sequence[JobRecord]) -> tuple[Host, ...]:
    """Return the other machines of a machinefile, and those that have joined its jobs since."""
    hosts = read_machinefile(hostfile)
    own = jobs_of_machinefile(records, hostfile.resolve(), hosts)
    return remote_hosts([*hosts, *(host for record in own for host in record.joined)])


def _listing(here: Sequence[HostJob], remote: Sequence[RemoteJob], with_hosts: bool) -> str:
    rows = [(_HERE if name is None else name, *_row(job)) for name, job in _by_host(here, remote)]
    lines = [("HOST", *_HEADER), *rows]
    return "\n".join(aligned(lines if with_hosts else [line[1:] for line in lines]))


def _by_host(
    here: Sequence[HostJob], remote: Sequence[RemoteJob]
) -> list[tuple[str | None, HostJob]]:
    """Return each job with its host; None: this machine, which may be one of the hosts."""
    seen = {job.reported.record for job in remote}
    rows: list[tuple[str | None, HostJob]] = [(None, job) for job in here if job.record not in seen]
    return [*rows, *((job.host.name, job.reported) for job in remote)]


def _fields(host: str | None, job: HostJob) -> dict[str, object]:
    """Return a job as JSON; `living` of its `processes` on this host run, `elsewhere` more are
    on other hosts.
    """
    record, progress = job.record, _progress(job)
    local = sum(is_loopback(process.host) for process in record.processes)
    return {
        "job": record.job,
        "host": host or "localhost",
        "started": datetime.fromtimestamp(record.started_s)
        .astimezone()
        .isoformat(timespec="seconds"),
        "launcher_pid": record.launcher.pid,
        "launcher_runs": bool(job.launcher),
        "processes": local,
        "living": job.living,
        "elsewhere": len(record.processes) - local,
        "output": record.output,
        "hostfile": record.hostfile,
        "iteration": progress.iteration if progress else None,
        "max_iter": progress.max_iter or None if progress else None,
        "rate": progress.rate or None if progress else None,
        "eta_s": progress.eta_s if progress else None,
        "testing": bool(progress.to_test) if progress else None,
    }


def _row(job: HostJob) -> tuple[str, ...]:
    record = job.record
    started = datetime.fromtimestamp(record.started_s).strftime("%Y-%m-%d %H:%M:%S")
    state = f"pid {record.launcher.pid}" if job.launcher else "died"
    local = sum(is_loopback(process.host) for process in record.processes)
    remote = len(record.processes) - local
    living = f"{job.living} of {local}" + (f", {remote} on other hosts" if remote else "")
    progress = _progress(job)
    place = (
        (progress.position(), progress.rate_text(), progress.eta_text())
        if progress
        else ("-", "-", "-")
    )
    return (record.job, started, state, living, *place, printable(record.output))


def _progress(job: HostJob) -> JobProgress | None:
    """Return the progress of a job, a few seconds ago or when its launcher died; None on a host that
    has no folder of the job.
    """
    try:
        progress = read_statistics(Path(job.record.output).resolve() / FILE_NAME).progress
    except JobError:
        return None
    if job.launcher:
        return progress
    return JobProgress(iteration=progress.iteration, max_iter=progress.max_iter)
