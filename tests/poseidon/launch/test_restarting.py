"""Between two starts a job hears whether it is still wanted."""

from __future__ import annotations

import os
import signal

import pytest

from poseidon.cluster.supervision.loop import JobResult
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.cluster.supervision.settings import SupervisionSettings
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.steps import Outcome
from poseidon.launch.restarting import Restarting
from poseidon.launch.snapshot_list import SnapshotList

ORIGIN = StartingPoint(state="here.solverstate", iteration=3)
DONE = JobResult(outcome=Outcome.FINISHED, iteration=9, elapsed_s=1.0)


def restarting(requests: SignalRequests, said: list[str]) -> Restarting:
    snapshots = SnapshotList(ORIGIN, said.append)
    return Restarting(lambda attempt, point: DONE, snapshots, lambda: "without it", said.append, requests)


@pytest.mark.parametrize(
    ("number", "stops"), [(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGHUP, False)]
)
def test_a_signal_in_the_pause(number: signal.Signals, stops: bool) -> None:
    with SignalRequests(SupervisionSettings()) as requests:
        world = restarting(requests, [])
        os.kill(os.getpid(), number)
        assert world.pause(600.0 if stops else 0.15) is stops


def test_the_rest_is_handed_on() -> None:
    with SignalRequests(SupervisionSettings()) as requests:
        said: list[str] = []
        world = restarting(requests, said)
        world.say("a word")
        assert (world.start(0, ORIGIN), world.starting_point(), world.do_without()) == (
            DONE,
            ORIGIN,
            "without it",
        )
        assert said == ["a word"]
