"""Control of a measurement: the measuring process requests rounds from the workers on the hosts,
and receives their times.

It uses a Unix socket, which works across network namespaces and sends no byte over the links. Each
line is a JSON object: `{"rank": 0}` from a worker that is ready, `{"iterations": 7}` to it,
`{"seconds": [...], ...}` back.

Law: every wait has a limit; a worker that sends nothing in time, or is gone, is one `TestbedError`.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from benchmarks.testbed.errors import TestbedError

HIGHEST_PRIORITY = -20
"""A nice level of Linux; only root may go below zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The times of one worker in one round of iterations.

    An iteration ends when the call returns; later work of its process counts in the next one.

    Attributes:
        seconds: of each iteration.
        user_s: processor time of the worker's process in its own code, in each iteration.
        system_s: the same in the kernel.
        losses: of each iteration's batch, before its update.
    """

    seconds: tuple[float, ...]
    user_s: tuple[float, ...]
    system_s: tuple[float, ...]
    losses: tuple[float, ...]


class Workers:
    """The measuring side: the workers of one job.

    Args:
        path: path of the socket, which does not exist yet.
        count: number of workers.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._count = count
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(count)
        self._lines: dict[int, IO[Any]] = {}

    def await_all(self, timeout_s: float, alive: Callable[[], None]) -> None:
        """Wait until all workers are ready.

        Args:
            timeout_s: longest time to wait.
            alive: raises an error when a worker has ended.

        Raises:
            TestbedError: they are not ready in time.
        """
        self._socket.settimeout(0.5)
        end_s = time.monotonic() + timeout_s
        while len(self._lines) < self._count:
            alive()
            if time.monotonic() > end_s:
                raise TestbedError(
                    f"only {len(self._lines)} of {self._count} workers were ready in "
                    f"{timeout_s:g} s"
                )
            try:
                peer, _ = self._socket.accept()
            except TimeoutError:
                continue
            peer.settimeout(timeout_s)
            line = peer.makefile("rw", encoding="utf-8")
            self._lines[int(_read(line, "a new one")["rank"])] = line
            peer.close()  # the line keeps it open

    def round(self, iterations: int) -> list[Round]:
        """Run iterations on all workers together. Return their times, by rank.

        Raises:
            TestbedError: a worker did not finish the round.
        """
        for line in self._lines.values():
            line.write(json.dumps({"iterations": iterations}) + "\n")
            line.flush()
        answers = [_read(self._lines[rank], str(rank)) for rank in sorted(self._lines)]
        return [
            Round(**{name: tuple(values) for name, values in answer.items()}) for answer in answers
        ]

    def close(self) -> None:
        """Close the connections, which ends the workers."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        self._socket.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_rounds(
    path: Path,
    rank: int,
    iterate: Callable[[], float],
    barrier: Callable[[], None],
    *,
    steady: bool = False,
) -> None:
    """Run the rounds that the measuring process requests, until it is gone.

    Args:
        path: of its socket.
        rank: this worker.
        iterate: one iteration; returns the loss.
        barrier: returns once all workers have called it.
        steady: the calling thread gets priority from the second round on. Threads that it starts
            later would inherit it; after the first round all have started.
    """
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
        with peer.makefile("rw", encoding="utf-8") as line:
            _write(line, {"rank": rank})
            for command in line:
                barrier()
                _write(line, _timed(iterate, int(json.loads(command)["iterations"])))
                if steady:
                    raise_priority()


def raise_priority() -> None:
    """Give the calling thread priority over all others of this machine.

    It sleeps in place of an accelerator, whose work takes no longer when its host's processors are
    busy. Here the hosts share a few processors, and without the priority a layer's time would grow
    by the wait for a processor.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), HIGHEST_PRIORITY)


def _timed(iterate: Callable[[], float], iterations: int) -> dict[str, object]:
    ends, losses = [_now()], []
    for _ in range(iterations):
        losses.append(iterate())
        ends.append(_now())
    columns = zip(*ends, strict=True)
    names = ("seconds", "user_s", "system_s")
    times = {
        name: [b - a for a, b in pairwise(column)]
        for name, column in zip(names, columns, strict=True)
    }
    return {**times, "losses": losses}


def _now() -> tuple[float, float, float]:
    """Return the time, and this process's processor seconds in its own code and in the kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), used.ru_utime, used.ru_stime


def _write(line: IO[Any], value: dict[str, object]) -> None:
    line.write(json.dumps(value) + "\n")
    line.flush()


def _read(line: IO[Any], who: str) -> dict[str, Any]:
    try:
        text = line.readline()
    except TimeoutError as error:
        raise TestbedError(f"worker {who} sent nothing in time") from error
    if not text:
        raise TestbedError(f"worker {who} is gone")
    answer: dict[str, Any] = json.loads(text)
    return answer
