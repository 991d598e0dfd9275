"""The balance of a running job: which worker computes for how many virtual workers, by measured
times, and when the job regroups for it.

A new placement needs a pause of all workers, as a host that joins does. So it has to save a part of
each iteration (`GAIN`), and it comes once it would have saved, since the measurement began, as much
time as a pause takes. Then it pays for itself about as soon again, and whatever the times do, the
pauses take no longer than what the placements before them have cost.

A worker with a quota of processor (a container's limit) is fast as long as it waits for others for
a part of the time, and slow with more virtual workers. So what one took when it had more counts for
a while (`Seen`): otherwise they would move there and back.

Law: pure. A balance decides where virtual workers are computed, never what they compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.supervision.loop import JobListener
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.launcher.job import Job
from ps_server.json_fields import value_of
from ps_server.protocol.virtual_workers import VirtualWorkers

LEAST = 4
"""The fewest iterations of a measurement."""
LEAST_S = 1.0
"""A measurement lasts at least so long: a host's quota of processor has periods of 0.1 s."""
GAIN = 0.1
"""The part of an iteration's time that a new placement has to save."""
REMEMBERED_S = 100.0
"""For so much training a worker counts as no faster with more virtual workers than it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The times of a worker's iterations, in seconds.

    Attributes:
        own_s: of all together, without waits for other workers.
        whole_s: with them.
    """

    iterations: int
    own_s: float
    whole_s: float

    def since(self, earlier: Times) -> Times:
        """Return the times of the iterations that have come since."""
        return Times(
            iterations=self.iterations - earlier.iterations,
            own_s=self.own_s - earlier.own_s,
            whole_s=self.whole_s - earlier.whole_s,
        )

    @property
    def is_enough(self) -> bool:
        """Whether they are a measurement."""
        return self.iterations >= LEAST and self.whole_s >= LEAST_S


class Seen:
    """What a virtual worker took on one worker, by the number that this worker had."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[float, float]] = {}
        """The seconds of one, and for how much training they count, by that number."""

    def take(self, count: int, each_s: float, passed_s: float) -> float:
        """Take a measurement. Return the seconds that one will take if the worker gets more.

        Args:
            count: the virtual workers of the worker.
            each_s: the seconds of one.
            passed_s: seconds of training since the measurement before.
        """
        self._found = {
            n: (seconds, left_s - passed_s)
            for n, (seconds, left_s) in self._found.items()
            if left_s > passed_s
        }
        self._found[count] = each_s, REMEMBERED_S
        more = min((n for n in self._found if n > count), default=count)
        return max(each_s, self._found[more][0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of a measurement.

    Attributes:
        speeds: of each worker, in virtual workers a second.
        placed: where the virtual workers should be computed from now on; None: where they are.
        iteration_s: seconds that an iteration then takes.
        reason: the times that it follows from, a clause.
    """

    speeds: tuple[float, ...]
    placed: VirtualWorkers | None = None
    iteration_s: float = 0.0
    reason: str = ""


