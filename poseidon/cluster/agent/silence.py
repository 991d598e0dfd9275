"""How long a peer has been silent, measured in the time for which this process was running.

Law: pure. A process that was stopped, or has no processor, receives late what its peer has sent in
time. Such a pause must not count as silence. So a wait that lasts longer than its limit counts as
the limit, and a silence is found after the same number of waits, however busy this machine is.
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
