"""The commands train, run and worker, and how the flags of a job become its request.

Law: a field of a request declares its flag, so a new flag changes nothing here. This module imports
no torch and, until a Caffe job starts, nothing of Caffe: a command that only starts processes starts
fast.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from poseidon.base.settings import inherited_environment
from poseidon.cli.entry import ctrl_c_ends_at_once
from poseidon.cli.main import parse_arguments
from poseidon.cluster.dial.tasks import TaskDialer
from poseidon.cluster.rendezvous import read_key, task_from, write_new_key
from poseidon.errors import UsageError
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeKind, ExchangeOptions
from poseidon.flags.flag import values_of
from poseidon.launcher.job import Job
from poseidon.launcher.request import JobRequest, ScriptRequest, TrainRequest
from poseidon.launcher.runner import launch
from poseidon.launcher.site import Site, site_of
from poseidon.launcher.tasks import take_part, with_a_worker_for_each_task
from poseidon.torch.script_job import ScriptJob

AnyJobRequest = TypeVar("AnyJobRequest", bound=JobRequest)


def job_request(kind: type[AnyJobRequest], flags: argparse.Namespace) -> AnyJobRequest:
    """Return what a command line asks of a job.

    Raises:
        UsageError: a value is out of range, or two flags exclude each other.
    """
    exchange = {**values_of(ExchangeOptions, flags), "kind": exchange_kind(flags)}
    return kind(
        argv=tuple(flags.argv),
        exchange=ExchangeOptions(**exchange),
        server_requested=flags.exchange not in (None, ExchangeKind.AUTO, ExchangeKind.LOCAL),
        **values_of(kind, flags),
    )


def exchange_kind(flags: argparse.Namespace) -> ExchangeKind:
    """Return what --exchange and --svb ask for together.

    Raises:
        UsageError: they contradict each other.
    """
    by_svb = {True: ExchangeKind.FACTORS, False: ExchangeKind.SERVER}.get(flags.svb)
    if flags.exchange is None:
        return by_svb or DEFAULT_OPTIONS.kind
    kind: ExchangeKind = flags.exchange
    if by_svb not in (None, kind):
        raise UsageError(
            f"--svb={str(flags.svb).lower()} means --exchange={by_svb.value}, which contradicts "
            f"--exchange={kind.value}; give one of them"
        )
    return kind


def run_train(flags: argparse.Namespace, site: Site | None = None) -> int:
    """Train; return the exit code.

    Args:
        site: the hosts; None: the machinefile's.
    """
    if flags.client_id:
        print(
            f"client {flags.client_id} is started by the command of client 0; nothing to do",
            file=sys.stderr,
        )
        return 0

    def make_job() -> Job:
        request = job_request(TrainRequest, flags)
        with ctrl_c_ends_at_once("poseidon train"):
            module = import_module("poseidon.caffe.launch.training_job")
        kind: Callable[..., Job] = module.TrainingJob
        return kind(request, site or site_of(request))

    return launch(make_job)


def run_run(flags: argparse.Namespace, site: Site | None = None) -> int:
    """Run a script on every worker; return the exit code.

    Args:
        site: the hosts; None: the machinefile's.
    """

    def make_job() -> ScriptJob:
        request = job_request(ScriptRequest, flags)
        return ScriptJob(request, site or site_of(request))

    return launch(make_job)


def run_worker(flags: argparse.Namespace) -> int:
    """Take part in a job to its end; return the job's exit code."""
    if flags.new_key:
        write_new_key(Path(flags.new_key))
        print(f"{flags.new_key}: a new key. Every task needs it; nobody else may read it.")
        return 0
    job_flags = _job_flags(flags.job_arguments)
    key = read_key(Path(flags.key_file))
    task = task_from(inherited_environment(), port=flags.rendezvous_port)

    def run_job(dialer: TaskDialer) -> int:
        hosts = with_a_worker_for_each_task(
            dialer.hosts,
            dialer.tasks,
            gpu=job_flags.gpu,
            workers=job_flags.workers,
        )
        if hosts[0].gpus is not None:
            job_flags.gpu = hosts[0].gpus  # all tasks have devices; `all` would count this host's
        site = Site(hosts, dialer)
        if job_flags.command == "run":
            return run_run(job_flags, site)
        return run_train(job_flags, site)

    return take_part(task, key, flags.rendezvous_timeout, run_job)


def _job_flags(arguments: Sequence[str]) -> argparse.Namespace:
    arguments = [*arguments]
    if arguments[:1] == ["--"]:
        del arguments[0]
    if not arguments or arguments[0] not in ("train", "run"):
        raise UsageError(
            "the job is missing: write 'train' or 'run' and its flags after the flags of 'worker'"
        )
    flags = parse_arguments(arguments)
    if flags.hostfile:
        raise UsageError("--hostfile cannot be used here: the scheduler has chosen the hosts")
    if flags.background:
        raise UsageError("--background cannot be used here: the scheduler waits for the tasks")
    return flags
