"""Workers on sockets: factors reach everyone once, strangers reach nobody, and a silent worker is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from poseidon.exchange.factor_session import Factors, FactorSession, FactorTable, Pair, Round
from poseidon.exchange.factor_wire import Join, encode
from poseidon.exchange.peers import Peers
from ps_server import LocalProtocolError, PeerLost, StalenessTimeout
from ps_server.transport.zmq_sockets import ZmqClientTransport

TABLES = (FactorTable(name="fc6", outputs=3, inputs=2),)
TOKEN = b"the job's secret"


def pair(value: float) -> Pair:
    return Pair(np.full((4, 3), value, np.float32), np.full((4, 2), value, np.float32))


@contextmanager
def workers(count: int, timeout_s: float = 20.0) -> Iterator[list[Peers]]:
    peers = [
        Peers(
            FactorSession(rank, count, TABLES),
            listen="tcp://127.0.0.1:0",
            token=TOKEN,
            timeout_s=timeout_s,
        )
        for rank in range(count)
    ]
    for each in peers:
        each.connect([other.address for other in peers])
    try:
        yield peers
    finally:
        for each in peers:
            each.close()


def next_round(peers: Peers) -> Round:
    return peers.wait(lambda: peers.session.take(0), "a round")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_worker_takes_the_same_rounds(count: int) -> None:
    with workers(count) as peers:
        for clock in range(5):
            for rank, each in enumerate(peers):
                each.broadcast(0, pair(10 * clock + rank))
            for each in peers:
                taken = next_round(each)
                assert taken.clock == clock
                assert [float(p.u[0, 0]) for p in taken.pairs] == [10 * clock + r for r in range(count)]
        assert [each.bytes_out for each in peers] == [[5 * 80 * (count - 1)]] * count
        assert [each.bytes_in for each in peers] == [[5 * 80 * (count - 1)]] * count
        assert [each.dropped for each in peers] == [0] * count


def test_what_a_stranger_says_is_dropped_and_changes_nothing() -> None:
    with workers(2) as peers:
        stranger = ZmqClientTransport([peers[0].address])
        factors = encode(Factors(0, 0, pair(666)))
        for frames in (factors, encode(Join(1, b"another secret")), factors, [b"rubbish"]):
            while not stranger.send(0, frames):
                stranger.receive(0.01)
        peers[0].wait(lambda: True if peers[0].dropped == 4 else None, "the stranger was not heard")
        for rank, each in enumerate(peers):
            each.broadcast(0, pair(rank))
        assert [float(p.u[0, 0]) for p in next_round(peers[0]).pairs] == [0, 1]
        stranger.close()


def test_a_worker_that_says_nothing_is_a_timeout_with_its_reason() -> None:
    with workers(2, timeout_s=0.05) as peers:
        peers[0].broadcast(0, pair(1))
        with pytest.raises(StalenessTimeout, match="a round within"):
            next_round(peers[0])


def test_a_failure_reaches_whoever_waits() -> None:
    with workers(1) as peers:
        peers[0].fail(PeerLost("gone"))
        with pytest.raises(PeerLost, match="gone"):
            next_round(peers[0])


def test_a_closed_line_says_so() -> None:
    with workers(1) as peers:
        peers[0].close()
        with pytest.raises(LocalProtocolError, match="closed"):
            peers[0].broadcast(0, pair(1))
