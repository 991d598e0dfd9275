"""The end of all waits of a worker, from outside: by any thread, at any moment.

Law: what waits for other processes registers here before its first wait (`Network.new_monitor`), so
no wait begins later than the interruption and continues.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ps_server.errors import ServerError


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
