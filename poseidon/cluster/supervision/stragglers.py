"""Detection of stragglers, by the time per iteration in which a worker does not wait for others.

Law: pure; `now` comes with every call. All workers of a synchronous job finish as many iterations,
so they differ only in the time in which they do not wait: their own time. `excess_s` is the rule;
the dashboard has the same. A worker that computes for more virtual workers than others needs longer
for it, and is not a straggler unless each of them takes longer. A worker is reported once it has
been slower for `REPORT_AFTER_S` without a break, and once more when it no longer is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.cluster.job_plan import ProcessName

SLOWER = 1.5
"""A straggler needs so many times the median of the others."""
WINDOW_S = 10.0
REPORT_AFTER_S = 30.0
MIN_DIFFERENCE_S = 0.01
"""Differences below this many seconds an iteration do not count."""


def excess_s(own_s: float, others_s: Sequence[float], iteration_s: float) -> float:
    """Return by how many seconds an iteration a worker is slower than the others; 0 if it is not a
    straggler.

    A worker that itself waits longer than that is not one: something else makes all of them wait.

    Args:
        own_s: its own time for an iteration.
        others_s: the other workers' times; their median counts.
        iteration_s: an iteration, with all waits.
    """
    if not others_s:
        return 0.0
    median_s = statistics.median(others_s)
    excess = own_s - median_s
    counts = own_s >= SLOWER * median_s and excess >= max(MIN_DIFFERENCE_S, iteration_s - own_s)
    return excess if counts else 0.0


@dataclass(slots=True, kw_only=True)
class _Measured:
    """The measurements of one worker."""

    iteration: int = 0
    turns: int = 1  # virtual workers that it computes for
    from_iteration: int = 0
    from_s: float | None = None
    from_waited_s: float = 0.0
    own_s: float | None = None  # per iteration
    slow_since_s: float | None = None
    reported: bool = False


class Stragglers:
    """The straggler detection of one job."""

    def __init__(self) -> None:
        self._workers: dict[ProcessName, _Measured] = {}

    def progress(self, name: ProcessName, iteration: int, turns: int = 1) -> None:
        """Record how many iterations a worker has finished, and for how many virtual workers."""
        worker = self._workers.setdefault(name, _Measured())
        worker.iteration, worker.turns = iteration, max(1, turns)

    def waited(self, name: ProcessName, waited_s: float, now: float) -> str | None:
        """Record for how long a worker has waited for others in total.

        Returns:
            A sentence when it has just become a straggler, or has just stopped being one.
        """
        worker = self._workers.setdefault(name, _Measured())
        if (
            worker.from_s is None
            or waited_s < worker.from_waited_s
            or worker.iteration < worker.from_iteration
        ):
            self._begin_window(worker, waited_s, now)
            return None
        if now - worker.from_s < WINDOW_S or worker.iteration == worker.from_iteration:
            return None
        own_s = max(0.0, now - worker.from_s - (waited_s - worker.from_waited_s))
        iterations = worker.iteration - worker.from_iteration
        worker.own_s, iteration_s = own_s / iterations, (now - worker.from_s) / iterations
        self._begin_window(worker, waited_s, now)
        return self._judge(name, worker, iteration_s, now)

    def forget(self) -> None:
        """Forget all measurements: the job is restarted."""
        self._workers.clear()

    def _begin_window(self, worker: _Measured, waited_s: float, now: float) -> None:
        worker.from_s, worker.from_waited_s, worker.from_iteration = now, waited_s, worker.iteration

    def _judge(
        self, name: ProcessName, worker: _Measured, iteration_s: float, now: float
    ) -> str | None:
        others, turns = [], []
        for key, other in self._workers.items():
            if key != name and other.own_s is not None:
                others.append(other.own_s)
                turns.append(other.own_s / other.turns)
        assert worker.own_s is not None
        if not others:
            return None
        is_slow = worker.own_s / worker.turns >= SLOWER * statistics.median(turns)
        if not (is_slow and excess_s(worker.own_s, others, iteration_s)):
            reported, worker.reported, worker.slow_since_s = worker.reported, False, None
            return f"{name.describe()} is as fast as the others again" if reported else None
        if worker.slow_since_s is None:
            worker.slow_since_s = now - WINDOW_S
        slow_s = now - worker.slow_since_s
        if worker.reported or slow_s < REPORT_AFTER_S:
            return None
        worker.reported = True
        median_s = statistics.median(others)
        factor = worker.own_s / median_s if median_s else float("inf")
        return (
            f"{name.describe()} slows the others down: for {slow_s:.0f} s it has needed "
            f"{worker.own_s:.3g} s an iteration, {factor:.1f} times as long as the others "
            f"({median_s:.3g} s)"
        )
