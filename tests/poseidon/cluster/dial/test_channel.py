"""The contract of channels, over pipes and over queues: messages arrive whole and in order, and no
blocked end keeps `close` from returning.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest

from poseidon.cluster.dial.channel import (
    MAX_MESSAGE_BYTES,
    MAX_QUEUED,
    Channel,
    QueueChannel,
    StreamChannel,
)

LIMIT_S = 20.0
Pair = tuple[Channel, Channel]


def _pipes() -> Iterator[Pair]:
    (first_in, second_out), (second_in, first_out) = os.pipe(), os.pipe()
    first, second = (
        StreamChannel.of_pipes(first_in, first_out),
        StreamChannel.of_pipes(second_in, second_out),
    )
    with closing(first), closing(second):
        yield first, second
    for inlet in (first_in, second_in):
        os.close(inlet)


def _queues() -> Iterator[Pair]:
    first, second = QueueChannel.pair()
    with closing(first), closing(second):
        yield first, second


@pytest.fixture(params=[_pipes, _queues], ids=["pipes", "queues"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    make: Callable[[], Iterator[Pair]] = request.param
    yield from make()


def _within_limit(work: Callable[[], object]) -> threading.Thread:
    """Run on a thread; return it once it has ended or the limit has passed."""
    thread = threading.Thread(target=work, name="within limit", daemon=True)
    thread.start()
    thread.join(LIMIT_S / 4)
    return thread


def test_messages_pass_both_ways(pair: Pair) -> None:
    first, second = pair
    first.send(b"one\ntwo")
    first.send(b"x" * 30_000)
    second.send(b"")
    assert second.receive() == b"one\ntwo"
    assert second.receive() == b"x" * 30_000
    assert first.receive() == b""


def test_a_message_larger_than_a_pipe_arrives_whole(pair: Pair) -> None:
    first, second = pair
    message = os.urandom(1 << 20)
    sender = threading.Thread(target=first.send, args=(message,), name="sender")
    sender.start()
    assert second.receive() == message
    sender.join(LIMIT_S)


def test_what_was_sent_before_the_end_arrives(pair: Pair) -> None:
    first, second = pair
    first.send(b"last")
    first.close()
    first.close()
    assert [second.receive(), second.receive()] == [b"last", None]
    with pytest.raises(OSError):
        first.send(b"after the end")


def test_the_end_wakes_who_waits_for_a_message(pair: Pair) -> None:
    first, second = pair
    received: list[bytes | None] = []
    waiter = threading.Thread(target=lambda: received.append(second.receive()), name="waiter")
    waiter.start()
    first.close()
    waiter.join(LIMIT_S)
    assert received == [None]


def test_a_blocked_send_does_not_block_close(pair: Pair) -> None:
    first, second = pair
    sent, errors = threading.Semaphore(0), list[OSError]()

    def send() -> None:
        try:
            while True:
                first.send(b"x" * 100_000)
                sent.release()
        except OSError as error:
            errors.append(error)

    sender = threading.Thread(target=send, name="sender")
    sender.start()
    while sent.acquire(timeout=0.5):
        pass  # until it takes no more
    assert sender.is_alive()
    closer = _within_limit(first.close)
    closed = not closer.is_alive()
    while sender.is_alive():  # the rest of the message goes, and the next one meets the end
        with suppress(OSError):
            second.receive()
    sender.join(LIMIT_S)
    closer.join(LIMIT_S)
    assert closed and errors


@pytest.fixture
def stream() -> Iterator[tuple[StreamChannel, int]]:
    """A channel, and the descriptor whose bytes it receives."""
    (inlet, theirs), (unread, outlet) = os.pipe(), os.pipe()
    with closing(StreamChannel.of_pipes(inlet, outlet)) as channel:
        yield channel, theirs
    for descriptor in (inlet, unread):
        os.close(descriptor)
    with suppress(OSError):
        os.close(theirs)


@pytest.mark.parametrize("size", [0, 1, 5, 70_000])
def test_a_message_follows_its_length(stream: tuple[StreamChannel, int], size: int) -> None:
    channel, theirs = stream
    message = b"m" * size
    written = struct.pack(">I", size) + message

    def write_in_pieces() -> None:
        for begin in range(0, len(written), 3001):
            os.write(theirs, written[begin : begin + 3001])

    writer = threading.Thread(target=write_in_pieces, name="writer")
    writer.start()
    assert channel.receive() == message
    writer.join(LIMIT_S)


@pytest.mark.parametrize(
    ("garbage", "shown"),
    [
        (b"Welcome to node1!\n", "Welcome to node1!"),
        (struct.pack(">I", MAX_MESSAGE_BYTES + 1) + b"more", r"\x01\x00\x00\x01more"),
    ],
    ids=["text", "an oversized message"],
)
def test_what_is_no_agent_is_shown(
    stream: tuple[StreamChannel, int], garbage: bytes, shown: str
) -> None:
    channel, theirs = stream
    os.write(theirs, garbage)
    with pytest.raises(OSError) as caught:
        channel.receive()
    assert str(caught.value) == (
        f"what answers there is not an agent of Poseidon: '{shown}'; the files that its shell reads "
        "first (~/.bashrc) must print nothing when SSH runs a command"
    )


def test_the_largest_message_is_legal(stream: tuple[StreamChannel, int]) -> None:
    channel, theirs = stream
    written = memoryview(struct.pack(">I", MAX_MESSAGE_BYTES) + bytes(MAX_MESSAGE_BYTES))

    def write() -> None:
        at = 0
        while at < len(written):
            at += os.write(theirs, written[at:])

    writer = threading.Thread(target=write, name="writer")
    writer.start()
    message = channel.receive()
    writer.join(LIMIT_S)
    assert message is not None and len(message) == MAX_MESSAGE_BYTES


@pytest.mark.parametrize("cut", [b"", b"\x00\x00", struct.pack(">I", 9) + b"half"])
def test_a_message_that_is_cut_off_is_the_end(
    stream: tuple[StreamChannel, int], cut: bytes
) -> None:
    channel, theirs = stream
    os.write(theirs, cut)
    os.close(theirs)
    assert channel.receive() is None


def test_a_closed_channel_writes_to_no_file_that_got_its_number() -> None:
    (inlet, theirs), (other, outlet), (read, write) = os.pipe(), os.pipe(), os.pipe()
    channel = StreamChannel.of_pipes(inlet, outlet)
    channel.close()
    os.dup2(write, outlet)  # as the next file that this process opens
    try:
        with pytest.raises(OSError):
            channel.send(b"after the end")
    finally:
        for descriptor in {inlet, theirs, other, outlet, read, write}:
            os.close(descriptor)


def test_a_stream_that_fails_is_the_end_and_cannot_be_sent_to() -> None:
    def fail(*_: object) -> bytes:
        raise OSError("the network is gone")

    channel = StreamChannel(fail, fail, fail)
    assert channel.receive() is None
    with pytest.raises(OSError, match="the network is gone"):
        channel.send(b"x")
    channel.close()  # never raises


def test_a_queue_can_be_polled_and_waited_for() -> None:
    sent: list[None] = []
    first, second = QueueChannel.pair(lambda: sent.append(None))
    assert second.poll() is None
    assert second.receive(timeout_s=0.0) is None
    assert not first.closed
    first.send(b"one")
    second.send(b"not counted")
    assert (second.poll(), len(sent)) == (b"one", 1)
    second.close()
    assert first.closed and second.closed


def test_the_reader_of_a_full_queue_gets_all_and_then_the_end() -> None:
    first, second = QueueChannel.pair()
    for _ in range(MAX_QUEUED):
        first.send(b"x")
    first.close()
    assert [second.receive() for _ in range(MAX_QUEUED + 1)] == [b"x"] * MAX_QUEUED + [None]
