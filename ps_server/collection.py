"""A collection: payloads of all workers, which one of them waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ps_server.monitor import Monitor

NOT_COMPLETE = "not every worker has contributed to a collection"


@dataclass(frozen=True, slots=True)
class Collection:
    """Payloads that are collected from all workers.

    Attributes:
        poll: returns the payloads by rank once all are here, and None before.
        result: waits for them.
    """

    poll: Callable[[], tuple[bytes, ...] | None]
    result: Callable[[], tuple[bytes, ...]]

    @classmethod
    def guarded(cls, monitor: Monitor, take: Callable[[], tuple[bytes, ...] | None]) -> Collection:
        """Return a collection that other threads complete.

        Args:
            monitor: guards their state; what ends its waits ends those for the collection.
            take: called under the monitor; hands out the payloads once they are all here, and only
                once.
        """
        found: tuple[bytes, ...] | None = None

        def poll() -> tuple[bytes, ...] | None:
            nonlocal found
            with monitor:
                found = take() if found is None else found
                if found is None:
                    monitor.check()
                return found

        return cls(poll, lambda: monitor.wait_for(poll, NOT_COMPLETE))
