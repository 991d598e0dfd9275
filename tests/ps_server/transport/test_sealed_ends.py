"""Real connections with an attacker in the middle."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ps_server.errors import PeerLost
from ps_server.keys import JobKeys
from ps_server.transport import sealed_ends
from ps_server.transport.sealing import LARGE_BYTES
from ps_server.transport.zmq_sockets import ZmqClientTransport, ZmqServerTransport
from tests.support.relay import Relay
from tests.support.tampering import GREETING_BYTES, Change, Message, TamperingRelay, unchanged
from tests.support.transport_contract import send_first

KEYS = JobKeys.new(workers=2, shards=1)
WAIT_S = 20.0
LISTEN = "tcp://127.0.0.1:0"
WELCOME = b"\x04\x08\x07WELCOME"
"""How ZeroMQ answers a first message that is admitted."""
LARGE = bytes(LARGE_BYTES)
HANDSHAKE, PROOF, HELLO, FIRST, SECOND = range(5)
"""Numbers of messages to the shard. From it, the first is the handshake's."""


class FlippingRelay(Relay):
    """Changes one byte of what comes from the target."""

    def __init__(self, target: str, place: int) -> None:
        self._place = place
        super().__init__(target)

    def _pass(self, source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        with suppress(OSError):
            while piece := bytearray(source.recv(1 << 16)):
                place = self._place - len(kept)
                if kept is self.back and 0 <= place < len(piece):
                    piece[place] ^= 1
                kept += piece
                target.sendall(piece)


class Line:
    """A shard, a worker, and a relay between them."""

    def __init__(
        self, there: Change = unchanged, back: Change = unchanged, *, tracked: bool = False
    ) -> None:
        self.shard = ZmqServerTransport(LISTEN, KEYS.of_shard(0))
        self.relay = TamperingRelay(self.shard.address, there, back)
        self.worker = ZmqClientTransport([self.relay.address], KEYS.of_worker(0), tracked=tracked)
        self.peer = send_first(self.shard, self.worker, [b"hello"])

    def send(self, *messages: bytes) -> list[bytes]:
        """Send to the shard, and return what comes, until the last message or a loss."""
        for message in messages:
            assert self.worker.send(0, [b"header", LARGE, message])
        came: list[bytes] = []
        deadline = time.monotonic() + WAIT_S
        with suppress(PeerLost):
            while messages[-1] not in came and time.monotonic() < deadline:
                for _, frames in self.shard.receive(0.01):
                    assert [bytes(frame) for frame in frames[:2]] == [b"header", LARGE]
                    came.append(bytes(frames[2]))
                self.worker.receive(0.0)
        return came

    def answer(self, *messages: bytes) -> list[bytes]:
        """Send to the worker, and return what comes, until the last message or a loss."""
        for message in messages:
            assert self.shard.send(self.peer, [b"header", LARGE, message])
        came: list[bytes] = []
        deadline = time.monotonic() + WAIT_S
        with suppress(PeerLost):
            while messages[-1] not in came and time.monotonic() < deadline:
                came += [bytes(frames[2]) for _, frames in self.worker.receive(0.1)]
        return came

    def close(self) -> None:
        self.worker.close()
        self.relay.close()
        self.shard.close()


@contextmanager
def line(
    there: Change = unchanged, back: Change = unchanged, *, tracked: bool = False
) -> Iterator[Line]:
    made = Line(there, back, tracked=tracked)
    try:
        yield made
    finally:
        made.close()


def flip(part: int) -> Callable[[Message], list[Message]]:
    def change(message: Message) -> list[Message]:
        changed = bytearray(message[part])
        changed[-1] ^= 1
        message[part] = bytes(changed)
        return [message]

    return change


def at(number: int, change: Callable[[Message], list[Message]]) -> Change:
    """Change one message of a direction."""
    return lambda n, message: change(message) if n == number else [message]


ADDED: dict[str, Callable[[Message], list[Message]]] = {
    "repeated": lambda message: [message, message],
    "rubbish before it": lambda message: [[b""], [b"rubbish"], [bytes(8), bytes(16)], message],
    "numbers of packets to come": lambda message: [[b"\xff" * 8, *message[1:]], message],
    "a copy without its end before it": lambda message: [message[:-1], message],
    "a copy with one more part before it": lambda message: [[*message, b""], message],
    "a copy with a changed byte before it": lambda message: [*flip(1)(list(message)), message],
}
TAKEN_OUT: dict[str, Callable[[Message], list[Message]]] = {
    "taken out": lambda _: [],
    "cut off": lambda message: [message[:-1]],
    "its number changed": flip(0),
    "its large frame changed": flip(1),
    "its lead changed": flip(2),
    "its parts swapped": lambda message: [[message[0], message[2], message[1]]],
}


@pytest.mark.parametrize("change", ADDED.values(), ids=ADDED)
def test_what_an_attacker_adds_is_dropped_and_stops_nothing(
    change: Callable[[Message], list[Message]],
) -> None:
    with line(at(FIRST, change), at(1, change)) as made:
        assert made.shard.refused == 0
        assert made.send(b"first", b"second") == [b"first", b"second"]
        assert made.shard.refused > 0
        assert made.answer(b"one", b"two") == [b"one", b"two"]


@pytest.mark.parametrize("change", TAKEN_OUT.values(), ids=TAKEN_OUT)
def test_what_an_attacker_takes_out_ends_the_connection(
    change: Callable[[Message], list[Message]],
) -> None:
    with line(at(FIRST, change)) as made:
        assert made.send(b"first", b"second") == []
        assert made.shard.refused > 0
        with pytest.raises(PeerLost, match="the network has failed"):
            made.worker.receive(WAIT_S)
    with line(back=at(1, change)) as made:
        assert made.answer(b"one", b"two") == []
        with pytest.raises(PeerLost, match="the network has failed"):
            made.worker.receive(WAIT_S)


@pytest.mark.parametrize("change", [flip(0), flip(1), flip(2)], ids=["number", "frame", "lead"])
def test_a_changed_packet_that_nothing_follows_is_a_loss(
    change: Callable[[Message], list[Message]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_server.transport.zmq_sockets.CHECK_S", 0.01)
    for there, back in ((at(FIRST, change), unchanged), (unchanged, at(1, change))):
        with line(there, back) as made:
            assert made.worker.send(0, [b"header", LARGE, b"a push"])
            assert made.shard.send(made.peer, [b"header", LARGE, b"an answer"])
            deadline = time.monotonic() + WAIT_S
            with pytest.raises(PeerLost, match="the network has failed"):
                while time.monotonic() < deadline:
                    made.shard.receive(0.01)
                    made.worker.receive(0.01)


def test_an_end_that_only_sends_hears_that_packets_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ps_server.transport.zmq_sockets.CHECK_S", 0.01)
    with line(at(FIRST, flip(2)), tracked=True) as made:
        assert made.worker.send(0, [b"header", LARGE, b"a push"])
        deadline = time.monotonic() + WAIT_S
        while not made.worker.lost and time.monotonic() < deadline:
            made.shard.receive(0.01)
        assert made.worker.lost == {0}


def test_reflected_and_spliced() -> None:
    """What the shard has said, and what another connection has carried, is not from this worker."""
    other: list[Message] = []

    def record(number: int, message: Message) -> list[Message]:
        other.append(message)
        return [message]

    with line(record, record) as first:
        first.send(b"first")
        first.answer(b"one")
    assert len(other) == 6
    assert len({message[-1] for message in other}) == 6
    with line(at(FIRST, lambda message: [*other, message])) as made:
        assert made.send(b"first", b"second") == [b"first", b"second"]
        assert made.shard.refused == len(other)


def receive_until(shard: ZmqServerTransport, *, refused: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while shard.refused < refused and time.monotonic() < deadline:
        assert shard.receive(0.05) == []
    assert shard.refused == refused


def test_what_was_heard_opens_no_door_after_a_restart_with_the_same_keys() -> None:
    with line() as before:
        assert before.send(b"first") == [b"first"]
        address = before.shard.address
    assert b"header" not in before.relay.there
    shard = ZmqServerTransport(address, KEYS.of_shard(0))
    host, _, port = address.removeprefix("tcp://").partition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as attacker:
            heard = bytes(before.relay.there)
            hello = GREETING_BYTES + 2 + heard[GREETING_BYTES + 1]
            attacker.sendall(heard[:hello])
            receive_until(shard, refused=2)
            answered = 0
            while answered < GREETING_BYTES + len(WELCOME):
                answered += len(attacker.recv(1))
            attacker.sendall(heard[hello:])
            receive_until(shard, refused=4)  # a session without proof, and each packet
            worker = ZmqClientTransport([address], KEYS.of_worker(1))
            try:
                send_first(shard, worker, [b"hello"])
            finally:
                worker.close()
    finally:
        shard.close()


def test_a_worker_that_connects_again_uses_other_keys() -> None:
    """The same frames, sealed with the same long-term keys and numbers, look different."""
    heard: list[bytes] = []
    for _ in range(2):
        with line() as made:
            made.send(b"first")
            heard.append(bytes(made.relay.there[-LARGE_BYTES:]))
    assert heard[0] != heard[1]


@pytest.mark.parametrize("place", [24, GREETING_BYTES + 8])
def test_a_damaged_greeting_is_a_loss(place: int) -> None:
    """ZeroMQ would not connect again, and the worker wait for ever."""
    shard = ZmqServerTransport(LISTEN, KEYS.of_shard(0))
    relay = FlippingRelay(shard.address, place)
    worker = ZmqClientTransport([relay.address], KEYS.of_worker(0))
    deadline = time.monotonic() + WAIT_S
    try:
        with pytest.raises(PeerLost, match="shard 0"):
            while time.monotonic() < deadline:
                assert not shard.receive(0.01)
                assert not worker.receive(0.01)
    finally:
        worker.close()
        relay.close()
        shard.close()


def test_a_changed_handshake_leads_to_no_connection() -> None:
    shard = ZmqServerTransport(LISTEN, KEYS.of_shard(0))
    changed: list[Message] = []

    def change(number: int, message: Message) -> list[Message]:
        changed.extend(flip(0)(message))
        return changed

    relay = TamperingRelay(shard.address, back=change)
    worker = ZmqClientTransport([relay.address], KEYS.of_worker(0))
    try:
        deadline = time.monotonic() + WAIT_S
        while not changed and time.monotonic() < deadline:
            assert shard.receive(0.01) == []
        with pytest.raises(PeerLost, match="shard 0"):
            worker.receive(WAIT_S)
        assert not worker.send(0, [b"a gradient"])
        assert shard.refused == 1
    finally:
        worker.close()
        relay.close()
        shard.close()


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("processor : 0\nflags\t\t: fpu aes sse\n", True),
        ("Features\t: fp asimd aes pmull\n", True),
        ("flags\t\t: fpu vaes\n", False),
        ("", False),
        (None, False),
    ],
)
def test_processors(
    text: str | None, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "cpuinfo"
    if text is not None:
        place.write_text(text)
    monkeypatch.setattr(sealed_ends, "_CPU_INFO", place)
    assert sealed_ends.has_aes.__wrapped__() is has
