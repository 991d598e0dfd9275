"""`poseidon kill`: stop exactly the processes of a job, also after its launcher has died."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from poseidon.base.hints import own_command
from poseidon.base.settings import read_settings
from poseidon.cluster.jobs.kill import KillTimeouts, job_processes, owner_of
from poseidon.cluster.jobs.registry import EXTRACTION, JobRecord, Registry, check_job_id
from poseidon.cluster.jobs.remote_hosts import AgentOf
from poseidon.cluster.jobs.stop import StopTargets, jobs_by_id, jobs_of_hostfile, stop_jobs
from poseidon.cluster.machinefile import read_machinefile
from poseidon.errors import JobError, PoseidonError, UsageError
from poseidon.launcher.job_folder import ended_job, local_records, meant_job
from poseidon.launcher.site import ssh_agents

_SSH_CONFIG = "--ssh_config="
MOST_PROBLEMS = 3
"""Problems of hosts that are named in an error."""


def run(arguments: argparse.Namespace) -> int:
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
        none = _none_of(hostfile, targets, "job")
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
                read_machinefile(hostfile)
                print(_none_of(hostfile, found, what.removesuffix("s")))
    except PoseidonError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # such as a name with a zero byte
        print(f"{name}: {hostfile}: {error.strerror or error}", file=sys.stderr)
        return 1
    if problems:
        print(f"{name}: {_not_all(found.jobs, problems)}", file=sys.stderr)
    return 1 if problems else 0


def _none_of(hostfile: Path, targets: StopTargets, what: str) -> str:
    hosts = "host" if len(targets.hosts) == 1 else f"{len(targets.hosts)} hosts"
    where = f"this machine or its {hosts}" if targets.hosts else "this machine"
    return f"no {what} that was started from {hostfile} is running on {where}"


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
