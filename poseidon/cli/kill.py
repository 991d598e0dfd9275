"""`poseidon kill`: stop exactly the processes of a job, also after its launcher has died.

poseidon kill cifar10_quick-20260105-204016-3f9a1c
poseidon kill machinefiles/localserver
poseidon kill --all
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from poseidon.cluster.job_selection import jobs_of_machinefile
from poseidon.cluster.kill import KillPatience, job_processes, kill_job
from poseidon.cluster.machinefile import Client, is_loopback, read_machinefile
from poseidon.cluster.registry import EXTRACTION, JobRecord, Registry, check_job_id
from poseidon.errors import JobError, MachinefileError, PoseidonError, UsageError
from poseidon.settings import read_settings


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `kill` to the commands."""
    parser = subparsers.add_parser(
        "kill",
        help="stop the processes of a job",
        description="Stop exactly the processes of a job, by its id or by the machinefile it was started from.",
    )
    parser.add_argument("target", nargs="?", help="a job's id (see `poseidon ps`), or a machinefile")
    parser.add_argument("--all", action="store_true", help="all jobs of this user on this machine")
    parser.add_argument(
        "--grace", type=float, default=3.0, metavar="S", help="seconds from SIGTERM to SIGKILL (default 3)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Stop the job or jobs that the arguments name.

    Raises:
        UsageError: neither or both of a target and --all.
        JobError: there is no such job, or it cannot be stopped.
    """
    if (arguments.target is None) != arguments.all:
        raise UsageError(
            "poseidon kill needs either a job's id, a machinefile, or --all; `poseidon ps` lists the jobs"
        )
    if not arguments.grace >= 0:
        raise UsageError(f"--grace must be 0 seconds or more, not {arguments.grace}")
    registry = Registry(read_settings().state_folder)
    patience = KillPatience(grace_s=arguments.grace)
    if arguments.all:
        return 0 if _kill([record.job for record in read_records(registry)], registry, patience) else 1
    if _is_job(arguments.target, registry):
        return 0 if _kill([arguments.target], registry, patience) else 1
    hostfile = Path(arguments.target)
    jobs = _jobs_of(hostfile, registry)
    if not jobs and not hostfile.exists():
        raise JobError(
            f"'{arguments.target}' is neither a running job nor a machinefile; `poseidon ps` lists the jobs"
        )
    if not jobs:
        raise JobError(f"no job that was started from {hostfile} is running on this machine")
    return 0 if _kill(jobs, registry, patience) else 1


def kill_caffe(arguments: Sequence[str]) -> int:
    """What `scripts/kill_caffe.py <hostfile>` does; returns its exit code. Nothing to stop is no error."""
    return _kill_script("kill_caffe.py", "jobs", arguments, lambda job: not job.startswith(EXTRACTION))


def kill_feature_extractor(arguments: Sequence[str]) -> int:
    """What `scripts/kill_feature_extractor.py <hostfile>` does; leaves training alone."""
    return _kill_script(
        "kill_feature_extractor.py",
        "feature extractions",
        arguments,
        lambda job: job.startswith(EXTRACTION),
    )


def _kill_script(name: str, what: str, arguments: Sequence[str], wanted: Callable[[str], bool]) -> int:
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(
            f"usage: {name} <hostfile>\nStops the {what} that were started from this machinefile.",
            file=sys.stderr,
        )
        return 2
    hostfile = Path(arguments[0])
    try:
        registry = Registry(read_settings().state_folder)
        jobs = [job for job in _jobs_of(hostfile, registry) if wanted(job)]
        if not jobs:
            read_machinefile(hostfile)
            print(f"no {what.removesuffix('s')} that was started from {hostfile} is running on this machine")
        else:
            _kill(jobs, registry, KillPatience())
    except PoseidonError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def read_records(registry: Registry) -> list[JobRecord]:
    """All records that can be read; the others are named on standard error."""
    records = []
    for job in registry.jobs():
        try:
            record = registry.read(job)
        except JobError as error:
            print(f"warning: {error}", file=sys.stderr)
            continue
        if record is not None:
            records.append(record)
    return records


def _is_job(target: str, registry: Registry) -> bool:
    try:
        check_job_id(target)
    except UsageError:
        return False
    return target in registry.jobs() or (not Path(target).exists() and bool(job_processes(target, None)))


def _jobs_of(hostfile: Path, registry: Registry) -> list[str]:
    """The jobs of a machinefile.

    Raises:
        MachinefileError: it is there and wrong.
        JobError: none is found here, and it names other machines, which cannot be reached yet.
    """
    clients: tuple[Client, ...] | None = None
    mistake: MachinefileError | None = None
    try:
        clients = read_machinefile(hostfile) if hostfile.exists() else None
    except MachinefileError as error:
        mistake = error  # a job may have been started before the file was spoilt
    jobs = [record.job for record in jobs_of_machinefile(read_records(registry), hostfile.resolve(), clients)]
    if not jobs and mistake is not None:
        raise mistake
    far = [client.host for client in clients or () if not is_loopback(client.host)]
    if not jobs and far:
        raise JobError(
            f"no job of {hostfile} was started from this machine, and {far[0]} cannot be reached: "
            "stopping jobs over SSH is not there yet"
        )
    return jobs


def _kill(jobs: Sequence[str], registry: Registry, patience: KillPatience) -> int:
    """Stop jobs, telling the user; how many were found."""
    for job in jobs:
        count = kill_job(job, registry, patience=patience, report=print)
        print(
            f"job {job}: {count} processes stopped"
            if count
            else f"job {job} had already ended; its record is removed"
        )
    if not jobs:
        print("no job is running")
    return len(jobs)
