"""What a job of the command line needs of the world to start again; see `poseidon.cluster.supervision.restarts`."""

from __future__ import annotations

import time
from collections.abc import Callable

from poseidon.cluster.supervision.loop import JobResult
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.launch.snapshot_list import SnapshotList

_LOOK_S = 0.1


class Restarting:
    """See `Surroundings`.

    Args:
        start: runs the job to its end.
        snapshots: those of the job.
        do_without: leaves out hosts that are missing; see `Surroundings`.
        say: tells the user.
        requests: the signals that come between two starts.
    """

    def __init__(
        self,
        start: Callable[[int, StartingPoint], JobResult],
        snapshots: SnapshotList,
        do_without: Callable[[], str],
        say: Callable[[str], None],
        requests: SignalRequests,
    ) -> None:
        self._start = start
        self._snapshots = snapshots
        self._do_without = do_without
        self._say = say
        self._requests = requests

    def start(self, attempt: int, point: StartingPoint) -> JobResult:
        """See `Surroundings`."""
        return self._start(attempt, point)

    def starting_point(self) -> StartingPoint:
        """See `Surroundings`."""
        return self._snapshots.newest_intact()

    def do_without(self) -> str:
        """See `Surroundings`."""
        return self._do_without()

    def say(self, text: str) -> None:
        """See `Surroundings`."""
        self._say(text)

    def pause(self, seconds: float) -> bool:
        """See `Surroundings`."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            if self._requests.stop_wanted():
                return True
            time.sleep(_LOOK_S)
        return False
