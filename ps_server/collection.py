"""What is on its way to a worker that will wait for it, such as the payloads of all workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ps_server.monitor import Monitor

S = TypeVar("S")
T = TypeVar("T")
NOT_COMPLETE = "not every worker has contributed to a collection"


@dataclass(frozen=True)
class Coming(Generic[T]):
    """Something on its way.

    Attributes:
        poll: returns it once it is here, and None before.
        result: waits for it.
    """

    poll: Callable[[], T | None]
    result: Callable[[], T]

    @classmethod
    def here(cls, found: T) -> Coming[T]:
        """Return what is here already."""
        return cls(lambda: found, lambda: found)

    @staticmethod
    def together(parts: Sequence[Coming[S]], whole: Callable[[Sequence[S]], T]) -> Coming[T]:
        """Return what follows from several parts, once all are here."""

        def poll() -> T | None:
            found = [came for part in parts if (came := part.poll()) is not None]
            return whole(found) if len(found) == len(parts) else None

        return Coming(poll, lambda: whole([part.result() for part in parts]))

    @classmethod
    def guarded(
        cls,
        monitor: Monitor,
        take: Callable[[], T | None],
        otherwise: str = NOT_COMPLETE,
        hangs: Callable[[], str] | None = None,
    ) -> Coming[T]:
        """Return what other threads complete.

        Args:
            monitor: guards their state; what ends its waits ends those for this.
            take: called under the monitor; hands it out once it is all here, and only once.
            otherwise, hangs: of the sentence that is raised when it does not come in time; see
                `Monitor.wait_for`.
        """
        found: T | None = None

        def poll() -> T | None:
            nonlocal found
            with monitor:
                found = take() if found is None else found
                if found is None:
                    monitor.check()
                return found

        return cls(poll, lambda: monitor.wait_for(poll, otherwise, hangs=hangs))


Collection = Coming[tuple[bytes, ...]]
"""Payloads that are collected from all workers, by rank."""
