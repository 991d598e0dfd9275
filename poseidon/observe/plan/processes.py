"""Processes of this program that do a job's work at the same time, and so share caches, memory
and cores as in a job.

Law: every process ends when its parent is gone, and every wait has a limit.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from poseidon.observe.plan import small_job, work
from poseidon.observe.plan.small_job import SmallShard, SmallWorker, store_of

LIMIT_S = 120.0
PARENT_CHECK_S = 1.0


class ProcessFailed(Exception):
    """A process failed, or did not answer in time."""


class Member:
    """What one process does on request.

    Args:
        position: of the process; workers come before shards.
    """

    def __init__(self, position: int, clients: int) -> None:
        self._position, self._clients = position, clients
        self._ends: list[SmallShard | SmallWorker] = []

    def arithmetic(self, name: str, limit_s: float) -> tuple[float, float]:
        """Return the result of a function of `work`, and the part of a core that this process
        had meanwhile.
        """
        began_s, cpu_s = time.monotonic(), time.process_time()
        found: float = getattr(work, name)(limit_s)
        return found, (time.process_time() - cpu_s) / (time.monotonic() - began_s)

    def serve(self) -> str:
        """Start another shard. Return its address."""
        shard = SmallShard(self._position % self._clients, self._clients)
        self._ends.append(shard)
        return shard.address

    def join(self, addresses: Sequence[str], small: int, int8: bool) -> None:
        """Start another worker, of a store with so many small tables."""
        store = store_of(self._clients, small, int8=int8)
        self._ends.append(SmallWorker(self._position, store, addresses))

    def iterate(self, store: int, count: int) -> float:
        """Run iterations of one of its workers. Return their wall-clock time."""
        worker = self._ends[store]
        assert isinstance(worker, SmallWorker)
        began_s = time.monotonic()
        for _ in range(count):
            worker.iterate()
        return time.monotonic() - began_s

    def cpu_s(self) -> float:
        """Return the processor seconds of this process so far."""
        return time.process_time()

    def all_reduce(self, file: str, size: int, count: int) -> float:
        return small_job.all_reduce_s_per_byte(file, self._position, size, count)

    def hooks(self, file: str, size: int, hooks: Sequence[int | None], count: int) -> list[float]:
        return small_job.hooks_s_per_byte(file, self._position, size, hooks, count)

    def leave(self) -> None:
        """End its workers or shards."""
        while self._ends:
            self._ends.pop().close()


def _end_with(parent: int) -> None:
    """End this process once its parent is gone, also while torch waits for another process."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def _run(
    connection: Connection, others: Sequence[Connection], position: int, clients: int, parent: int
) -> None:
    """Answer requests until the parent is gone."""
    for other in others:
        other.close()  # inherited: the end of a connection is seen when its last holder is gone
    threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    os.setsid()  # as a job's processes: a scheduler that is fair to sessions sees each for itself
    torch.set_num_threads(1)
    member = Member(position, clients)
    while True:
        try:
            name, arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[object, str] = (getattr(member, name)(*arguments), "")
        except Exception as error:  # noqa: BLE001 - the process's outermost frame: the parent raises the error
            answer = (None, f"{name} failed: {error}")
        connection.send(answer)


class Processes:
    """The processes of some clients: a worker and a shard of each.

    Attributes:
        workers: positions of the workers.
        shards: positions of the shards.
    """

    def __init__(self, clients: int) -> None:
        self.workers, self.shards = range(clients), range(clients, 2 * clients)
        context = multiprocessing.get_context("fork")
        self._connections: list[Connection] = []
        self._processes = []
        for position in range(2 * clients):
            mine, other = context.Pipe()
            self._connections.append(mine)
            arguments = (other, tuple(self._connections), position, clients, os.getpid())
            process = context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
            other.close()

    def ask(self, positions: Sequence[int], name: str, *arguments: object) -> list[Any]:
        """Let some processes run a method of `Member` at the same time. Return their answers.

        Raises:
            ProcessFailed: one fails or does not answer in time.
        """
        for position in positions:
            self._connections[position].send((name, arguments))
        return [self._answer(position) for position in positions]

    def _answer(self, position: int) -> Any:
        connection = self._connections[position]
        try:
            answer, problem = (
                connection.recv() if connection.poll(LIMIT_S) else (None, "it does not answer")
            )
        except (EOFError, OSError):
            answer, problem = None, "it ended"
        if problem:
            raise ProcessFailed(f"a process that works as in a job: {problem}")
        return answer

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
