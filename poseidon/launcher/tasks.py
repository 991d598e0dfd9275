"""The part that each task of a scheduler has in a job (docs/schedulers).

Rank 0 is the launcher; on each host the task with local rank 0 gets the processes; the others wait.
"""

from __future__ import annotations

import shlex
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from poseidon.cluster.agent.messages import Join
from poseidon.cluster.dial.tasks import ENDING, Rendezvous, TaskDialer, run_task
from poseidon.cluster.machinefile import Host, socket_host
from poseidon.cluster.name_lookup import address_for_all, address_of, own_address_towards
from poseidon.cluster.rendezvous.key import server_keys, task_keys
from poseidon.cluster.rendezvous.schedulers import Task
from poseidon.cluster.rendezvous.task_signals import TaskSignals
from poseidon.cluster.supervision.signals import exit_code_of, handled
from poseidon.errors import JobError, PoseidonError, UsageError, counted
from poseidon.version import __version__


def with_a_worker_for_each_task(
    hosts: Sequence[Host], tasks: Sequence[int], *, gpu: str, app_threads: int
) -> tuple[Host, ...]:
    """Return hosts with devices for as many workers as tasks.

    Args:
        hosts: the hosts.
        tasks: on each of them. Where each has one, the flags give the devices of all.
        gpu: `--gpu`.
        app_threads: `--workers`.

    Raises:
        UsageError: the flags ask for a different number of workers.
    """
    if max(tasks) == 1:
        return tuple(hosts)
    return tuple(
        _with_workers(host, count, gpu, app_threads)
        for host, count in zip(hosts, tasks, strict=True)
    )


def _with_workers(host: Host, tasks: int, gpu: str, app_threads: int) -> Host:
    where = f"{counted(tasks, 'task')} on {host.name}"
    if gpu in ("", "cpu"):
        if app_threads not in (1, tasks):
            raise UsageError(
                f"--workers={app_threads} with {where}; expected {tasks}, or one task on each host"
            )
        return replace(host, workers=tasks)
    if gpu == "all":
        return replace(host, gpus=",".join(map(str, range(tasks))))
    if gpu.count(",") + 1 != tasks:
        raise UsageError(f"--gpu={gpu} with {where}; expected as many devices, or all")
    return replace(host, gpus=gpu)


def take_part(
    task: Task, key: bytes, timeout_s: float, run_job: Callable[[TaskDialer], int]
) -> int:
    """Take part in a job to its end; return the job's exit code.

    Args:
        task: this process.
        key: the secret of all tasks.
        timeout_s: how long to wait for the other tasks.
        run_job: launches the job on the hosts of a dialer; called on rank 0 alone.

    Raises:
        PoseidonError: not all tasks came, or the job failed.
    """
    with _signals_as_errors(task.rank):
        master = address_for_all(task.master, address_of(task.master, timeout_s))
        if task.rank == 0:
            return _lead(task, master, key, timeout_s, run_job)
        address = f"tcp://{socket_host(master)}:{task.port}"
        join = _join_of(task, own_address_towards(master))
        return run_task(address, task_keys(key), join, timeout_s)


def _lead(
    task: Task, address: str, key: bytes, timeout_s: float, run_job: Callable[[TaskDialer], int]
) -> int:
    with (
        TaskSignals() as signals,
        Rendezvous(
            address,
            task.port,
            server_keys(key),
            size=task.size,
            on_signal=signals.other_task_signalled,
        ) as rendezvous,
    ):
        code = 1
        try:
            gathered = rendezvous.gather(_join_of(task, address), timeout_s)
            code = run_job(TaskDialer(gathered, _same_tasks))
        except PoseidonError as error:
            code = error.exit_code
            raise
        finally:
            rendezvous.dismiss(code)
        return code


def _same_tasks(changes: Mapping[str, str]) -> str:
    """Return how a user starts the tasks of a job again."""
    flags = shlex.join(f"--{name}={value}" for name, value in changes.items())
    return f"the same tasks with {flags}"


def _join_of(task: Task, address: str) -> Join:
    return Join(
        version=__version__,
        rank=task.rank,
        size=task.size,
        local_rank=task.local_rank,
        address=address,
        host=socket.gethostname(),
    )


@contextmanager
def _signals_as_errors(rank: int) -> Iterator[None]:
    """Raise a JobError for a signal that asks this process to end, while neither the task nor
    its job has a handler.
    """

    def end(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        error = JobError(f"rank {rank} was ended by {name} while its job did not run")
        error.exit_code = exit_code_of(signal.Signals(number))
        raise error

    # a signal that nohup ignores stays ignored
    caught = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    with handled(caught, end):
        yield
