"""`poseidon worker`: one of the tasks that torchrun, srun, mpirun or Kubernetes has started
becomes part of a job.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from poseidon.base.settings import inherited_environment
from poseidon.cli.main import parse_arguments
from poseidon.cluster.dial.tasks import TaskDialer
from poseidon.cluster.rendezvous.key import read_key, write_new_key
from poseidon.cluster.rendezvous.schedulers import task_from
from poseidon.errors import UsageError
from poseidon.launcher.site import Site
from poseidon.launcher.tasks import take_part, with_a_worker_for_each_task


def run(flags: argparse.Namespace) -> int:
    """Take part in a job to its end; return the job's exit code."""
    if flags.new_key:
        write_new_key(Path(flags.new_key))
        print(f"{flags.new_key}: a new key. Every task needs it, and nobody else must read it.")
        return 0
    job_flags = _job_flags(flags.job_arguments)
    key = read_key(Path(flags.key_file))
    task = task_from(inherited_environment(), port=flags.rendezvous_port)

    def run_job(dialer: TaskDialer) -> int:
        hosts = with_a_worker_for_each_task(
            dialer.hosts,
            dialer.tasks,
            gpu=job_flags.gpu,
            app_threads=job_flags.num_app_threads,
        )
        if hosts[0].gpus is not None:
            job_flags.gpu = hosts[0].gpus  # all tasks have devices; `all` would count this host's
        code: int = import_module(f"poseidon.cli.{job_flags.command}").run(
            job_flags, Site(hosts, dialer)
        )
        return code

    return take_part(task, key, flags.rendezvous_timeout, run_job)


def _job_flags(arguments: Sequence[str]) -> argparse.Namespace:
    arguments = [*arguments]
    if arguments[:1] == ["--"]:
        del arguments[0]
    if not arguments or arguments[0] not in ("train", "run"):
        raise UsageError(
            "the job is missing: expected 'train' or 'run' and its flags after the flags of 'worker'"
        )
    flags = parse_arguments(arguments)
    if flags.hostfile:
        raise UsageError("--hostfile cannot be used here: the scheduler has chosen the hosts")
    if flags.background:
        raise UsageError("--background cannot be used here: the scheduler waits for the tasks")
    return flags
