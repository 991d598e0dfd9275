"""What a process measures for the balance of its job, and when it is collected."""

from __future__ import annotations

import struct
from collections.abc import Container

import pytest
import torch

from poseidon.engine.solver.balancer import FIRST, WARM_UP, Balancer
from poseidon.engine.solver.balancing import Balancing
from poseidon.exchange.job_control import JobControl
from ps_server import Collection, Signal, SignalKind
from ps_server.protocol.virtual_workers import VirtualWorkers

DUE = WARM_UP + FIRST


class TwoProcesses:
    """A delivery that adds the times of another process, which is the slower one."""

    requests: tuple[Signal, ...] = ()

    def __init__(self) -> None:
        self.sent: list[tuple[float, float]] = []
        self.results = 0

    def gather(self, payload: bytes, to: Container[int] | None = None) -> Collection:
        self.sent.append(struct.unpack("<dd", payload))

        def result() -> tuple[bytes, ...]:
            self.results += 1
            return payload, struct.pack("<dd", 12.0, 13.0)

        return Collection(lambda: None, result)

    def request(self, kind: SignalKind) -> None:
        raise AssertionError(kind)


class Clocks:
    """The time of day, and that of all waits, both moved by hand."""

    def __init__(self) -> None:
        self.now_s = self.waited_s = 0.0


def balancing_of(delivery: TwoProcesses, clocks: Clocks) -> Balancing:
    return Balancing(
        Balancer(VirtualWorkers((0, 6, 12)), 0),
        JobControl(delivery, root=True),
        device=torch.device("cpu"),
        waited_s=lambda: clocks.waited_s,
        now_s=lambda: clocks.now_s,
    )


def test_the_mean_of_a_processs_own_time_is_collected_once_and_read_an_iteration_later() -> None:
    delivery, clocks = TwoProcesses(), Clocks()
    balancing = balancing_of(delivery, clocks)
    moves = []
    for iteration in range(DUE + 10):
        clocks.now_s += 100  # a test or a snapshot
        balancing.begin()
        own_s = 1000 if iteration < WARM_UP or iteration >= DUE else 6 + iteration % 2
        clocks.now_s += own_s + 7
        clocks.waited_s += 7
        balancing.end(iteration)
        move = balancing.decide(iteration + 1, last=False)
        if move is not None:
            moves.append((iteration + 1, move.placed.bounds))
    assert delivery.sent == [pytest.approx((6.5, 13.5))]
    assert delivery.results == 1
    assert moves == [(DUE + 1, (0, 8, 12))]


@pytest.mark.parametrize(("ends_at", "sent"), [(DUE, 0), (DUE + 1, 1)])
def test_a_collection_that_is_open_at_the_end_is_read(ends_at: int, sent: int) -> None:
    """A job that is stopped has another iteration in view; the last one measures in vain."""
    delivery = TwoProcesses()
    balancing = balancing_of(delivery, Clocks())
    for iteration in range(min(ends_at, DUE)):
        balancing.begin()
        balancing.end(iteration)
        assert balancing.decide(iteration + 1, last=iteration + 1 == ends_at) is None
    assert (len(delivery.sent), delivery.results) == (sent, 0)
    balancing.finish()
    assert delivery.results == sent
