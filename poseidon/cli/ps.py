"""`poseidon ps`: the running jobs of this user, on this machine and on the hosts of a machinefile.

poseidon ps
poseidon ps --hostfile=machinefiles/cluster
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from poseidon.cli.stopping import over_ssh
from poseidon.cluster.far_jobs import FarJob, far_hosts, list_far
from poseidon.cluster.jobs_here import HostJob, jobs_here
from poseidon.cluster.machinefile import is_loopback, read_machinefile
from poseidon.cluster.registry import Registry
from poseidon.errors import shown
from poseidon.settings import read_settings

_HEADER = ("JOB", "STARTED", "LAUNCHER", "PROCESSES", "OUTPUT")
_HERE = "(here)"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ps` to the commands."""
    parser = subparsers.add_parser(
        "ps",
        help="list running jobs",
        description="List the running jobs of this user: id, start, launcher, processes, output folder.",
    )
    parser.add_argument("--hostfile", metavar="FILE", help="ask the hosts of this machinefile, too")
    parser.add_argument(
        "--ssh_config", metavar="FILE", help="read this instead of ~/.ssh/config, as ssh -F does"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one line a job and host. A record whose processes have all gone is removed.

    Raises:
        MachinefileError: the machinefile is wrong.
    """
    clients = read_machinefile(Path(arguments.hostfile)) if arguments.hostfile else ()
    problems: list[str] = []
    here = jobs_here(Registry(read_settings().state_folder), problems.append)
    hosts = far_hosts(clients)
    far: list[FarJob] = []
    if hosts:
        with over_ssh(arguments.ssh_config) as ask:
            far, told = list_far(hosts, ask)
        problems += told
    print(_listing(here, far, bool(hosts)))
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    return 1 if hosts and problems else 0


def _listing(here: Sequence[HostJob], far: Sequence[FarJob], with_hosts: bool) -> str:
    if not here and not far:
        return "no job is running"
    told = {job.seen.record for job in far}  # this machine may be one of the hosts
    rows = [(_HERE, *_row(job)) for job in here if job.record not in told]
    rows += [(job.client.host, *_row(job.seen)) for job in far]
    lines = [("HOST", *_HEADER), *rows]
    return table(lines if with_hosts else [line[1:] for line in lines])


def _row(job: HostJob) -> tuple[str, ...]:
    record = job.record
    started = datetime.fromtimestamp(record.started_s).strftime("%Y-%m-%d %H:%M:%S")
    state = f"pid {record.launcher.pid}" if job.launcher else "died"
    near = sum(is_loopback(process.host) for process in record.processes)
    far = len(record.processes) - near
    living = f"{job.living} of {near}" + (f", {far} on other hosts" if far else "")
    return (record.job, started, state, living, shown(record.output))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines, each column as wide as its widest cell, parted by two blanks."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
