"""The contract of every transport, as one scenario that each implementation runs."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from itertools import chain

import numpy as np

from ps_server.transport.base import ClientTransport, Frames, ServerTransport

Pair = tuple[ServerTransport, ClientTransport]
WAIT_S = 60.0


def send_first(server: ServerTransport, client: ClientTransport, frames: Frames) -> bytes:
    """Send a client's first message, once both ends have agreed on keys, and return the peer's
    name, which the server's end knows from now on. Both ends are on this thread.
    """
    deadline = time.monotonic() + WAIT_S
    while not client.send(0, frames):
        assert time.monotonic() < deadline, "the ends do not agree on keys"
        assert server.receive(0.01) == []
        client.receive(0.0)
    ((peer, got),) = _server_receive(server, 1)
    assert [bytes(frame) for frame in got] == [bytes(frame) for frame in frames]
    server.known(peer)
    return peer


def _server_receive(server: ServerTransport, count: int) -> list[tuple[bytes, Frames]]:
    got: list[tuple[bytes, Frames]] = []
    while len(got) < count:
        batch = server.receive(WAIT_S)
        assert batch, f"{len(got)} of {count} messages came"
        got.extend(batch)
    return got


def _send_and_receive(
    server: ServerTransport, client: ClientTransport, messages: list[Frames]
) -> list[Frames]:
    """Send all to the server, receiving there whenever the client's end takes no more."""
    got: list[Frames] = []
    for frames in messages:
        while not client.send(0, frames):
            got.extend(frames for _, frames in server.receive(0.0))
            client.receive(0.01)
    got.extend(frames for _, frames in _server_receive(server, len(messages) - len(got)))
    return got


def _answer_and_receive(
    server: ServerTransport, peer: bytes, client: ClientTransport, messages: list[Frames]
) -> list[Frames]:
    """Send all to the client, receiving there whenever the server's end takes no more."""
    got: list[Frames] = []
    for frames in messages:
        while not server.send(peer, frames):
            got.extend(frames for _, frames in client.receive(0.0))
            server.receive(0.01)
    while len(got) < len(messages):
        batch = client.receive(WAIT_S)
        assert batch, f"{len(got)} of {len(messages)} messages came"
        got.extend(frames for _, frames in batch)
    return got


def _check_many_large(server: ServerTransport, peer: bytes, client: ClientTransport) -> None:
    """Check more messages than any queue holds, in both directions: complete and in order, after
    refused sends too.
    """
    large = [np.full(500_000, i, dtype=np.float32) for i in range(30)]
    messages: list[Frames] = [[array.data.cast("B")] for array in large]
    for got in (
        _send_and_receive(server, client, messages),
        _answer_and_receive(server, peer, client, messages),
    ):
        assert all(
            np.array_equal(np.frombuffer(frames[0], dtype=np.float32), array)
            for frames, array in zip(got, large, strict=True)
        )


def check_transport(make: Callable[[], Pair]) -> None:
    """Check order, answers by peer name, several and empty frames, large frames, full queues,
    wake, close; to wake an end that is closed does nothing.
    """
    server, client = make()
    try:
        peer = send_first(server, client, [b"who I am"])
        small = [[b"%d" % i, b"", b"x" * i] for i in range(100)]
        got = _send_and_receive(server, client, small)
        assert [[bytes(frame) for frame in frames] for frames in got] == small
        large = np.arange(1_000_000, dtype=np.float32)
        assert server.send(peer, [b"h", large.data.cast("B")])
        (received,) = client.receive(WAIT_S)
        assert received[0] == 0
        assert np.array_equal(np.frombuffer(received[1][1], dtype=np.float32), large)
        _check_many_large(server, peer, client)
        assert server.send(b"nobody of that name", [b"dropped"])
        assert client.receive(0.0) == []
        client.wake()
        assert client.receive(WAIT_S) == []
        server.wake()
        assert server.receive(WAIT_S) == []
        assert client.send(0, [b"last words"])
        client.close()
        assert bytes(_server_receive(server, 1)[0][1][0]) == b"last words"
    finally:
        server.close()
    numbers = [os.pipe() for _ in range(8)]  # which the two ends may have had
    try:
        client.wake()
        server.wake()
        written, _, _ = select.select([read for read, _ in numbers], [], [], 0)
        assert not written
    finally:
        for number in chain(*numbers):
            os.close(number)
