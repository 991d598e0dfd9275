"""What the user asks of one start of a job: to stop, or to regroup.

Law: pure. `now` is the machine's, `clock_s` the caller's: the sender of SIGTERM waits no longer for
a launcher that is late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from poseidon.cluster.supervision.causes import Cause, CauseRank
from poseidon.cluster.supervision.processes import ProcessState
from poseidon.cluster.supervision.state import SignalReceived


class Requests:
    """The requests that a job follows."""

    def __init__(self) -> None:
        self.stop: SignalReceived | None = None
        self.regroup = False
        self._stop_by_s = math.inf
        self._iterate_by_s = math.inf

    @property
    def command(self) -> str:
        """What worker 0 has to forward; empty: nothing. A stop precedes a regrouping."""
        return "stop" if self.stop is not None else "regroup" if self.regroup else ""

    def take_stop(self, signal: SignalReceived, clock_s: float, iterate_by_s: float) -> bool:
        """Take a request to stop; return whether it is a second one, which ends the job at once. One
        with a deadline of its own may be repeated. A job without an iteration is not waited for
        longer than until `iterate_by_s`.
        """
        if signal.within_s is not None:
            self._stop_by_s = min(self._stop_by_s, clock_s + signal.within_s)
        if self.stop is None:
            self.stop, self._iterate_by_s = signal, iterate_by_s
            return False
        return signal.within_s is None

    def unfinished(self, clock_s: float) -> SignalReceived | None:
        """Return the request to stop with the time that is left for it; None: there is none."""
        if self.stop is None or self._stop_by_s == math.inf:
            return self.stop
        return replace(self.stop, within_s=self._stop_by_s - clock_s)

    def overdue(
        self, workers: Sequence[ProcessState], term_deadline_s: float, now: float, clock_s: float
    ) -> Cause | None:
        """Return why the job is not waited for any more; None: it is."""
        if clock_s >= self._stop_by_s:
            within = f"the job did not end within {term_deadline_s:g} s of SIGTERM"
            return stopped(f"{within}; {lost(workers)}")
        if self.stop is not None and now >= self._iterate_by_s:
            self._iterate_by_s = math.inf
            if any(one.running for one in workers) and all(
                one.iteration is None for one in workers
            ):
                return stopped(
                    "the job was stopped before its first iteration", self.stop.exit_code
                )
        return None


def stopped(sentence: str, exit_code: int = 1) -> Cause:
    """Return the cause that a request to stop is."""
    return Cause(rank=CauseRank.ROOT, sentence=sentence, exit_code=exit_code)


def lost(workers: Sequence[ProcessState]) -> str:
    """Return what is lost at the end of a job that is not waited for."""
    since = "the last snapshot" if any(worker.saved for worker in workers) else "its start"
    return f"iterations since {since} are lost"
