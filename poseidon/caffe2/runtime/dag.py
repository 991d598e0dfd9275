"""The running of chains on threads."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from poseidon.caffe2.runtime.chains import Chain
from poseidon.caffe2.runtime.waits import cancellable, current_stop

MOST_THREADS = 64


def _new_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="caffe2-net")


_pool = _new_pool()


def _after_fork() -> None:
    """Let a forked process run nets: it has none of its parent's threads, neither of the pool nor of torch."""
    global _pool  # noqa: PLW0603
    _pool = _new_pool()
    torch.set_num_threads(1)


os.register_at_fork(after_in_child=_after_fork)


class ChainRun:
    """One run of the chains of a net.

    The thread that starts it works too: it needs no other to come to the end, so that nets inside nets cannot block.
    """

    def __init__(self, chains: Sequence[Chain], run: Callable[[int], None]) -> None:
        """Prepare a run.

        Args:
            chains: the plan.
            run: runs the operator of an index.
        """
        self._chains = chains
        self._run = run
        self._changed = threading.Condition()
        self._waits = [chain.waits_for for chain in chains]
        self._ready = deque(number for number, count in enumerate(self._waits) if count == 0)
        self._left = len(chains)
        self._running = 0
        self._error: BaseException | None = None
        self._stopped = current_stop()

    def __call__(self, threads: int) -> None:
        """Run all chains on at most so many threads.

        Raises:
            BaseException: what the first operator that failed has raised.
        """
        for _ in range(threads - 1):
            _pool.submit(self._work)
        self._work()
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        with cancellable(self._stopped):
            self._run_chains()

    def _run_chains(self) -> None:
        while (number := self._next()) is not None:
            error = None
            try:
                for index in self._chains[number].operators:
                    self._run(index)
            except BaseException as caught:  # noqa: BLE001 (the thread that started the run raises it)
                error = caught
            self._end(number, error)

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or not self._left or self._error)
            if not self._ready or self._error is not None:
                return None
            self._running += 1
            return self._ready.popleft()

    def _end(self, number: int, error: BaseException | None) -> None:
        """Note the end of a chain. The thread goes on with one that it releases: each other one wakes one more thread."""
        with self._changed:
            self._running -= 1
            self._left -= 1
            self._error = self._error or error
            before = len(self._ready)
            for released in self._chains[number].releases:
                self._waits[released] -= 1
                if self._waits[released] == 0:
                    self._ready.append(released)
            if self._error is not None or not self._left:
                self._changed.notify_all()
            else:
                self._changed.notify(max(len(self._ready) - before - 1, 0))
