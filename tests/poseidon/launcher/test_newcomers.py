"""Hosts that are prepared beside a job that runs."""

from __future__ import annotations

import pytest

from poseidon.cluster.agent.messages import Exited, Request, Started, WriteLine
from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.process import ProcessSpec
from poseidon.errors import JobError
from poseidon.launcher.newcomers import NewcomerListener, PreparedProcess, Returns

WORKER = ProcessName(role=Role.WORKER, index=1, client=1, host="b")
SHARD = ProcessName(role=Role.SHARD, index=1, client=1, host="b")


def prepare(listener: NewcomerListener, sent: list[Request]) -> list[PreparedProcess]:
    """Return a shard that waits, and a worker."""
    found = []
    for name in (SHARD, WORKER):
        process = RemoteProcess(name, 7, "b", listener, sent.append)
        process.take(Started(id=7, pid=70, created="1.0"))
        spec = ProcessSpec(name=name, argv=("x",), first_line=b"{}")
        found.append(PreparedProcess(spec=spec, process=process))
    listener.event(SHARD, {"event": "listening", "address": "tcp://b:1"})
    listener.event(SHARD, {"event": "paused"})
    return found


def test_processes_wait_once_they_have_paused() -> None:
    listener, sent = NewcomerListener(), list[Request]()
    prepared = prepare(listener, sent)
    listener.event(WORKER, {"event": "alive"})
    listener.event(WORKER, {"event": "paused", "snapshot": None})
    listener.until_all_wait(prepared, lambda: False)
    assert [request.line for request in sent if isinstance(request, WriteLine)] == [
        b'{"do": "pause"}'
    ]
    assert [one.works for one in prepared] == [False, True]


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        ("failed", "worker 1: no such layer"),
        ("script failed", "worker 1: train.py: no such file"),
        ("ended", "worker 1 has ended while it was prepared"),
        ("silent", "shard 1, worker 1 did not wait for the job within 0 s"),
        ("job ends", "shard 1, worker 1 did not wait for the job within 300 s"),
    ],
)
def test_processes_that_do_not_wait(outcome: str, why: str) -> None:
    listener = NewcomerListener()
    prepared = prepare(listener, [])
    if outcome == "failed":
        listener.event(WORKER, {"event": "error", "message": "no such layer"})
    if outcome == "script failed":
        listener.event(WORKER, {"event": "error", "message": "worker 1: train.py: no such file"})
    if outcome == "ended":
        prepared[1].process.take(Exited(id=7, status=-9))
        assert not prepared[1].works
    with pytest.raises(JobError, match=rf"^{why}"):
        listener.until_all_wait(
            prepared, lambda: outcome == "job ends", limit_s=0.0 if outcome == "silent" else 300.0
        )


def test_a_host_that_fails_is_tried_again_less_and_less_often() -> None:
    returns, due_s = Returns(), []
    for _ in range(8):
        returns.fail(1000.0)
        due_s.append(returns.due_s - 1000.0)
    assert due_s == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    returns.succeed()
    returns.fail(2000.0)
    assert (returns.taken_in, returns.due_s) == (1, 2001.0)
