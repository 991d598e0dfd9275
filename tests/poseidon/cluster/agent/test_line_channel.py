"""Line channels over pipes: lines pass, and no blocked end keeps `close` from returning."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from poseidon.cluster.agent.line_channel import PipeLineChannel

LIMIT_S = 20.0


@pytest.fixture
def pair() -> Iterator[tuple[PipeLineChannel, PipeLineChannel]]:
    pipes = [os.pipe(), os.pipe()]
    files = [(os.fdopen(read, "rb"), os.fdopen(write, "wb")) for read, write in pipes]
    (first_in, second_out), (second_in, first_out) = files
    first, second = PipeLineChannel(first_in, first_out), PipeLineChannel(second_in, second_out)
    yield first, second
    for channel in (first, second):
        channel.close()
    for file in (first_in, second_in):
        file.close()


def test_lines_pass_both_ways(pair: tuple[PipeLineChannel, PipeLineChannel]) -> None:
    first, second = pair
    first.send(b"one")
    first.send(b"x" * 30_000)
    second.send(b"")
    assert [second.receive(), second.receive(), first.receive()] == [b"one", b"x" * 30_000, b""]
    first.close()
    assert second.receive() is None
    with pytest.raises(OSError):
        first.send(b"after the end")


def test_a_blocked_send_does_not_block_close(pair: tuple[PipeLineChannel, PipeLineChannel]) -> None:
    first, second = pair
    errors: list[OSError] = []

    def send() -> None:
        try:
            while True:
                first.send(b"x" * 100_000)
        except OSError as error:
            errors.append(error)

    sender = threading.Thread(target=send, name="sender")
    sender.start()
    sender.join(0.5)  # the pipe is full by now
    assert sender.is_alive()
    closer = threading.Thread(target=first.close, name="closer")
    closer.start()
    closer.join(LIMIT_S / 4)
    closed = not closer.is_alive()
    while sender.is_alive():  # the rest of the line goes, and the next one meets the end
        second.receive()
    sender.join(LIMIT_S)
    closer.join(LIMIT_S)
    assert closed and errors
