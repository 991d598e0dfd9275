"""The training loops of one process, as its job sees them."""

from __future__ import annotations

from dataclasses import replace

from poseidon.engine.session import LoopPosition
from poseidon.engine.worker_context import WorkerContext
from poseidon.exchange.kinds import ExchangeKind, Scheme
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import DEFAULT_OPTIONS


def test_a_later_loop_has_no_recorded_plan_and_a_rendezvous_of_its_own() -> None:
    options = replace(DEFAULT_OPTIONS, kind=ExchangeKind.AUTO)
    job = WorkerContext(
        member=Membership(local_address="/tmp/place", options=options),
        schemes=lambda names: [Scheme.FACTORS] * len(names),
    )
    first, second = job.of_next_loop(), job.of_next_loop()
    assert (first.number, first.member, list(first.schemes(["w"]))) == (
        0,
        job.member,
        [Scheme.FACTORS],
    )
    assert second.number == 1
    assert second.member.options.kind is ExchangeKind.HYBRID
    assert second.member.local_address == "/tmp/place-1"
    assert not second.schemes(["w"])


def test_the_job_sees_the_loops_together() -> None:
    seen: list[LoopPosition] = []
    job = WorkerContext(on_progress=seen.append)
    first, second = job.of_next_loop(), job.of_next_loop()
    first.on_progress(LoopPosition(steps=3, iterations=4, collections=1))
    second.on_progress(LoopPosition(steps=5, iterations=5, collections=2, collection="mean"))
    assert seen[-1] == LoopPosition(steps=3, iterations=9, collections=3, collection="mean")
