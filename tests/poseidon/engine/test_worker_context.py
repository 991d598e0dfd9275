"""The training loops of one process, as its job sees them."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from poseidon.base.call_names import LoopPosition
from poseidon.engine.memory import StopRequested
from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import described
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeKind
from ps_server.network import Network
from tests.support.module_groups import RecordingJob


def test_a_later_loop_has_no_recorded_plan_and_a_rendezvous_of_its_own() -> None:
    options = replace(DEFAULT_OPTIONS, kind=ExchangeKind.AUTO)
    job = WorkerContext(member=Membership(local_address="/tmp/place", options=options))
    first, second = job.of_next_loop(), job.of_next_loop()
    assert (first.number, first.member) == (0, job.member)
    assert second.number == 1
    assert second.member.options.kind is ExchangeKind.HYBRID
    assert second.member.local_address == "/tmp/place-1"


def test_the_job_sees_the_loops_together() -> None:
    job = RecordingJob()
    context = WorkerContext(job=job)
    first, second = context.of_next_loop(), context.of_next_loop()
    first.report(LoopPosition(steps=3, iterations=4, collections=1))
    second.report(LoopPosition(steps=5, iterations=5, collections=2, collection="mean"))
    assert job.positions[-1] == LoopPosition(
        steps=3, iterations=9, collections=3, collection="mean", loop=1, loops=(4, 5)
    )


@pytest.mark.parametrize("error", [ValueError("odd batch"), SystemExit(0), GeneratorExit()])
def test_after_an_exception_an_exchange_that_closes_does_not_wait_for_ever(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poseidon.engine.worker_context.LEAVE_S", 0.0)
    job, ended = WorkerContext(member=Membership(network=Network())), threading.Event()
    job.member.network.interruption.on_interrupt(lambda _: ended.set())
    with job.closing(error):
        assert ended.wait(50)
    text = f"the script ended while other workers waited for it: {described(error)}"
    assert str(job.member.network.interruption.error) == text


@pytest.mark.parametrize("error", [None, StopRequested(3), ValueError("all workers raise it")])
def test_an_exchange_that_closes_in_time_is_not_interrupted(error: BaseException | None) -> None:
    """All workers raise StopRequested after the same step: it waits for the slowest."""
    job = WorkerContext(member=Membership(network=Network()))
    with job.closing(error):
        waits = [thread.name for thread in threading.enumerate()]
    assert ("leaving-0" in waits) is isinstance(error, ValueError)
    assert job.member.network.interruption.error is None
