"""The part that each task of a scheduler has in a job (docs/schedulers).

Rank 0 is the launcher; on each host the task with local rank 0 gets the processes; the others wait.

Signals at rank 0 of a rendezvous: to this process, or only to another task of the job.

A scheduler signals all tasks, or some. Rank 0's launcher stops in order at the first request and at
once at the second, so a signal to another task counts only if rank 0 itself got none. Then its host
leaves the job, or the job is stopped if it cannot.

Law: no handler is installed here; Python writes the number of each signal that has one into a pipe.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType

from poseidon.cluster.agent.messages import Join
from poseidon.cluster.dial.tasks import ENDING, Rendezvous, TaskDialer, run_task
from poseidon.cluster.machinefile import Host, socket_host
from poseidon.cluster.name_lookup import address_for_all, address_of, own_address_towards
from poseidon.cluster.rendezvous import Task, server_keys, task_keys
from poseidon.cluster.supervision.signals import exit_code_of, handled
from poseidon.errors import JobError, PoseidonError, UsageError, counted
from poseidon.version import __version__

LOGGER = logging.getLogger("poseidon.cluster.rendezvous")
WAIT_S = 3.0
"""How long this process's own signal may come after another task's."""
_POLL_S = 0.05
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT})


class TaskSignals:
    """Watches the signals of this process. Entered in the main thread, while a job runs."""

    def __init__(self) -> None:
        self._others: queue.SimpleQueue[tuple[float, Callable[[], bool]] | None]
        self._others = queue.SimpleQueue()
        """Other tasks that were asked to end: until when this process's own signal may come, and
        what lets the task's host leave the job."""
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._decide, name="poseidon asked to end", daemon=True
        )

    def __enter__(self) -> TaskSignals:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._others.put(None)
        self._thread.join()  # it reads the pipe
        signal.set_wakeup_fd(self._before)
        os.close(self._read_end)
        os.close(self._write_end)

    def other_task_signalled(self, leave: Callable[[], bool]) -> None:
        """Note that another task was asked to end. Returns at once; any thread may call it.

        Args:
            leave: lets the host of the task leave the job; returns False if it cannot.
        """
        self._others.put((time.monotonic() + WAIT_S, leave))

    def _decide(self) -> None:
        try:
            while (other := self._others.get()) is not None:
                until_s, leave = other
                if self._signalled_before(until_s):
                    return
                if not leave():
                    break
            else:
                return
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: the request counts all the same
            LOGGER.warning(
                "cannot tell whether only this task was signalled, so it ends: %r", error
            )
        os.kill(os.getpid(), signal.SIGTERM)

    def _signalled_before(self, until_s: float) -> bool:
        """Wait; return True as soon as this process was signalled itself, or the job has ended."""
        while time.monotonic() < until_s:
            if self._signalled() or self._closed.wait(_POLL_S):
                return True
        return False

    def _signalled(self) -> bool:
        with suppress(OSError):
            return any(number in _ENDING for number in os.read(self._read_end, 4096))
        return False


def with_a_worker_for_each_task(
    hosts: Sequence[Host], tasks: Sequence[int], *, gpu: str, workers: int
) -> tuple[Host, ...]:
    """Return hosts with devices for as many workers as tasks.

    Args:
        tasks: on each of them. Where each has one, the flags give the devices of all.

    Raises:
        UsageError: the flags ask for a different number of workers.
    """
    if max(tasks) == 1:
        return tuple(hosts)
    return tuple(
        _with_workers(host, count, gpu, workers) for host, count in zip(hosts, tasks, strict=True)
    )


def _with_workers(host: Host, tasks: int, gpu: str, workers: int) -> Host:
    where = f"{counted(tasks, 'task')} on {host.name}"
    if gpu in ("", "cpu"):
        if workers not in (1, tasks):
            raise UsageError(
                f"--workers={workers} with {where}; expected {tasks}, or one task on each host"
            )
        return replace(host, workers=tasks)
    if gpu == "all":
        return replace(host, gpus=",".join(map(str, range(tasks))))
    if gpu.count(",") + 1 != tasks:
        raise UsageError(
            f"--gpu={gpu} with {where}; list one device for each task, or use --gpu=all"
        )
    return replace(host, gpus=gpu)


def take_part(
    task: Task, key: bytes, timeout_s: float, run_job: Callable[[TaskDialer], int]
) -> int:
    """Take part in a job to its end; return the job's exit code.

    Args:
        key: the secret of all tasks.
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
            code = run_job(TaskDialer(gathered))
        except PoseidonError as error:
            code = error.exit_code
            raise
        finally:
            rendezvous.dismiss(code)
        return code


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
