"""Observers of an exchange, which are notified of each call.

Law: observers change nothing. Training with them has the bits of training without them.
"""

from __future__ import annotations

from enum import Enum


class ObservedCall(Enum):
    """A call that observers are notified of."""

    OPEN = "open"
    START = "start"
    BEGIN = "begin"
    """`begin` or `begin_factors`: it returns at once. All others may wait for other workers."""
    WAIT = "wait"
    FINISH = "finish"
    SETTLE = "settle"
    HISTORIES = "histories"
    GATHER = "gather"
    """A wait for a collection."""
    CLOSE = "close"


class Observer:
    """Is notified before and after each call.

    Both methods do nothing unless they are overridden.
    """

    def before(self, call: ObservedCall, index: int) -> None:
        """Note that a call begins.

        Args:
            index: of the tensor (BEGIN, WAIT); of the iteration (START); else -1.
        """

    def after(self, call: ObservedCall, index: int, began_ns: int, ended_ns: int) -> None:
        """Note that a call has ended, with a result or an error.

        Args:
            index: as for `before`.
            began_ns: when it began, by `time.perf_counter_ns`.
            ended_ns: when it ended.
        """
