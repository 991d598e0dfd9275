"""The running of chains on threads.

Waits that end: of operators that wait for other threads.

A wait ends where its condition holds, after its limit, and with an error where the plan around it
ends, because another part of it has failed, or where the process ends.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from poseidon.caffe2.runtime.chains import Chain, Part
from ps_server.numerics import let_forks_compute

SLICE_S = 0.1
"""How often a wait looks whether its plan has ended."""

Stop = Callable[[], bool]


class Cancelled(RuntimeError):
    """A wait of an operator has ended because the plan around it has ended."""


def is_cancelled(error: BaseException | None) -> bool:
    """Return whether an error is, or was caused by, a wait that was cancelled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, Cancelled):
            return True
        seen.add(id(error))  # an error can be its own cause
        error = error.__cause__
    return False


Lend = Callable[[], AbstractContextManager[None]]


class _Thread(threading.local):
    stopped: Stop | None = None
    lend: Lend = nullcontext


_thread = _Thread()


def current_stop() -> Stop | None:
    """Return whether this thread's plan has ended, as a function; None outside plans."""
    return _thread.stopped


@contextmanager
def cancellable(stopped: Stop | None) -> Iterator[None]:
    """End the waits of this thread, in this block, where a function returns true."""
    before, _thread.stopped = _thread.stopped, stopped
    try:
        yield
    finally:
        _thread.stopped = before


def lending() -> AbstractContextManager[None]:
    """Let another operator of this thread's net run while this one waits, in a block."""
    return _thread.lend()


@contextmanager
def lent_by(lend: Lend) -> Iterator[None]:
    """Set what `lending` returns on this thread, in this block."""
    before, _thread.lend = _thread.lend, lend
    try:
        yield
    finally:
        _thread.lend = before


def wait_for(
    condition: threading.Condition, ready: Callable[[], bool], timeout_s: float | None = None
) -> bool:
    """Wait until a function returns true; return whether it does.

    Args:
        condition: it is held, and notified where the function's result may have changed.
        ready: the function.
        timeout_s: the limit, None for no limit.

    Raises:
        Cancelled: the plan of this thread, or the process, ends.
    """
    if ready():
        return True
    with lending():
        return _wait(condition, ready, timeout_s)


def _wait(
    condition: threading.Condition, ready: Callable[[], bool], timeout_s: float | None
) -> bool:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not ready():
        left = SLICE_S if deadline is None else min(SLICE_S, deadline - time.monotonic())
        if left <= 0:
            return False
        condition.wait(left)
        stopped = _thread.stopped
        if (stopped is not None and stopped()) or getattr(threading, "_SHUTTING_DOWN", False):
            if ready():
                return True
            raise Cancelled("The wait has ended: a different part of the plan has failed or ended")
    return True


MOST_THREADS = 64


def _new_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="caffe2-net")


_pool = _new_pool()


def _after_fork() -> None:
    """Give a forked process threads of its own."""
    global _pool  # noqa: PLW0603
    _pool = _new_pool()


os.register_at_fork(after_in_child=_after_fork)
let_forks_compute()


class Starts(Protocol):
    """The operators of a run that are started, and waited for later."""

    def start(self, index: int) -> Sequence[int]:
        """Start an operator; return the indices of those that can be waited for from now on."""

    def end(self, index: int) -> None:
        """Wait for an operator, and set its outputs."""


class ChainRun:
    """One run of the chains of a net.

    The thread that starts it works too: it needs no other to come to the end, so that nets inside
    nets cannot block. A thread computes where it can: first what starts other operators, then in
    the order of the net. Otherwise one thread waits for operators that were started, the oldest
    first.
    """

    def __init__(
        self,
        chains: Sequence[Chain],
        run: Callable[[int], None],
        starts: Starts | None = None,
        most_computing: int = MOST_THREADS,
    ) -> None:
        """Prepare a run.

        Args:
            chains: the plan.
            run: runs the operator of an index.
            starts: starts operators and waits for them, where the plan has such parts.
            most_computing: how many threads compute at the same time; waiting ones do not count.
        """
        self._chains = chains
        self._run = run
        self._starts = starts
        self._most = most_computing
        self._changed = threading.Condition()
        self._waits = [chain.waits_for for chain in chains]
        self._ready = [self._entry(i) for i, count in enumerate(self._waits) if count == 0]
        heapq.heapify(self._ready)
        self._started: deque[int] = deque()
        self._ends = {
            chain.operators[0]: number
            for number, chain in enumerate(chains)
            if chain.part is Part.END
        }
        self._waiting = False
        self._left = len(chains)
        self._running = self._computing = 0
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

    def _entry(self, number: int) -> tuple[bool, int]:
        return self._chains[number].part is not Part.START, number

    def _work(self) -> None:
        # the run of an inner net, without a limit, lends what the outer one has
        limited = self._most < MOST_THREADS
        with cancellable(self._stopped), lent_by(self._lend) if limited else nullcontext():
            self._run_chains()

    def _run_chains(self) -> None:
        while (number := self._next()) is not None:
            error: BaseException | None = None
            started: Sequence[int] = ()
            try:
                started = self._run_chain(self._chains[number])
            except BaseException as caught:  # noqa: BLE001 (the thread that started the run raises it)
                error = caught
            self._end(number, started, error)

    def _run_chain(self, chain: Chain) -> Sequence[int]:
        """Run a chain; return the operators that can be waited for from now on."""
        if chain.part is Part.WHOLE:
            for index in chain.operators:
                self._run(index)
            return ()
        assert self._starts is not None
        (index,) = chain.operators
        if chain.part is Part.START:
            return self._starts.start(index)
        self._starts.end(index)
        return ()

    def _next(self) -> int | None:
        with self._changed:
            while self._left and self._error is None:
                if self._ready and self._computing < self._most:
                    self._running += 1
                    self._computing += 1
                    return heapq.heappop(self._ready)[1]
                if self._started and not self._waiting:
                    self._running += 1
                    self._waiting = True
                    return self._started.popleft()
                self._changed.wait()
            return None

    def _end(self, number: int, started: Sequence[int], error: BaseException | None) -> None:
        """Note the end of a chain.

        This thread runs the next chain, and wakes threads for the rest.
        """
        with self._changed:
            self._running -= 1
            self._left -= 1
            if self._chains[number].part is Part.END:
                self._waiting = False
            else:
                self._computing -= 1
            self._error = self._error or error
            for released in self._chains[number].releases:
                self._waits[released] -= 1
                if self._waits[released] == 0:
                    heapq.heappush(self._ready, self._entry(released))
            self._started.extend(self._ends[index] for index in started)
            if self._error is not None or not self._left:
                self._changed.notify_all()
            else:
                self._wake(1)

    def _wake(self, awake: int) -> None:
        """Wake as many threads as there is work for, less those that are awake."""
        work = min(len(self._ready), self._most - self._computing) + bool(
            self._started and not self._waiting
        )
        self._changed.notify(max(work - awake, 0))

    @contextmanager
    def _lend(self) -> Iterator[None]:
        """Let another thread compute, in this block."""
        with self._changed:
            self._computing -= 1
            self._wake(0)
        try:
            yield
        finally:
            with self._changed:
                self._computing += 1
