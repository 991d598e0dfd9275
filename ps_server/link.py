"""Which of two senders of a host uses its network link first."""

from __future__ import annotations

from collections.abc import Callable


class LinkPriority:
    """Two senders share a link: the first takes it while it has something to send, the second
    waits until it is free.

    Law: the first sender makes its calls under one lock, and `waiting` may be called under that
    lock. The second sender reads `is_free` from any thread; a stale answer delays it or lets it
    send early, and loses nothing.
    """

    def __init__(self) -> None:
        self._taken = False
        self._waiting: Callable[[], None] = lambda: None

    @property
    def is_free(self) -> bool:
        """Whether the first sender has nothing left to send."""
        return not self._taken

    def take(self) -> None:
        """First sender: note that it has something to send."""
        self._taken = True

    def free(self) -> None:
        """First sender: note that all has left the host; wake the second sender if it may have
        waited.
        """
        if self._taken:
            self._taken = False
            self._waiting()

    def when_free(self, waiting: Callable[[], None]) -> None:
        """Second sender: set what `free` calls, on the first sender's thread. It must not block."""
        self._waiting = waiting
