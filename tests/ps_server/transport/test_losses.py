"""A connection that stood and is gone is noticed; one that never stood is waited for."""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
import time

import pytest
import zmq

from ps_server.errors import PeerLost
from ps_server.keys import JobKeys
from ps_server.transport.losses import LossWatch, is_silent, keep_alive
from ps_server.transport.zmq_sockets import ZmqClientTransport, ZmqServerTransport
from tests.support.transport_contract import send_first

KEYS = JobKeys.new(workers=1, shards=1)
WAIT_S = 60.0


def greet(server: ZmqServerTransport, client: ZmqClientTransport) -> None:
    peer = send_first(server, client, [b"hello"])
    assert server.send(peer, [b"welcome"])
    assert len(client.receive(10)) == 1


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_peer_that_ends_is_lost_at_once(encrypted: bool) -> None:
    server = ZmqServerTransport("tcp://127.0.0.1:0", KEYS.of_shard(0) if encrypted else None)
    client = ZmqClientTransport([server.address], KEYS.of_worker(0) if encrypted else None)
    try:
        greet(server, client)
        assert client.lost == frozenset()
        address = server.address
        server.close()
        with pytest.raises(PeerLost, match=rf"lost the connection to {address}: .* \(shard 0\)"):
            client.receive(10)
        assert client.lost == {0}
    finally:
        client.close()


def test_closing_does_not_wait_for_a_peer_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_server.transport.zmq_sockets.LINGER_MS", 600_000)
    server = ZmqServerTransport("tcp://127.0.0.1:0")
    client = ZmqClientTransport([server.address])
    greet(server, client)
    server.close(drops=True)
    with pytest.raises(PeerLost):
        client.receive(10)
    assert client.send(0, [b"a last word"])  # ZeroMQ keeps it for a peer that comes back
    client.close()


def test_a_peer_that_this_end_is_done_with_may_end() -> None:
    servers = [ZmqServerTransport("tcp://127.0.0.1:0") for _ in range(2)]
    client = ZmqClientTransport([server.address for server in servers])
    try:
        for shard, server in enumerate(servers):
            assert client.send(shard, [b"hello"])
            ((peer, _),) = server.receive(10)
            assert server.send(peer, [b"welcome"])
            ((sender, _),) = client.receive(10)
            assert sender == shard
        client.done_with(0)
        for server in servers:
            server.close()
        with pytest.raises(PeerLost, match=r"\(shard 1\)"):
            client.receive(10)
        assert client.lost == {1}
    finally:
        client.close()


def test_what_came_before_a_loss_is_handed_over_first() -> None:
    server = ZmqServerTransport("tcp://127.0.0.1:0")
    client = ZmqClientTransport([server.address])
    try:
        greet(server, client)
        assert client.send(0, [b"more"])
        ((peer, _),) = server.receive(10)
        assert server.send(peer, [b"last words"])
        server.close()
        ((_, frames),) = client.receive(10)
        assert bytes(frames[0]) == b"last words"
        with pytest.raises(PeerLost):
            client.receive(10)
    finally:
        client.close()


def test_who_is_not_there_yet_is_not_lost() -> None:
    with socket.socket() as place:  # bound and not listening: every attempt to connect fails
        place.bind(("127.0.0.1", 0))
        client = ZmqClientTransport([f"tcp://127.0.0.1:{place.getsockname()[1]}"])
        assert client.receive(0.3) == []
        assert client.lost == frozenset()
        client.close()


def tcp_info(*, retransmits: int = 0, probes: int = 0, last_ack_ms: int = 0) -> bytes:
    return struct.pack("=BBBB52xI4x", 1, 0, retransmits, probes, last_ack_ms)


@pytest.mark.parametrize(
    ("info", "silent"),
    [
        (tcp_info(last_ack_ms=50_000), False),  # nobody has asked
        (tcp_info(retransmits=5, last_ack_ms=9_999), False),
        (tcp_info(retransmits=5, last_ack_ms=10_000), True),
        (tcp_info(probes=1, last_ack_ms=10_000), True),
    ],
)
def test_only_who_owes_an_answer_is_silent(info: bytes, silent: bool) -> None:
    assert len(info) == 64
    assert is_silent(info, 10.0) is silent


def deaf(connection: socket.socket) -> None:
    """Let the kernel drop all that comes for a connection, as if the link were cut."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0), 8)
    connection.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HL", 1, ctypes.addressof(drop_all)))


def carry(source: socket.socket, sink: socket.socket) -> None:
    while data := source.recv(65536):
        sink.sendall(data)


def test_a_link_that_carries_nothing_any_more_is_lost() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for end in (server, client):
        end.setsockopt(zmq.LINGER, 0)
        keep_alive(end)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    watch = LossWatch([client], silence_s=0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        threads = [threading.Thread(target=carry, args=ends) for ends in ((near, far), (far, near))]
        for thread in threads:
            thread.start()
        while not watch._established:
            watch.process()
        watch.check_silence()
        assert watch.lost == set()
        deaf(near)
        client.send(b"is anybody there?")
        deadline = time.monotonic() + WAIT_S
        while not watch.lost and time.monotonic() < deadline:
            watch.check_silence()
        assert watch.lost == {0}
        watch.close()
        for connection in (near, far):
            connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        near.close()
        far.close()
    client.close()
    server.close()
    context.term()
