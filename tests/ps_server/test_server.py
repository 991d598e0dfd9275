"""What a client and a server tell a trace, and the order in which a server sends."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from ps_server import Client, Server, Shard, StoreSpec, TableSpec
from ps_server.network import Network
from ps_server.protocol import messages as m
from ps_server.protocol.frames import decode, encode
from ps_server.trace import Track
from ps_server.transport.base import Frames
from ps_server.transport.zmq_sockets import ZmqServerTransport
from tests.support.cluster import TIMEOUT_S, TOKEN, zeros
from tests.support.memory_transport import MemoryNetwork
from tests.support.tracing import Recorded, Span, nested

ITERATIONS = 3
STORE = StoreSpec(
    workers=1,
    shards=1,
    tables=(TableSpec(name="conv.w", size=6, rows=2), TableSpec(name="fc.w", size=4)),
)


def train(client: Client) -> None:
    for _ in range(ITERATIONS):
        for table, spec in enumerate(STORE.tables):
            client.push(table, np.ones(spec.size, dtype=np.float32), rate=0.1)
        client.clock()
        for table, spec in enumerate(STORE.tables):
            client.read(table, np.empty(spec.size, dtype=np.float32))


def run() -> tuple[Recorded, Recorded]:
    """A job of one worker and one shard; what both were told to trace."""
    network, at_client, at_server = MemoryNetwork(1), Recorded(), Recorded()
    server = Server(Shard(0, 1, TOKEN), network.server(0), trace=at_server)
    thread = threading.Thread(target=server.serve, name="ps-shard")
    thread.start()
    client = Client(
        network.client("worker"),
        Network(token=TOKEN, timeout_s=TIMEOUT_S),
        store=STORE,
        trace=at_client,
    )
    client.start(zeros(STORE))
    train(client)
    client.close()
    thread.join()
    return at_client, at_server


def steps(trace: Recorded, track: Track, name: str) -> list[Span]:
    """The spans of one table and track that belong to an iteration."""
    found = [span for span in trace.spans if span.track is track and span.name == name]
    return [span for span in found if "clock" in span.facts]


def test_every_push_and_value_is_seen_by_its_tables_name() -> None:
    at_client, at_server = run()
    for name, chunks in (("conv.w", 2), ("fc.w", 1)):
        assert len(steps(at_client, Track.SEND, name)) == ITERATIONS * chunks
        assert len(steps(at_server, Track.RECEIVE, name)) == ITERATIONS * chunks
        assert len(steps(at_server, Track.APPLY, name)) == ITERATIONS * chunks
        # One value more: the first.
        assert len(steps(at_server, Track.SEND, name)) == (ITERATIONS + 1) * chunks
        assert len(steps(at_client, Track.RECEIVE, name)) == (ITERATIONS + 1) * chunks
    (push, *_) = steps(at_client, Track.SEND, "conv.w")
    assert push.kind == "send"
    assert push.facts == {"shard": 0, "chunk": 0, "clock": 0, "bytes": 12}
    assert ("receive", "Welcome") in at_client.names()
    assert nested(at_client.spans)
    assert nested(at_server.spans)


def test_the_queue_of_a_shard_is_counted_down_to_nothing() -> None:
    _, at_server = run()
    assert all(name == "queue" for name, _ in at_server.counts)
    assert at_server.counts[-1][1] == {"messages": 0}
    assert max(values["messages"] for _, values in at_server.counts) >= 1


def test_statistics_of_both_ends_agree() -> None:
    network = MemoryNetwork(1)
    server = Server(Shard(0, 1, TOKEN), network.server(0))
    thread = threading.Thread(target=server.serve, name="ps-shard")
    thread.start()
    client = Client(
        network.client("worker"), Network(token=TOKEN, timeout_s=TIMEOUT_S), store=STORE
    )
    client.start(zeros(STORE))
    train(client)
    client.close()
    thread.join()
    at_client, at_server = client.statistics(), server.statistics()
    assert at_client.iterations == ITERATIONS
    sent = sum(table.bytes_out for table in at_client.tables) + at_client.other_bytes_out
    assert at_server.bytes_in == sent
    received = sum(table.bytes_in for table in at_client.tables) + at_client.other_bytes_in
    assert at_server.bytes_out == received
    conv, fc = at_client.tables
    # The payload is known to the byte; a head is some tens of bytes.
    assert 0 < conv.bytes_out - 4 * 6 * ITERATIONS < 2 * 40 * ITERATIONS
    assert 0 < fc.bytes_in - 4 * 4 * ITERATIONS < 40 * ITERATIONS
    assert conv.waited_s > 0
    assert at_server.updates == ITERATIONS * 3
    assert at_server.memory_bytes == 2 * 4 * 10  # values, and one history of momentum each
    assert at_server.longest_queue >= 1
    assert at_server.queue == 0
    assert at_server.busy_s > 0


def test_a_shard_without_a_launcher_goes_when_the_last_worker_has_gone() -> None:
    server = Server(Shard(0, 1, TOKEN), ZmqServerTransport("tcp://127.0.0.1:0"))
    thread = threading.Thread(target=server.serve, name="ps-shard")
    thread.start()
    client = Client([server.address], Network(token=TOKEN, timeout_s=TIMEOUT_S), store=STORE)
    client.start(zeros(STORE))
    server.stop_when_idle(600.0)
    train(client)  # with the launcher gone, workers still have what they need of it
    assert thread.is_alive()
    client.close(leave=False)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


class Turns:
    """A transport that hands a server one batch a turn, and notes what it sends."""

    address, refused, connections = "turns", 0, 1

    def __init__(self, batches: Sequence[Sequence[m.Message]]) -> None:
        self._batches = iter(batches)
        self.sent: list[m.Message] = []
        self.waits: list[float] = []

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        self.waits.append(timeout_s)
        return [(b"worker", encode(message)) for message in next(self._batches)]

    def blocks(self, peer: bytes) -> bool:
        return False

    def send(self, peer: bytes, frames: Frames) -> bool:
        self.sent += [message for message, _ in decode(frames)]
        return True

    def admit_no_more(self) -> None:
        pass

    def known(self, peer: bytes) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self, *, drops: bool = False) -> None:
        pass


def test_a_value_waits_for_no_more_than_a_piece_of_a_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ps_server.protocol.shard.HISTORY_ELEMENTS", 2)
    store = StoreSpec(workers=1, shards=1, tables=(TableSpec(name="w", size=8),))
    ones = np.ones(8, np.float32)
    start = [m.Hello(0, b""), m.Create(store), m.Initial(0, 0, [ones])]
    push = m.Push(0, 0, 0, 1.0, ones)
    transport = Turns([start, [m.GetHistory(0, 0)], [push], [], [], [m.Leave()]])
    Server(Shard(0, 1), transport).serve()
    assert [type(message) for message in transport.sent[2:]] == [
        m.History,
        m.Value,
        *[m.History] * 3,
        m.Leave,
    ]
    pieces = [message for message in transport.sent if isinstance(message, m.History)]
    assert [piece.start for piece in pieces] == [0, 2, 4, 6]
    assert not any(piece.array.any() for piece in pieces)
    assert transport.waits[2:5] == [0.0, 0.0, 0.0]  # it looks for what has come in between
    assert transport.waits[5] > 0