class Balancer:
    """Measures the workers of one start, and decides when a new placement pays.

    Args:
        seen: of each worker, from the starts before this one; changed by measurements.
    """

    def __init__(self, placed: VirtualWorkers, seen: Sequence[Seen]) -> None:
        self._placed = placed
        self._seen = seen
        self._from: dict[int, Times] = {}
        """The first report of each worker, before which caches and readers fill; later the one at
        the beginning of the measurement."""
        self._newest: dict[int, Times] = {}
        self._decided_s = 0.0

    def take(self, worker: int, times: Times, pause_s: float) -> Measured | None:
        """Take a report. Return the measurement that it completes, if any.

        Args:
            worker: the rank of its sender.
            times: of the iterations of this worker since the start.
            pause_s: seconds that training stops for a new placement.
        """
        self._from.setdefault(worker, times)
        self._newest[worker] = times
        spans = [self._newest[rank].since(self._from[rank]) for rank in sorted(self._newest)]
        if len(spans) < self._placed.processes or not all(span.is_enough for span in spans):
            return None
        return self._decide(spans, pause_s)

    def _decide(self, spans: Sequence[Times], pause_s: float) -> Measured:
        numbers = [len(self._placed.of(rank)) for rank in range(self._placed.processes)]
        own_s = [max(span.own_s / span.iterations, 1e-9) for span in spans]
        whole_s = max(span.whole_s / span.iterations for span in spans)
        each_s = [seconds / n for seconds, n in zip(own_s, numbers, strict=True)]
        trained_s = max(times.whole_s for times in self._newest.values())
        passed_s, self._decided_s = trained_s - self._decided_s, trained_s
        more_s = [
            seen.take(n, seconds, passed_s)
            for seen, n, seconds in zip(self._seen, numbers, each_s, strict=True)
        ]
        speeds = tuple(1 / seconds for seconds in more_s)
        placed = VirtualWorkers.spread(self._placed.count, speeds)
        counts = [len(placed.of(rank)) for rank in range(placed.processes)]
        then_s = max(
            count * (more if count > n else each)
            for count, n, each, more in zip(counts, numbers, each_s, more_s, strict=True)
        )
        saved_s = max(own_s) - then_s
        if saved_s < GAIN * whole_s:
            self._from = dict(self._newest)
            return Measured(speeds=speeds)
        if saved_s * min(span.iterations for span in spans) < pause_s:
            return Measured(speeds=speeds)
        shown = ", ".join(f"{seconds:.3g}" for seconds in each_s)
        expected_s = whole_s - saved_s
        reason = (
            f"each takes {shown} s on the workers, and an iteration then takes about "
            f"{expected_s:.3g} s instead of {whole_s:.3g} s"
        )
        return Measured(speeds=speeds, placed=placed, iteration_s=expected_s, reason=reason)


FIRST_PAUSE_S = 1.0
"""Seconds that a pause is taken to last before one was measured."""


class Balancing(JobListener):
    """Gives a job the measured speeds of its workers, and lets it regroup where a new placement of
    its virtual workers pays; does nothing without `--balance=auto`.

    Args:
        now: seconds, monotonic.
    """

    def __init__(
        self,
        job: Job,
        requests: SignalRequests,
        report: Callable[[str], None],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._requests = requests
        self._report = report
        self._now = now
        self._balancer: Balancer | None = None
        """Decides for the start that runs; None: its workers have not reported yet."""
        self._seen: list[Seen] = []
        """What each worker has shown since the job's workers last changed."""
        self._regroups = False
        """Whether this object has asked for the end of the start that runs."""
        self._pause_s = FIRST_PAUSE_S
        self._reported_s = 0.0
        """When worker 0 has reported its times last."""
        self._iteration_s: float | None = None
        """The first iteration's time after a pause that this object has asked for; None: it has not."""

    def on_ended(self) -> None:
        """Note that the start which ran has ended: what workers report is of the next one."""
        if not self._regroups:  # the next start may have other workers
            self._seen = []
        self._balancer, self._regroups = None, False

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        times = times_of(event)
        if times is None or name.role is not Role.WORKER or not self._job.request.balance.measured:
            return
        if name.index == 0:
            self._note_report()
        if not self._regroups:
            self._take(name.index, times)

    def _take(self, worker: int, times: Times) -> None:
        if self._balancer is None:
            placed = self._job.virtual_workers
            if len(self._seen) != placed.processes:
                self._seen = [Seen() for _ in range(placed.processes)]
            self._balancer = Balancer(placed, self._seen)
        measured = self._balancer.take(worker, times, self._pause_s)
        if measured is not None:
            self._job.take_speeds(measured.speeds)
            if measured.placed is not None:
                self._regroup(measured, measured.placed)

    def _note_report(self) -> None:
        now_s = self._now()
        if self._iteration_s is not None and not self._regroups:  # the first of the next start
            self._pause_s = max(0.0, now_s - self._reported_s - self._iteration_s)
            self._iteration_s = None
        self._reported_s = now_s

    def _regroup(self, measured: Measured, placed: VirtualWorkers) -> None:
        self._regroups, before = True, self._job.virtual_workers
        self._iteration_s = measured.iteration_s
        self._report(
            f"the workers will compute for {_numbers(placed)} virtual workers, instead of "
            f"{_numbers(before)}: {measured.reason}"
        )
        self._requests.regroup()


def times_of(event: Mapping[str, object]) -> Times | None:
    """Return what a worker has measured; None: the event does not say."""
    with suppress(ValueError):
        return value_of(Times, event) if event.get("event") == "timed" else None
    return None


def _numbers(placed: VirtualWorkers) -> str:
    return ", ".join(str(len(placed.of(rank))) for rank in range(placed.processes))
