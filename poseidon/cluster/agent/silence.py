"""How long another process has sent nothing, by the time for which this one was running.

Law: pure. A process that waits for a processor, or that was stopped, receives late what the other
one has sent in time. It notices by its own waits: one that lasts longer than it should counts as
long as it should last. So every silence is found after as many waits, however busy this machine is.
"""

from __future__ import annotations


class Silence:
    """The silence of another process.

    Args:
        longest_wait_s: the longest time between two looks of a process that is not late.
        now_s: the time, by any steady clock.
    """

    def __init__(self, longest_wait_s: float, now_s: float) -> None:
        self._longest_wait_s = longest_wait_s
        self._looked_s = self._known_s = now_s
        self._seconds = 0.0
        self.heard_s = now_s
        """When it was heard last. Another thread may set it."""

    def look(self, now_s: float) -> float:
        """Return for how many seconds it has been silent while this process was running."""
        since_s, self._looked_s = self._looked_s, now_s
        if self._known_s != self.heard_s:
            since_s = self._known_s = self.heard_s
            self._seconds = 0.0
        self._seconds += min(max(0.0, now_s - since_s), self._longest_wait_s)
        return self._seconds
