"""The commands on running jobs: ps lists them, kill stops them, leave and join change their hosts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from poseidon.base.paths import own_command
from poseidon.base.settings import read_settings
from poseidon.base.text_files import aligned
from poseidon.cluster.jobs.kill import KillTimeouts, job_processes, live_process, owner_of
from poseidon.cluster.jobs.registry import EXTRACTION, JobRecord, Registry, check_job_id
from poseidon.cluster.jobs.remote_hosts import AgentOf, RemoteJob, list_remote_jobs, remote_hosts
from poseidon.cluster.jobs.requests import HostRequest, RequestFiles
from poseidon.cluster.jobs.stop import (
    StopTargets,
    jobs_by_id,
    jobs_of_hostfile,
    jobs_of_machinefile,
    stop_jobs,
)
from poseidon.cluster.jobs.this_host import HostJob, jobs_here
from poseidon.cluster.machinefile import Host, is_loopback, read_machinefile
from poseidon.errors import JobError, PoseidonError, UsageError, printable
from poseidon.launcher.job_folder import ended_job, local_records, meant_job, running_job
from poseidon.launcher.site import ssh_agents
from poseidon.observe.metrics.job_statistics import FILE_NAME, read_statistics
from poseidon.observe.metrics.progress import JobProgress

_HEADER = ("JOB", "STARTED", "LAUNCHER", "PROCESSES", "ITERATION", "RATE", "ETA", "OUTPUT")
_HERE = "(here)"


def run_ps(arguments: argparse.Namespace) -> int:
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


_SSH_CONFIG = "--ssh_config="
MOST_PROBLEMS = 3
"""Problems of hosts that are named in an error."""


def run_kill(arguments: argparse.Namespace) -> int:
    """Stop the job or jobs that the arguments name."""
    registry = Registry(read_settings().state_folder)
    records = local_records(registry)
    with ssh_agents(arguments.ssh_config, records) as agents:
        targets = _targets(arguments, registry, records, agents)
        if not targets.jobs and targets.problems:
            raise JobError(
                f"this machine has no job on record; {_first_problems(targets.problems)}"
            )
        if not targets.jobs:
            print("no job is running")
            return 1
        problems = stop_jobs(
            targets, registry, agents, KillTimeouts(grace_s=arguments.grace), print
        )
    if problems:
        raise JobError(_not_all(targets.jobs, problems))
    return 0


def _targets(
    arguments: argparse.Namespace,
    registry: Registry,
    records: Sequence[JobRecord],
    agents: AgentOf,
) -> StopTargets:
    hosts = read_machinefile(Path(arguments.hostfile)) if arguments.hostfile else ()
    if arguments.all:
        return jobs_by_id([record.job for record in records], records, agents, more_hosts=hosts)
    if hosts or _is_job(arguments.target, registry):
        return jobs_by_id([check_job_id(arguments.target)], records, agents, more_hosts=hosts)
    hostfile = Path(arguments.target)
    if hostfile.is_dir():
        record = meant_job(arguments.target).record
        if record is None:
            raise JobError(f"no running job writes to the folder {hostfile}; {_ps()}")
        return jobs_by_id([record.job], records, agents)
    targets = jobs_of_hostfile(hostfile, records, agents)
    if not targets.jobs and not hostfile.exists():
        owner = owner_of(arguments.target)
        if owner is not None:
            raise JobError(
                f"job {arguments.target} is user {owner}'s; `{own_command()} kill` stops only "
                "your own jobs"
            )
        folder = ended_job(arguments.target)
        if folder is not None:
            raise JobError(f"job {folder.name} has ended; its files are in {folder}")
        raise JobError(f"'{arguments.target}' is neither a running job nor a machinefile; {_ps()}")
    if not targets.jobs:
        none = _none_of(hostfile, targets, "job", records)
        raise JobError(f"{none}; {_first_problems(targets.problems)}" if targets.problems else none)
    return targets


def _ps() -> str:
    return f"`{own_command()} ps` lists the jobs"


def kill_caffe(arguments: Sequence[str]) -> int:
    """Run `scripts/kill_caffe.py <hostfile>`; return its exit code: 0 also if nothing runs."""
    return _kill_script(
        "kill_caffe.py", "jobs", arguments, lambda job: not job.startswith(EXTRACTION)
    )


def kill_feature_extractor(arguments: Sequence[str]) -> int:
    """Run `scripts/kill_feature_extractor.py <hostfile>`, which leaves training alone; return
    its exit code.
    """
    return _kill_script(
        "kill_feature_extractor.py",
        "feature extractions",
        arguments,
        lambda job: job.startswith(EXTRACTION),
    )


def _kill_script(
    name: str, what: str, arguments: Sequence[str], chosen: Callable[[str], bool]
) -> int:
    hostfiles = [word for word in arguments if not word.startswith("-")]
    flags = [word for word in arguments if word.startswith("-")]
    if len(hostfiles) != 1 or not all(word.startswith(_SSH_CONFIG) for word in flags):
        print(
            f"usage: {name} <hostfile> [{_SSH_CONFIG}FILE]\nStops the {what} that were started "
            "from this machinefile.",
            file=sys.stderr,
        )
        return 2
    config = flags[-1].removeprefix(_SSH_CONFIG) if flags else None
    hostfile = Path(hostfiles[0])
    try:
        registry = Registry(read_settings().state_folder)
        records = local_records(registry)
        with ssh_agents(config, records) as agents:
            found = jobs_of_hostfile(hostfile, records, agents)
            found = replace(found, jobs=tuple(job for job in found.jobs if chosen(job)))
            problems = list(found.problems)
            if found.jobs:
                problems = stop_jobs(found, registry, agents, KillTimeouts(), print)
            else:
                if _is_job(str(hostfile), registry):
                    raise UsageError(
                        f"{hostfile} is a job, not a machinefile; `{own_command()} kill {hostfile}` "
                        "stops it"
                    )
                read_machinefile(hostfile)
                print(_none_of(hostfile, found, what.removesuffix("s"), records))
    except PoseidonError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # such as a name with a zero byte
        print(f"{name}: {hostfile}: {error.strerror or error}", file=sys.stderr)
        return 1
    if problems:
        print(f"{name}: {_not_all(found.jobs, problems)}", file=sys.stderr)
    return 1 if problems else 0


def _none_of(hostfile: Path, targets: StopTargets, what: str, others: Sequence[JobRecord]) -> str:
    hosts = "host" if len(targets.hosts) == 1 else f"{len(targets.hosts)} hosts"
    where = f"this machine or its {hosts}" if targets.hosts else "this machine"
    more = f"; {_ps()} that run" if others else ""
    return f"no {what} that was started from {hostfile} is running on {where}{more}"


def _not_all(jobs: Sequence[str], problems: Sequence[str]) -> str:
    rest = "; try again when they are reached" if jobs else ""
    return f"processes may be left{rest}: {_first_problems(problems)}"


def _first_problems(problems: Sequence[str]) -> str:
    """Return the first problems as one sentence, and how many more there are."""
    different = list(dict.fromkeys(problems))
    more = len(different) - MOST_PROBLEMS
    return "; ".join(different[:MOST_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


def _is_job(target: str, registry: Registry) -> bool:
    try:
        check_job_id(target)
    except UsageError:
        return False
    return target in registry.jobs() or (
        not Path(target).exists() and bool(job_processes(target, None))
    )


LEAVE_ANSWER_S = 60.0


def run_leave(arguments: argparse.Namespace) -> int:
    """Let a host leave a job."""
    words = arguments.words
    if len(words) not in (1, 2):
        raise UsageError("name the host that is to leave, or a job and a host")
    job = words[0] if len(words) == 2 else None
    print(ask(job, HostRequest(do="leave", host=words[-1]), LEAVE_ANSWER_S))
    return 0


def ask(job: str | None, request: HostRequest, limit_s: float) -> str:
    """Ask the launcher of a job that runs on this machine; return its answer.

    Args:
        job: see `meant_job`.
        limit_s: the longest wait for its answer, in seconds.

    Raises:
        JobError: there is no such job here, or its launcher refuses the request.
    """
    record = running_job(job)
    launcher = record.launcher
    files = RequestFiles(Registry(read_settings().state_folder).folder, record.job)
    return files.ask(request, runs=lambda: live_process(launcher) is not None, limit_s=limit_s)


JOIN_ANSWER_S = 300.0
"""The host is reached, and its processes are prepared, before the answer."""


def run_join(arguments: argparse.Namespace) -> int:
    """Let a host take part in a job."""
    if not arguments.host:
        raise UsageError("--host=ADDRESS is missing: the address of the host to add")
    print(ask(arguments.job, HostRequest(do="join", host=arguments.host), JOIN_ANSWER_S))
    return 0
