"""Rounds are complete or not taken; everything out of order is refused and changes nothing."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgpack
import numpy as np
import pytest
import zmq

from poseidon.exchange.factors.factor_rounds import (
    FactorPeers,
    FactorSession,
    FactorTable,
    Pair,
)
from poseidon.exchange.worker_links import LEAVE_MESSAGE, VERSION, join_message
from ps_server import LocalProtocolError, PeerLost, RemoteProtocolError
from ps_server.keys import JobKeys, KeyPair, Keyring
from ps_server.network import Network
from ps_server.protocol.schedule import LinkPriority
from ps_server.transport.zmq_sockets import ZmqClientTransport, ZmqServerTransport
from tests.support.factor_frames import frames_of, pair_of

TABLES = (
    FactorTable(name="fc6", outputs=3, inputs=2),
    FactorTable(name="fc7", outputs=2, inputs=4),
)

STALE = (FactorTable(name="fc6", outputs=3, inputs=2, staleness=2),)


def pair(value: float, table: FactorTable = TABLES[0], rows: int = 1) -> Pair:
    return pair_of(
        np.full((rows, table.outputs), value, np.float32),
        np.full((rows, table.inputs), value, np.float32),
    )


def test_a_round_is_taken_once_every_worker_has_sent_in_worker_order() -> None:
    for order in itertools.permutations(range(3)):
        session = FactorSession(1, 3, TABLES)
        for worker in order:
            assert session.take(0) is None
            if worker == 1:
                assert session.send(0, pair(1)) == 0
            else:
                session.receive(worker, 0, 0, pair(worker))
        taken = session.take(0)
        assert taken is not None
        assert [float(p.u[0, 0]) for p in taken] == [0, 1, 2]
        assert session.take(0) is None


def test_own_pairs_are_known_until_their_round_is_taken() -> None:
    session = FactorSession(0, 2, STALE, start_clock=5)
    session.send(0, pair(1))
    session.send(0, pair(2))
    assert [clock for clock, _ in session.own(0)] == [5, 6]
    assert session.lagging(0) == [1]
    session.receive(1, 0, 5, pair(3))
    assert session.is_ready(0)
    session.take(0)
    assert [clock for clock, _ in session.own(0)] == [6]


def test_what_is_not_the_next_pair_is_refused() -> None:
    session = FactorSession(0, 2, TABLES)
    with pytest.raises(RemoteProtocolError, match="expected 0"):
        session.receive(1, 0, 1, pair(1))
    session.send(0, pair(1))
    session.receive(1, 0, 0, pair(1))
    assert session.is_ready(0)


@pytest.mark.parametrize(("tables", "ahead"), [(TABLES, 1), (STALE, 3)])
def test_nobody_may_be_further_ahead_than_the_bound_lets_him(
    tables: tuple[FactorTable, ...], ahead: int
) -> None:
    session = FactorSession(0, 2, tables)
    for clock in range(ahead):
        session.receive(1, 0, clock, pair(1))
    with pytest.raises(RemoteProtocolError, match="too far ahead"):
        session.receive(1, 0, ahead, pair(1))
    session.send(0, pair(1))
    session.receive(1, 0, ahead, pair(1))


SMALL = (FactorTable(name="fc6", outputs=3, inputs=2),)
TOKEN = b"the job's secret"


def small_pair(value: float) -> Pair:
    return pair_of(np.full((4, 3), value, np.float32), np.full((4, 2), value, np.float32))


@contextmanager
def workers(
    count: int, timeout_s: float = 20.0, *, keys: JobKeys | None = None, late: int | None = None
) -> Iterator[list[FactorPeers]]:
    """Workers who know each other, save for one that may be late: the test connects it."""
    peers = [
        FactorPeers(
            FactorSession(rank, count, SMALL),
            Network(
                rank=rank,
                size=count,
                token=TOKEN,
                keys=keys.of_worker(rank) if keys else None,
                timeout_s=timeout_s,
            ),
        )
        for rank in range(count)
    ]
    for rank, each in enumerate(peers):
        if rank != late:
            each.links.connect([other.links.address for other in peers])
    try:
        yield peers
    finally:
        for each in peers:
            each.links.close()


def next_round(peers: FactorPeers) -> list[Pair]:
    return peers.wait_for(lambda: peers.session.take(0), "a round did not come", table=0)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_worker_takes_the_same_rounds(count: int) -> None:
    with workers(count) as peers:
        for clock in range(5):
            for rank, each in enumerate(peers):
                each.broadcast(0, small_pair(10 * clock + rank))
            for each in peers:
                taken = next_round(each)
                assert [float(p.u[0, 0]) for p in taken] == [10 * clock + r for r in range(count)]
        assert [each.bytes_out for each in peers] == [[5 * 80 * (count - 1)]] * count
        assert [each.bytes_in for each in peers] == [[5 * 80 * (count - 1)]] * count
        assert [each.links.dropped for each in peers] == [0] * count


def test_what_the_next_forward_pass_needs_first_overtakes_what_waits() -> None:
    tables = (
        FactorTable(name="fc6", outputs=3, inputs=2),
        FactorTable(name="fc7", outputs=3, inputs=2),
    )
    heard: list[int] = []

    class Listener(FactorSession):
        def receive(self, sender: int, table: int, clock: int, pair: Pair) -> None:
            heard.append(table)
            super().receive(sender, table, clock, pair)

    speaker = FactorPeers(FactorSession(0, 2, tables), Network(size=2, timeout_s=20.0))
    listener = FactorPeers(Listener(1, 2, tables), Network(rank=1, size=2, timeout_s=20.0))
    for table in (1, 0):  # as a backward pass has them; nothing leaves before the line is there
        speaker.broadcast(table, small_pair(1))
    for each in (speaker, listener):
        each.links.connect([speaker.links.address, listener.links.address])
    listener.wait_for(
        lambda: True if len(heard) == 2 else None, "the factors did not come", table=0
    )
    assert heard == [0, 1]
    for each in (speaker, listener):
        each.links.close()


@pytest.mark.parametrize(
    ("header", "floats"),
    [
        ((0, 0, 1), ()),
        ((0, 0, 1), (4,)),
        ((0, 0, 1), (6,)),
        ((0, 0, 1), (5, 1)),
        ((0, 0, 1), (5, 0, 0)),
        ((0, 0), (5,)),
        ((0, 0, 1, 0), (5,)),
        (("0", 0, 1), (5,)),
        ((0, True, 1), (5,)),
        ((1, 0, 1), (5,)),
        ((-1, 0, 1), (5,)),
        ((0, 1, 1), (5,)),
        ((0, -1, 1), (5,)),
        ((0, 0, -1), (5,)),
        ((0, 0, 2**40), (5,)),
    ],
)
def test_what_is_not_the_next_factors_is_refused(
    header: tuple[object, ...], floats: tuple[int, ...]
) -> None:
    with workers(2) as peers:
        frames = [msgpack.packb([VERSION, "Factors", *header]), *(bytes(4 * n) for n in floats)]
        with pytest.raises(RemoteProtocolError), peers[0].monitor:
            peers[0].peers._receive(1, frames)
        assert peers[0].session.lagging(0) == [0, 1]
        assert peers[0].bytes_in == [0]


def test_what_an_unknown_peer_sends_is_dropped_and_changes_nothing() -> None:
    with workers(2, late=1) as peers:  # while one of the job is still to come, the door is open
        stranger = ZmqClientTransport([peers[0].links.address])
        factors = frames_of(0, 0, small_pair(666))
        for frames in (factors, join_message(1, b"another secret"), factors, [b"rubbish"]):
            while not stranger.send(0, frames):
                stranger.receive(0.01)
        peers[0].wait_for(
            lambda: True if peers[0].links.dropped == 4 else None,
            "the stranger was not heard",
            table=0,
        )
        peers[1].links.connect([each.links.address for each in peers])
        for rank, each in enumerate(peers):
            each.broadcast(0, small_pair(rank))
        assert [float(p.u[0, 0]) for p in next_round(peers[0])] == [0, 1]
        stranger.close()


def test_with_keys_only_those_of_the_job_are_heard() -> None:
    keys = JobKeys.new(workers=3, shards=0)
    with workers(3, keys=keys, late=2) as peers:
        address = peers[0].links.address
        strangers = [
            ZmqClientTransport([address]),
            ZmqClientTransport(
                [address], Keyring(own=KeyPair.new(), expect=(keys.workers[0].public,))
            ),
        ]
        for stranger in strangers:
            stranger.send(0, join_message(2, TOKEN))
        peers[0].wait_for(
            lambda: True if peers[0].links._listening.refused >= 2 else None,
            "the strangers did not knock",
            table=0,
        )
        peers[2].links.connect([each.links.address for each in peers])
        for rank, each in enumerate(peers):
            each.broadcast(0, small_pair(rank))
        for each in peers:
            assert [float(p.u[0, 0]) for p in next_round(each)] == [0, 1, 2]
            assert each.links.dropped == 0
        for stranger in strangers:
            stranger._sockets[0].setsockopt(zmq.LINGER, 0)  # what it has to say is never taken
            stranger.close()


def test_a_failure_and_the_end_reach_whoever_waits() -> None:
    with workers(2) as peers:
        peers[0].links.fail(PeerLost("gone"))
        with pytest.raises(PeerLost, match="gone"):
            next_round(peers[0])
        peers[1].links.close()
        with pytest.raises(LocalProtocolError, match="closed"):
            peers[1].broadcast(0, small_pair(1))


@contextmanager
def one_and_a_stand_in(
    link: LinkPriority | None = None,
) -> Iterator[tuple[FactorPeers, ZmqServerTransport, ZmqClientTransport]]:
    """Worker 0, and the two ends of a worker 1 that does what the test says."""
    session = FactorSession(0, 2, SMALL)
    worker = FactorPeers(session, Network(size=2, token=TOKEN, timeout_s=20.0), link=link)
    ear = ZmqServerTransport("tcp://127.0.0.1:0")
    mouth = ZmqClientTransport([worker.links.address])
    worker.links.connect([worker.links.address, ear.address])
    assert mouth.send(0, join_message(1, TOKEN))
    ((peer, _),) = ear.receive(20.0)
    ear.known(peer)
    try:
        yield worker, ear, mouth
    finally:
        mouth.close()
        worker.links.close()


class Waiting:
    """A second sender of the link of a worker whose pair does not leave before `held` is
    cleared.
    """

    def __init__(self, worker: FactorPeers, link: LinkPriority) -> None:
        self.held, self.woken = threading.Event(), threading.Event()
        self.held.set()
        worker.links._out.end.unsent = lambda peer: int(self.held.is_set())  # type: ignore[method-assign]
        link.when_free(self.woken.set)


@contextmanager
def link_taken() -> Iterator[tuple[FactorPeers, LinkPriority, Waiting, ZmqServerTransport]]:
    """Worker 0 with a pair that stays in its hands."""
    link = LinkPriority()
    with one_and_a_stand_in(link) as (worker, ear, _):
        waiting = Waiting(worker, link)
        worker.broadcast(0, small_pair(1))
        assert ear.receive(20.0)
        assert not link.is_free
        assert not waiting.woken.is_set()
        yield worker, link, waiting, ear


@pytest.mark.parametrize("end", ["all has left", "the worker is lost", "the connection fails"])
def test_the_link_is_taken_until_nothing_more_leaves(end: str) -> None:
    with link_taken() as (worker, link, waiting, ear):
        if end == "all has left":
            waiting.held.clear()
        elif end == "the worker is lost":
            ear.close()
        else:
            worker.links.fail(PeerLost("gone"))
        assert waiting.woken.wait(20)
        assert link.is_free
        if end != "the worker is lost":
            ear.close()


def test_what_a_worker_sent_before_its_goodbye_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.exchange.worker_links.LEAVE_S", 0.0)
    with one_and_a_stand_in() as (worker, ear, mouth):
        worker.broadcast(0, small_pair(0))
        for message in (frames_of(0, 0, small_pair(1)), LEAVE_MESSAGE):
            while not mouth.send(0, message):
                mouth.receive(0.01)
        worker.wait_for(
            lambda: True if worker.links.left == {1} else None, "the goodbye did not come", table=0
        )
        ear.close()
        worker.broadcast(0, small_pair(2))
        deadline = time.monotonic() + 20
        while worker.links._out.boxes[1] and time.monotonic() < deadline:
            worker.links._listening.wake()
        assert not worker.links._out.boxes[1], "the end of the connection was not seen"
        assert [float(p.u[0, 0]) for p in next_round(worker)] == [0, 1]
        worker.monitor.check()
