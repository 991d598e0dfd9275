"""Hosts that are prepared beside a job: what is tried, when, and how often."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from poseidon.cluster.agent.messages import Request, SendLine, SendSignal, Started
from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import ProcessSpec
from poseidon.errors import JobError
from poseidon.launcher.newcomers import Newcomers, Prepared, Waiting, of_host

HOST = Host(id=1, address="b", port=0)
WORKER = ProcessName(role=Role.WORKER, index=1, client=1, host="b")
SHARD = ProcessName(role=Role.SHARD, index=1, client=1, host="b")


class Job:
    """A job that lacks one host, whose processes behave as `hears` says."""

    def __init__(self, *outcomes: str) -> None:
        self._outcomes = list(outcomes)
        self.sent: list[Request] = []
        self.said: list[str] = []
        self.taken = 0

    def missing_hosts(self) -> Sequence[Host]:
        return [HOST]

    def prepare(self, host: Host, listener: Waiting) -> list[Prepared]:
        outcome = self._outcomes.pop(0)
        if outcome == "unreachable":
            raise JobError("no route to b")
        found = []
        for name in (SHARD, WORKER):
            process = RemoteProcess(name, 7, "b", listener, self.sent.append)
            process.take(Started(id=7, pid=70, created_s=1.0))
            spec = ProcessSpec(name=name, argv=("x",), first_line=b"{}")
            found.append(Prepared(spec=spec, process=process))
        listener.event(SHARD, {"event": "listening", "address": "tcp://b:1"})
        listener.event(SHARD, {"event": "paused"})
        if outcome == "failed":
            listener.event(WORKER, {"event": "error", "message": "no such layer"})
        if outcome == "ended":
            listener.exited(WORKER, -9)
        if outcome == "waits":
            listener.event(WORKER, {"event": "alive"})
            listener.event(WORKER, {"event": "paused", "snapshot": None})
        return found

    def take_in(self, host: Host, prepared: Sequence[Prepared]) -> None:
        assert of_host(prepared, HOST)
        self.taken += 1

    def take_request(self) -> None:
        """No command comes."""

    def failed(self, host: Host, why: str, *, first: bool) -> None:
        if first:
            self.said.append(f"client 1 (b) is not back: {why}")

    def report(self, text: str) -> None:
        self.said.append(text)


def test_a_host_is_taken_in_once_all_its_processes_wait() -> None:
    job = Job("waits")
    Newcomers(job, 3).prepare_next(0.0)
    assert job.taken == 1
    assert [request.line for request in job.sent if isinstance(request, SendLine)] == [
        '{"do": "pause"}'
    ]
    assert job.said == []


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        ("unreachable", "no route to b"),
        ("failed", "worker 1: no such layer"),
        ("ended", "worker 1 has ended while it was prepared"),
    ],
)
def test_a_host_that_fails_is_tried_again_less_and_less_often(outcome: str, why: str) -> None:
    job = Job(outcome, outcome, "waits")
    newcomers = Newcomers(job, 3)
    for now_s in (0.0, 0.5, 1.0, 2.5):  # due at once, after one second, then after two
        newcomers.prepare_next(now_s)
        assert job.taken == 0
    newcomers.prepare_next(3.0)
    assert job.taken == 1
    assert job.said == [f"client 1 (b) is not back: {why}"]
    signals = sum(isinstance(request, SendSignal) for request in job.sent)
    assert signals == (0 if outcome == "unreachable" else 4)  # nothing of it is left


@pytest.mark.parametrize(("most", "often"), [(1, "once"), (2, "2 times")])
def test_a_host_that_is_lost_again_and_again_is_left_out(most: int, often: str) -> None:
    job = Job(*(most * ["waits"]))
    newcomers = Newcomers(job, most)
    for turn in range(most + 2):
        newcomers.prepare_next(float(turn))
    assert job.taken == most
    assert job.said == [
        f"client 1 (b) was taken in again {often} already (--max_rejoins); the job goes on without "
        "it"
    ]


def test_processes_that_never_wait_are_given_up() -> None:
    job = Job("silent")
    listener = Waiting()
    prepared = job.prepare(HOST, listener)
    with pytest.raises(JobError, match="worker 1 did not wait for the job within 0 s"):
        listener.until_all_wait(prepared, lambda: False, limit_s=0.0)
