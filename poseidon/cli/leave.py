"""`poseidon leave`: let a host leave a running job, which loses nothing."""

from __future__ import annotations

import argparse

from poseidon.cluster.jobs.kill import live_process
from poseidon.cluster.jobs.registry import Registry
from poseidon.cluster.jobs.requests import HostRequest, RequestFiles
from poseidon.errors import JobError
from poseidon.hints import own_command
from poseidon.settings import read_settings

ANSWER_S = 60.0


def run(arguments: argparse.Namespace) -> int:
    """Let a host leave a job."""
    print(ask(arguments.job, HostRequest(do="leave", host=arguments.host), ANSWER_S))
    return 0


def ask(job: str, request: HostRequest, limit_s: float) -> str:
    """Ask the launcher of a job that runs on this machine; return its answer.

    Raises:
        JobError: there is no such job here, or its launcher refuses the request.
    """
    registry = Registry(read_settings().state_folder)
    record = registry.read(job)
    if record is None or live_process(record.launcher) is None:
        raise JobError(
            f"no launcher of a job {job} runs on this machine; `{own_command()} ps` lists the jobs"
        )
    launcher = record.launcher
    files = RequestFiles(registry.folder, job)
    return files.ask(request, runs=lambda: live_process(launcher) is not None, limit_s=limit_s)
