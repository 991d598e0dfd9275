"""One background thread that makes numbered things ahead of their use.

Law: what `get` hands out is what calling `make(first)`, `make(first + 1)`, ... would give, in this order; the
thread runs at most `depth` ahead; its first error is raised by the `get` that would have had the result.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from poseidon.errors import DataError

Made = TypeVar("Made")

# How often a waiter looks whether the other side is still there.
WATCH_S = 1.0


class Prefetcher(Generic[Made]):
    """Runs `make` in a thread of its own from construction to `close`.

    Args:
        make: called with first, first + 1, ...; by the thread only.
        first: number of the first call.
        depth: results kept ready, >= 1.
        name: of the thread.
    """

    def __init__(self, make: Callable[[int], Made], *, first: int, depth: int, name: str) -> None:
        self._make = make
        self._depth = depth
        self._ready: deque[Made] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(first,), name=name, daemon=True)
        self._thread.start()

    def get(self) -> Made:
        """Return the next result, waiting for it if it is not ready. Raises what `make` raised."""
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    raise self._error
                if self._closed or not self._thread.is_alive():
                    raise DataError(f"the thread {self._thread.name} has ended: its reader was closed")
                self._changed.wait(WATCH_S)
            made = self._ready.popleft()
            self._changed.notify_all()
            return made

    @property
    def ready(self) -> int:
        """Results that `get` would return without waiting."""
        return len(self._ready)

    def close(self) -> None:
        """Stop and join the thread; it finishes the call of `make` that it is in."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self, number: int) -> None:
        try:
            while self._has_room():
                made = self._make(number)
                number += 1
                with self._changed:
                    self._ready.append(made)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - the outermost frame: handed to the owner by get()
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait for room; False when closed."""
        with self._changed:
            while len(self._ready) >= self._depth and not self._closed:
                self._changed.wait(WATCH_S)
            return not self._closed
