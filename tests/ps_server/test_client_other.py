"""A client written from `docs/internals/wire_protocol.md` alone, with ZeroMQ and msgpack, trains
on a shard.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import msgpack
import pytest
import zmq

from ps_server import Server, Shard, ZmqServerTransport
from tests.support.cluster import TIMEOUT_S, TOKEN

VERSION = 4
HELLO, CREATE, INITIAL, PUSH, CLOCK, LEAVE = 1, 2, 4, 5, 8, 15
WELCOME, VALUE, FRESH, FAULT = 21, 23, 26, 30
RULE = ["SGD", 0.0, 0.999, 1e-8, 0.99, 0.0, "L2", 1.0, 0.0, False, None]
TABLE = ["w", 3, 0, 0, RULE, "gradients", None, [], 0, "float32", 0]
STORE = [1, 1, [TABLE], "SSPPush", None, 1.0, 0, [], 12, [], "float32", False, None, 0, 0.0, []]


class Peer:
    def __init__(self, address: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)

    def send(self, kind: int, *fields: object, frames: tuple[bytes, ...] = ()) -> None:
        self.socket.send_multipart([msgpack.packb([VERSION, kind, len(frames), *fields]), *frames])

    def receive(self) -> list[tuple[int, list[Any], list[bytes]]]:
        assert self.socket.poll(TIMEOUT_S * 1000), "the shard did not answer"
        packet = self.socket.recv_multipart()
        found = []
        while packet:
            version, kind, count, *fields = msgpack.unpackb(packet[0])
            assert version == VERSION
            found.append((kind, fields, packet[1 : 1 + count]))
            packet = packet[1 + count :]
        return found

    def until(self, wanted: int) -> tuple[list[Any], list[bytes]]:
        while True:
            for kind, fields, frames in self.receive():
                if kind == wanted:
                    return fields, frames
                assert kind in (WELCOME, VALUE, FRESH), (kind, fields)


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


@pytest.fixture
def peer():  # type: ignore[no-untyped-def]
    server = Server(Shard(0, 1, TOKEN), ZmqServerTransport("tcp://127.0.0.1:0"))
    thread = threading.Thread(target=server.serve, name="ps-shard")
    thread.start()
    made = Peer(server.address)
    try:
        made.send(HELLO, 0, TOKEN)
        made.send(CREATE, msgpack.packb(STORE))
        yield made
    finally:
        made.socket.close()
        server.stop()
        thread.join()


def test_a_job_of_one_worker(peer: Peer) -> None:
    peer.send(INITIAL, 0, 0, "float32", frames=(floats(1, 2, 3),))
    assert peer.until(VALUE) == ([0, 0, 0, 0, "float32"], [floats(1, 2, 3)])
    peer.send(PUSH, 0, 0, 0, 0.5, 1, "float32", frames=(floats(2, 0, -2),))
    peer.send(CLOCK, 1)
    assert peer.until(VALUE) == ([0, 0, 1, 1, "float32"], [floats(0, 2, 4)])
    peer.send(LEAVE)
    peer.until(LEAVE)


def test_a_whole_number_in_place_of_a_float_is_refused(peer: Peer) -> None:
    peer.send(INITIAL, 0, 0, "float32", frames=(floats(1, 2, 3),))
    peer.until(VALUE)
    peer.send(PUSH, 0, 0, 0, 1, 1, "float32", frames=(floats(2, 0, -2),))
    (reason,), _ = peer.until(FAULT)
    assert (
        "a Push has the fields int, int, int, int, int, str; expected int, int, int, float,"
        in reason
    )
