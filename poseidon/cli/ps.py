"""`poseidon ps`: the jobs of this user that run on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime

from poseidon.cli.kill import read_records
from poseidon.cluster.kill import job_processes, live_process
from poseidon.cluster.registry import Registry
from poseidon.settings import read_settings

_HEADER = ("JOB", "STARTED", "LAUNCHER", "PROCESSES", "OUTPUT")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ps` to the commands."""
    parser = subparsers.add_parser(
        "ps",
        help="list running jobs",
        description="List the jobs of this user that run on this machine: id, start, launcher, processes, output folder.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one line a job. A record whose processes have all gone is removed."""
    registry = Registry(read_settings().state_folder)
    rows = []
    for record in read_records(registry):
        launcher = live_process(record.launcher)
        alive = len(job_processes(record.job, record))
        if launcher is None and not alive:
            registry.remove(record.job)
            continue
        started = datetime.fromtimestamp(record.started_s).strftime("%Y-%m-%d %H:%M:%S")
        state = f"pid {record.launcher.pid}" if launcher is not None else "died"
        rows.append((record.job, started, state, f"{alive} of {len(record.processes)}", record.output))
    print(table([_HEADER, *rows]) if rows else "no job is running")
    return 0


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines, each column as wide as its widest cell, parted by two blanks."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
