"""State that threads share, and waiting for it: a monitor, a lock with threads that
wait under it (Hoare, CACM 17(10), 1974); and threads that hand what ends them to their owner.

Laws:

* A thread that waits has a question. A thread that changes the state calls `notify`, which asks the
  questions of all waiting threads and wakes those whose question has an answer. To wake a thread in
  vain costs more than to ask its question.
* A question is asked until it has its first answer, and never again: it may hand out an answer only
  once.
* An answer comes before a failure: a peer that leaves after it has sent everything ends no wait.
* What a question raises is raised in the thread that waits for its answer, whichever thread asked.

All waits of a worker end from outside, by any thread, at any moment (`Interruption`). What waits for
other processes registers there before its first wait (`Network.new_monitor`), so no wait begins later
than the interruption and continues.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ps_server.errors import LocalProtocolError, ServerError, StalenessTimeout

T = TypeVar("T")


class Monitor:
    """A lock (`with monitor:`), a wait with a deadline, and a failure that ends
    every wait. All threads may call all of it.

    Args:
        timeout_s: longest time that a wait lasts.
        closed: the text of the error that a wait raises after `close`.
        hangs: the end of the sentence that a wait raises after `timeout_s`.
    """

    def __init__(self, timeout_s: float, *, closed: str, hangs: str) -> None:
        self.timeout_s = timeout_s
        self.failure: ServerError | None = None
        """The first error given to `fail`; after `interrupt` the one given to that."""
        self.interrupted = False
        """Whether `interrupt` was called: what is under way is given up."""
        self.closed = False
        self._closed_text = closed
        self._hangs = hangs
        self._lock = threading.RLock()
        self._waiting: list[_Waiter[Any]] = []

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def notify(self) -> None:
        """Wake every thread whose question now has an answer.

        Call it after each change that may give one.
        """
        with self._lock:
            for waiter in self._waiting:
                if waiter.ask():
                    waiter.wake()

    def fail(self, error: ServerError) -> None:
        """End every wait, now and later, with the first error given here."""
        with self._lock:
            self.failure = self.failure or error
            self._wake_all()

    def interrupt(self, error: ServerError) -> None:
        """End every wait, now and later, with this error, whatever `fail` has been given."""
        with self._lock:
            if not self.interrupted:
                self.interrupted, self.failure = True, error
            self._wake_all()

    def close(self) -> None:
        """End every wait, now and later, with a `LocalProtocolError`."""
        with self._lock:
            self.closed = True
            self._wake_all()

    def check(self) -> None:
        """Raise what ends the waits, if anything does."""
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise LocalProtocolError(self._closed_text)

    def wait_for(
        self,
        question: Callable[[], T | None],
        otherwise: str,
        *,
        hangs: Callable[[], str] | None = None,
        limited: bool = True,
        timeout_s: float | None = None,
    ) -> T:
        """Wait until `question` has an answer, and return it.

        Args:
            question: called under the lock, by any thread; returns None as long as
                there is no answer. It must not block.
            otherwise: the beginning of the sentence that is raised when there is none in time.
            hangs: returns the end of that sentence; None: as given to the monitor.
            limited: whether the wait ends after a time. An unlimited wait needs
                an owner that calls `close` or `fail`.
            timeout_s: that time; None: the monitor's.

        Raises:
            StalenessTimeout: there was no answer in time.
            ServerError: what was given to `fail` or `interrupt`.
            LocalProtocolError: `close` was called.
        """
        with self._lock:
            waiter = _Waiter(question)
            longest_s = self.timeout_s if timeout_s is None else timeout_s
            if not waiter.ask() and not self._wait(waiter, longest_s if limited else math.inf):
                end = self._hangs if hangs is None else hangs()
                raise StalenessTimeout(f"{otherwise} within {longest_s:g} s{end}")
            return waiter.result()

    def _wait(self, waiter: _Waiter[Any], timeout_s: float) -> bool:
        """Wait until the question has its answer; return whether it has."""
        deadline_s = time.monotonic() + timeout_s
        waiter.condition = threading.Condition(self._lock)
        self._waiting.append(waiter)
        try:
            while True:
                self.check()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                waiter.condition.wait(None if left_s > threading.TIMEOUT_MAX else left_s)
                if waiter.ask():
                    return True
        finally:
            self._waiting.remove(waiter)

    def _wake_all(self) -> None:
        for waiter in self._waiting:
            waiter.wake()


def owned_thread(
    name: str, work: Callable[[], object], failed: Callable[[Exception], object]
) -> threading.Thread:
    """Return a daemon thread that does the work once it is started.

    Args:
        failed: takes what the work raises, on the same thread.
    """

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame
            failed(error)

    return threading.Thread(target=run, name=name, daemon=True)


class _Waiter(Generic[T]):
    """A thread that waits: its question, and the first answer or error.

    All calls under the monitor's lock.
    """

    __slots__ = ("_answer", "_error", "_question", "condition")

    def __init__(self, question: Callable[[], T | None]) -> None:
        self._question = question
        self._answer: T | None = None
        self._error: Exception | None = None
        self.condition: threading.Condition | None = None

    def ask(self) -> bool:
        """Ask the question unless it has its answer; return whether it has."""
        if self._answer is None and self._error is None:
            try:
                self._answer = self._question()
            except Exception as error:  # noqa: BLE001 - raised by `result`, in the thread whose question it is
                self._error = error
        return self._answer is not None or self._error is not None

    def result(self) -> T:
        """Return the answer, or raise what the question raised."""
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer

    def wake(self) -> None:
        """Make the thread continue."""
        assert self.condition is not None
        self.condition.notify()


class Interruption:
    """What ends the waits of an exchange, which may not be built yet.

    Attributes:
        error: that ends them; None: nobody has interrupted them.
    """

    def __init__(self) -> None:
        self.error: ServerError | None = None
        self._lock = threading.Lock()
        self._calls: list[Callable[[ServerError], None]] = []

    def interrupt(self, error: ServerError) -> None:
        """End every wait, now and later, with an error; later calls do nothing.

        Any thread may call it. It waits for no other process.
        """
        with self._lock:
            if self.error is not None:
                return
            self.error, calls, self._calls = error, self._calls, []
        for call in calls:
            call(error)

    def on_interrupt(self, call: Callable[[ServerError], None]) -> None:
        """Call something with the error of the interruption; at once if it is past.

        Args:
            call: made in the thread that interrupts. It must not block.
        """
        with self._lock:
            if self.error is None:
                self._calls.append(call)
                return
        call(self.error)

    def check(self) -> None:
        """Raise the error that ends the waits, if anybody has interrupted them."""
        if self.error is not None:
            raise self.error
