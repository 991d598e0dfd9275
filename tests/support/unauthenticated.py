"""Unauthenticated peers at a job's sockets: everything that can be sent without the job's keys,
and the answers.

Law: a peer must be refused; before that it receives only what ZeroMQ sends to everybody who
connects.
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
from poseidon.cluster.agent.messages import REPORTS, Exited, Heartbeat, Join
from poseidon.exchange.worker_links import LEAVE_MESSAGE, join_message
from ps_server import StoreSpec, TableSpec
from ps_server.protocol.frames import encode
from ps_server.transport.authenticator import MECHANISM, USERNAME
from tests.support.factor_frames import frames_of, pair_of
from tests.support.shard_requests import every_request

WAIT_S = 30.0
TOKEN = bytes(32)
GREETING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x01"
"""ZeroMQ's first bytes: signature, version 3.1; a mechanism's name in 20 bytes and 32 more
follow.
"""
GREETING_BYTES = 64
NOISE = bytes(range(256)) * 8

Packet = list[bytes]


def every_request_without_keys() -> list[Packet]:
    """Return every request of every protocol of a job's sockets: shards, factors, rendezvous."""
    ones = np.ones((1, 1), np.float32)
    store = StoreSpec(workers=2, shards=1, tables=(TableSpec(name="w", size=4),))
    sent = [encode(message) for message in every_request(store, TOKEN)]
    sent += [join_message(1, TOKEN), frames_of(0, 0, pair_of(ones, ones)), LEAVE_MESSAGE]
    join = Join(
        version=__version__, rank=1, size=2, local_rank=0, address="127.0.0.1", host="stranger"
    )
    sent += [[REPORTS.encode(report)] for report in (join, Heartbeat(), Exited(id=1, status=0))]
    return [[bytes(frame) for frame in frames] for frames in sent]


def count_refusals(host: str, port: int) -> int:
    """Connect in every manner that needs no key of the job, and check each refusal.

    Return the number of refusals.

    Raises:
        AssertionError: a peer was accepted, answered, or not refused.
    """
    address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    own, other = zmq.curve_keypair(), zmq.curve_keypair()
    keys = {zmq.CURVE_PUBLICKEY: own[0], zmq.CURVE_SECRETKEY: own[1], zmq.CURVE_SERVERKEY: other[0]}
    password = {zmq.PLAIN_USERNAME: USERNAME, zmq.PLAIN_PASSWORD: os.urandom(98)}
    for options in ({}, keys, password):
        _send_requests(address, options)
    for mechanism in (b"NULL", b"CURVE", b"PLAIN"):
        _send_noise((host, port), GREETING + mechanism.ljust(20, b"\0") + bytes(32) + NOISE)
    _send_noise((host, port), b"GET / HTTP/1.1\r\n\r\n" + NOISE)
    return 7


def _send_requests(address: str, options: dict[int, bytes]) -> None:
    """Send over ZeroMQ, until the other side has closed the connection."""
    with _dealer(options) as dealer, dealer.get_monitor_socket() as monitor:
        dealer.connect(address)  # messages sent before the handshake wait for it
        with contextlib.suppress(zmq.Again):  # the other side has refused already
            for packet in every_request_without_keys():
                dealer.send_multipart(packet, zmq.NOBLOCK)
        for event in _events(monitor):
            assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED, (
                f"{address} has accepted an unauthenticated peer"
            )
            if event == zmq.EVENT_DISCONNECTED or event & _FAILED:
                break
        assert dealer.poll(0) == 0, f"{address} has answered an unauthenticated peer"
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
        assert monitor.poll(WAIT_S * 1000), (
            "an unauthenticated peer was neither accepted nor refused"
        )
        yield int(recv_monitor_message(monitor)["event"])


def _send_noise(address: tuple[str, int], sent: bytes) -> None:
    """Send over TCP, until the other side has closed the connection."""
    with socket.create_connection(address, timeout=WAIT_S) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        received = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(4096):
                received += piece
    assert len(received) <= GREETING_BYTES, f"{address} has answered an unauthenticated peer"
    assert _is_greeting(received), f"{address} has sent an unauthenticated peer {received!r}"


def _is_greeting(received: bytes) -> bool:
    """Return True if the bytes begin a ZeroMQ greeting, which does not identify the peer."""
    greeting = GREETING + MECHANISM.ljust(20, b"\0") + b"\x01" + bytes(31)
    return greeting.startswith(received)


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Run the block as another user, as the kernel sees it; only root can."""
    os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(0)
