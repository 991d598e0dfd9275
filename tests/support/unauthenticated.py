"""Whoever is not of a job, at a socket where it listens: all that can be said there without its keys, and what comes back.

Law: a stranger is content only when it was refused; what it hears before is what ZeroMQ tells everybody who connects.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from poseidon import __version__
from poseidon.cluster.rendezvous import wire as meeting
from poseidon.exchange.factors import wire as factors
from poseidon.exchange.factors.session import Factors, Pair
from ps_server import StoreSpec, TableSpec
from ps_server.protocol.wire import encode
from tests.support.shard_requests import every_request

WAIT_S = 30.0
TOKEN = bytes(32)
GREETING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x01"
"""ZeroMQ's first bytes: signature, version 3.1; a mechanism's name in 20 bytes and 32 more follow."""
GREETING_BYTES = 64
NOISE = bytes(range(256)) * 8

Packet = list[bytes]


def everything() -> list[Packet]:
    """Every request of every protocol of a job's sockets: of shards, of lines of factors, of meetings of tasks."""
    ones = np.ones((1, 1), np.float32)
    store = StoreSpec(workers=2, shards=1, tables=(TableSpec(name="w", size=4),))
    said = [encode(message) for message in every_request(store, TOKEN)]
    to_peers = (factors.Join(1, TOKEN), Factors(0, 0, Pair(ones, ones)), factors.Leave())
    said += [factors.encode(message) for message in to_peers]
    arrival = meeting.TaskInfo(
        version=__version__, rank=1, size=2, local_rank=0, address="127.0.0.1", host="stranger"
    )
    others = [
        meeting.Message(kind=kind, program=1, arguments=("true",), payload=b"x")
        for kind in meeting.Kind
        if kind is not meeting.Kind.JOIN
    ]
    said += [meeting.encode(message) for message in (arrival.message(), *others)]
    return [[bytes(frame) for frame in frames] for frames in said]


def turned_away(host: str, port: int) -> int:
    """Come in every manner that needs no key of the job, and be refused each time; returns how often that was.

    Raises:
        AssertionError: a stranger was let in, told something, or not refused.
    """
    address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    own, other = zmq.curve_keypair(), zmq.curve_keypair()
    keys = {zmq.CURVE_PUBLICKEY: own[0], zmq.CURVE_SECRETKEY: own[1], zmq.CURVE_SERVERKEY: other[0]}
    for options in ({}, keys):
        _says_everything(address, options)
    for mechanism in (b"NULL", b"CURVE"):
        _sends_noise((host, port), GREETING + mechanism.ljust(20, b"\0") + bytes(32) + NOISE)
    _sends_noise((host, port), b"GET / HTTP/1.1\r\n\r\n" + NOISE)
    return 5


def _says_everything(address: str, options: dict[int, bytes]) -> None:
    """Over ZeroMQ, until the other side has cut the connection."""
    with _dealer(options) as dealer, dealer.get_monitor_socket() as monitor:
        dealer.connect(address)  # what is said before the handshake waits for it
        for packet in everything():
            dealer.send_multipart(packet, zmq.NOBLOCK)
        for event in _events(monitor):
            assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED, f"{address} has let a stranger in"
            if event == zmq.EVENT_DISCONNECTED or event & _FAILED:
                break
        assert dealer.poll(0) == 0, f"{address} has told a stranger something"
        dealer.disable_monitor()


_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@contextlib.contextmanager
def _dealer(options: dict[int, bytes]) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        for option, value in {zmq.LINGER: 0, zmq.SNDHWM: 0, zmq.IPV6: 1, **options}.items():
            dealer.setsockopt(option, value)
        yield dealer


def _events(monitor: zmq.Socket[bytes]) -> Iterator[int]:
    while True:
        assert monitor.poll(WAIT_S * 1000), "a stranger was neither let in nor refused"
        yield int(recv_monitor_message(monitor)["event"])


def _sends_noise(place: tuple[str, int], said: bytes) -> None:
    """Over TCP, until the other side has cut the connection."""
    with socket.create_connection(place, timeout=WAIT_S) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(said)
        heard = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(4096):
                heard += piece
    assert len(heard) <= GREETING_BYTES, f"{place} has told a stranger something"
    assert _fits(heard), f"{place} has told a stranger {heard!r}"


def _fits(heard: bytes) -> bool:
    """Whether it is the beginning of a greeting: of whom, says nothing."""
    says_nothing = GREETING + b"CURVE".ljust(20, b"\0") + b"\x01" + bytes(31)
    return says_nothing.startswith(heard)


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """As somebody else, for what the kernel lets a process do and notes of a socket; only root can."""
    os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(0)
