"""`poseidon leave`: let a host leave a running job, which loses nothing."""

from __future__ import annotations

import argparse

from poseidon.base.settings import read_settings
from poseidon.cluster.jobs.kill import live_process
from poseidon.cluster.jobs.registry import Registry
from poseidon.cluster.jobs.requests import HostRequest, RequestFiles
from poseidon.errors import UsageError
from poseidon.launcher.job_folder import running_job

ANSWER_S = 60.0


def run(arguments: argparse.Namespace) -> int:
    """Let a host leave a job."""
    words = arguments.words
    if len(words) not in (1, 2):
        raise UsageError("expected a host that is to leave, or a job and a host")
    job = words[0] if len(words) == 2 else None
    print(ask(job, HostRequest(do="leave", host=words[-1]), ANSWER_S))
    return 0


def ask(job: str | None, request: HostRequest, limit_s: float) -> str:
    """Ask the launcher of a job that runs on this machine; return its answer.

    Args:
        job: see `meant_job`.
        request: what it is asked.
        limit_s: the longest wait for its answer, in seconds.

    Raises:
        JobError: there is no such job here, or its launcher refuses the request.
    """
    record = running_job(job)
    launcher = record.launcher
    files = RequestFiles(Registry(read_settings().state_folder).folder, record.job)
    return files.ask(request, runs=lambda: live_process(launcher) is not None, limit_s=limit_s)
