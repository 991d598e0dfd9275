"""Strangers stay outside, are counted, and cannot stop those who belong to the job."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import zmq

from ps_server.keys import JobKeys, KeyPair, key_bytes
from ps_server.transport.zmq_sockets import ZmqClientTransport, ZmqServerTransport
from tests.support.relay import Relay
from tests.support.transport_contract import send_first

KEYS = JobKeys.new(workers=2, shards=1)
STRANGER = KeyPair.new()
WAIT_S = 20.0
LISTEN = "tcp://127.0.0.1:0"


@pytest.fixture
def shard() -> Iterator[ZmqServerTransport]:
    transport = ZmqServerTransport(LISTEN, KEYS.of_shard(0))
    yield transport
    transport.close()


def plain(address: str) -> zmq.Socket[bytes]:
    return _dealer(address)


def with_a_password(address: str) -> zmq.Socket[bytes]:
    return _dealer(address, {zmq.PLAIN_USERNAME: b"worker", zmq.PLAIN_PASSWORD: b"secret"})


def with_a_key_of_its_own(address: str) -> zmq.Socket[bytes]:
    return _dealer(address, _curve(STRANGER, KEYS.shards[0].public))


def with_the_public_half_of_a_workers_key(address: str) -> zmq.Socket[bytes]:
    options = _curve(STRANGER, KEYS.shards[0].public)
    return _dealer(address, options | {zmq.CURVE_PUBLICKEY: key_bytes(KEYS.workers[0].public)})


def without_knowing_the_shards_key(address: str) -> zmq.Socket[bytes]:
    return _dealer(address, _curve(KEYS.workers[0], STRANGER.public))


def _curve(own: KeyPair, server: str) -> dict[int, bytes]:
    return {
        zmq.CURVE_PUBLICKEY: key_bytes(own.public),
        zmq.CURVE_SECRETKEY: key_bytes(own.secret),
        zmq.CURVE_SERVERKEY: key_bytes(server),
    }


def _dealer(address: str, options: dict[int, bytes] | None = None) -> zmq.Socket[bytes]:
    dealer = zmq.Context().socket(zmq.DEALER)
    for option, value in (options or {}).items():
        dealer.setsockopt(option, value)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(address)
    dealer.send_multipart([b"let me in"], zmq.NOBLOCK)
    return dealer


def _receive_past(shard: ZmqServerTransport) -> list[bytes]:
    """What the shard receives until somebody was refused and a worker, who comes last, was
    heard.
    """
    came: list[bytes] = []
    deadline = time.monotonic() + WAIT_S

    def receive(enough: Callable[[], bool]) -> None:
        while not enough() and time.monotonic() < deadline:
            came.extend(bytes(frames[0]) for _, frames in shard.receive(0.05))

    receive(lambda: shard.refused > 0)
    worker = ZmqClientTransport([shard.address], KEYS.of_worker(1))
    try:
        receive(lambda: worker.send(0, [b"worker"]))
        receive(lambda: bool(came))
    finally:
        worker.close()
    assert shard.refused > 0
    return came


@pytest.mark.parametrize(
    "stranger",
    [
        plain,
        with_a_password,
        with_a_key_of_its_own,
        with_the_public_half_of_a_workers_key,
        without_knowing_the_shards_key,
    ],
)
def test_a_stranger_is_refused_and_counted(
    stranger: Callable[[str], zmq.Socket[bytes]], shard: ZmqServerTransport
) -> None:
    dealer = stranger(shard.address)
    try:
        assert _receive_past(shard) == [b"worker"]
    finally:
        dealer.close()
        dealer.context.term()


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x09" + bytes(53)]
)
def test_what_is_not_zeromq_is_refused_and_counted(said: bytes, shard: ZmqServerTransport) -> None:
    host, _, port = shard.address.removeprefix("tcp://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(said)
        assert _receive_past(shard) == [b"worker"]


def test_a_worker_says_nothing_to_who_only_pretends_to_be_the_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It knows the workers' public keys, and admits them; what it lacks is the shard's secret."""
    monkeypatch.setattr("ps_server.transport.authenticator.HANDSHAKE_MS", 300)
    pretender = ZmqServerTransport(LISTEN, replace(KEYS.of_shard(0), own=STRANGER))
    worker = ZmqClientTransport([pretender.address], KEYS.of_worker(0))
    try:
        worker.send(0, [b"a gradient"])
        deadline = time.monotonic() + WAIT_S
        # it has failed once, and tries again
        while pretender.refused < 2 and time.monotonic() < deadline:
            assert pretender.receive(0.05) == []
        assert pretender.refused >= 2
    finally:
        worker._sockets[0].setsockopt(zmq.LINGER, 0)
        worker.close()
        pretender.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_once_all_have_come_nobody_else_can_even_connect(encrypted: bool) -> None:
    server = ZmqServerTransport(LISTEN, KEYS.of_shard(0) if encrypted else None)
    worker = ZmqClientTransport([server.address], KEYS.of_worker(0) if encrypted else None)
    host, _, port = server.address.removeprefix("tcp://").partition(":")
    try:
        peer = send_first(server, worker, [b"hello"])
        server.admit_no_more()
        server.admit_no_more()
        with pytest.raises(OSError, match="timed out"):
            socket.create_connection((host, int(port)), timeout=0.2)
        assert server.send(peer, [b"welcome"])
        ((_, (said,)),) = worker.receive(WAIT_S)
        assert bytes(said) == b"welcome"
    finally:
        worker.close()
        server.close()


MARK = b"a gradient that nobody else may read"


@pytest.mark.parametrize("encrypted", [False, True])
def test_what_a_wire_sees(encrypted: bool) -> None:
    """In clear it sees everything: the test would notice."""
    server = ZmqServerTransport(LISTEN, KEYS.of_shard(0) if encrypted else None)
    relay = Relay(server.address)
    worker = ZmqClientTransport([relay.address], KEYS.of_worker(0) if encrypted else None)
    try:
        peer = send_first(server, worker, [MARK])
        assert server.send(peer, [MARK[::-1]])
        assert worker.receive(WAIT_S)
        assert (MARK in relay.there, MARK[::-1] in relay.back) == (not encrypted, not encrypted)
    finally:
        worker.close()
        relay.close()
        server.close()


def test_connections_are_counted_while_they_stand() -> None:
    server = ZmqServerTransport(LISTEN)
    workers = [ZmqClientTransport([server.address]) for _ in range(2)]
    try:
        for worker in workers:
            assert worker.send(0, [b"hello"])
        heard: list[object] = []
        while len(heard) < 2:
            heard += server.receive(WAIT_S)
        assert server.connections == 2
        workers.pop().close()
        deadline = time.monotonic() + WAIT_S
        while server.connections == 2 and time.monotonic() < deadline:
            server.receive(0.01)
        assert server.connections == 1
    finally:
        for worker in workers:
            worker.close()
        server.close()
