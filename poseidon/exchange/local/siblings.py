"""What the leader and the other workers of a machine have in common: waiting for each other, and failing together."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ps_server import LocalProtocolError, ServerError, StalenessTimeout

T = TypeVar("T")


class Siblings:
    """State that a loop's thread waits on and background threads change, under one lock.

    Args:
        timeout_s: longest time that any wait lasts.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.failure: ServerError | None = None
        self.closing = False

    def fail(self, error: ServerError) -> None:
        """Nobody can go on: every wait ends with the first error told here."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def close(self) -> None:
        """This exchange is closed: every wait ends."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.failure is not None:
            raise self.failure
        if self.closing:
            raise LocalProtocolError("the exchange is closed")

    def until(self, found: Callable[[], T | None], otherwise: str, *, limited: bool = True) -> T:
        """Wait until `found` gives something.

        Args:
            found: looks for it, under the lock.
            otherwise: what to say where it does not come.
            limited: whether the wait ends after `timeout_s`; not where this worker's own loop is waited for.

        Raises:
            StalenessTimeout: it did not in time; the text begins with `otherwise`.
        """
        deadline = time.monotonic() + (self.timeout_s if limited else math.inf)
        with self.changed:
            while True:
                result = found()
                if result is not None:
                    return result  # even where a sibling has left since: it had nothing more to say
                self.check()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StalenessTimeout(
                        f"{otherwise} within {self.timeout_s:g} s: a worker of this machine hangs"
                    )
                self.changed.wait(left if limited else None)
