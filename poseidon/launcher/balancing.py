"""The balance of a running job: what its workers measure, and when the job regroups for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.supervision.loop import JobListener
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.launcher.balancer import Balancer, Measured, Seen, Times
from poseidon.launcher.job import Job
from ps_server.protocol.virtual_workers import VirtualWorkers

FIRST_PAUSE_S = 1.0
"""Seconds that a pause is taken to last before one was measured."""


class Balancing(JobListener):
    """Gives a job the measured speeds of its workers, and lets it regroup where a new placement of
    its virtual workers pays; does nothing without `--balance=auto`.

    Args:
        job: the job.
        requests: takes those to regroup.
        report: to the user.
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
    iterations, own_s, whole_s = (event.get(name) for name in ("iterations", "own_s", "whole_s"))
    if event.get("event") != "timed" or not isinstance(iterations, int):
        return None
    if not isinstance(own_s, int | float) or not isinstance(whole_s, int | float):
        return None
    return Times(iterations=iterations, own_s=float(own_s), whole_s=float(whole_s))


def _numbers(placed: VirtualWorkers) -> str:
    return ", ".join(str(len(placed.of(rank))) for rank in range(placed.processes))
