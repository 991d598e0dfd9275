"""The part that each task of a scheduler has in a job (docs/schedulers).

Rank 0 is the launcher; on each host the task with local rank 0 gets the processes; the others wait.
"""

from __future__ import annotations

import shlex
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from poseidon.cluster.agent.messages import Join
from poseidon.cluster.dial.tasks import ENDING, Rendezvous, TaskDialer, run_task
from poseidon.cluster.machinefile import socket_host
from poseidon.cluster.name_lookup import address_for_all, address_of, own_address_towards
from poseidon.cluster.rendezvous.key import server_keys, task_keys
from poseidon.cluster.rendezvous.schedulers import Task
from poseidon.cluster.rendezvous.task_signals import TaskSignals
from poseidon.cluster.supervision.signals import exit_code_of, handled
from poseidon.errors import JobError, PoseidonError, UsageError
from poseidon.version import __version__


def devices_of_tasks(gpu: str, app_threads: int, tasks: int) -> tuple[str, int]:
    """Return --gpu and --workers with a worker for each task.

    Args:
        gpu: the flag's value.
        app_threads: the flag's value.
        tasks: on each host. One alone leaves the flags as they are.

    Raises:
        UsageError: the flags ask for a different number of workers.
    """
    if tasks == 1:
        return gpu, app_threads
    if not gpu:
        if app_threads not in (1, tasks):
            raise UsageError(
                f"--workers={app_threads} with {tasks} tasks on each host; expected "
                f"{tasks}, or one task"
            )
        return gpu, tasks
    if gpu == "all":
        return ",".join(map(str, range(tasks))), app_threads
    if gpu.count(",") + 1 != tasks:
        raise UsageError(
            f"--gpu={gpu} with {tasks} tasks on each host; expected as many devices, or all"
        )
    return gpu, app_threads


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
