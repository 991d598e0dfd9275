"""Which worker holds the others up: the time of its own that it needs for an iteration, beside the others'.

Law: pure; `now` comes with every call. All workers of a synchronous job finish as many iterations, so what tells them apart
is the time in which they do not wait. A worker is named once it has been slower for `PATIENCE_S` without a break, and once
more when it no longer is.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from poseidon.cluster.plan import ProcessName

SLOWER = 1.5
"""How many times the others' median a straggler needs."""
WINDOW_S = 10.0
PATIENCE_S = 30.0
LEAST_S = 0.01
"""Differences below this many seconds an iteration hold nobody up."""


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What is known of one worker."""

    iteration: int = 0
    from_iteration: int = 0
    from_s: float | None = None
    from_waited_s: float = 0.0
    own_s: float | None = None  # an iteration
    slow_since_s: float | None = None
    named: bool = False


class Stragglers:
    """The workers of one job."""

    def __init__(self) -> None:
        self._seen: dict[ProcessName, _Seen] = {}

    def progress(self, name: ProcessName, iteration: int) -> None:
        """A worker has finished so many iterations."""
        self._seen.setdefault(name, _Seen()).iteration = iteration

    def waited(self, name: ProcessName, waited_s: float, now: float) -> str | None:
        """A worker tells for how long it has waited for others, all told.

        Returns:
            A sentence when it has just become a straggler, or has just stopped being one.
        """
        seen = self._seen.setdefault(name, _Seen())
        if seen.from_s is None or waited_s < seen.from_waited_s or seen.iteration < seen.from_iteration:
            self._begin_window(seen, waited_s, now)
            return None
        if now - seen.from_s < WINDOW_S or seen.iteration == seen.from_iteration:
            return None
        own_s = max(0.0, now - seen.from_s - (waited_s - seen.from_waited_s))
        seen.own_s = own_s / (seen.iteration - seen.from_iteration)
        self._begin_window(seen, waited_s, now)
        return self._judge(name, seen, now)

    def forget(self) -> None:
        """The job starts again."""
        self._seen.clear()

    def _begin_window(self, seen: _Seen, waited_s: float, now: float) -> None:
        seen.from_s, seen.from_waited_s, seen.from_iteration = now, waited_s, seen.iteration

    def _judge(self, name: ProcessName, seen: _Seen, now: float) -> str | None:
        others = [other.own_s for key, other in self._seen.items() if key != name and other.own_s is not None]
        assert seen.own_s is not None
        if not others:
            return None
        median_s = statistics.median(others)
        if seen.own_s < SLOWER * median_s or seen.own_s - median_s < LEAST_S:
            named, seen.named, seen.slow_since_s = seen.named, False, None
            return f"{name.describe()} is as fast as the others again" if named else None
        if seen.slow_since_s is None:
            seen.slow_since_s = now - WINDOW_S
        slow_s = now - seen.slow_since_s
        if seen.named or slow_s < PATIENCE_S:
            return None
        seen.named = True
        factor = seen.own_s / median_s if median_s else float("inf")
        return (
            f"{name.describe()} holds the others up: for {slow_s:.0f} s it has needed {seen.own_s:.3g} s an iteration, "
            f"{factor:.1f} times as long as the others ({median_s:.3g} s)"
        )
