"""A channel between a launcher and an agent: messages in both directions, each some bytes.

Law: messages arrive whole and in order. What differs between hosts is only how their channel is
opened.
"""

from __future__ import annotations

import math
import os
import queue
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from poseidon.errors import printable

MAX_MESSAGE_BYTES = 16 << 20
MAX_QUEUED = 256
_POLL_S = 0.25
_LENGTH = struct.Struct(">I")


class Channel(Protocol):
    """One end of a channel. One thread sends, one receives, any may close."""

    def send(self, message: bytes) -> None:
        """Send a message. May wait for the other side to receive.

        Raises:
            OSError: the channel is broken or closed.
        """

    def receive(self) -> bytes | None:
        """Return the next message; None once the channel has ended or broken. Waits until then.

        Raises:
            OSError: what came is not a message.
        """

    def close(self) -> None:
        """Close the channel: a `receive` that waits returns. May be called twice; never raises."""


class QueueChannel:
    """A `Channel` over two queues.

    Args:
        inlet: what is received; None ends it.
        outlet: takes what is sent, and None at the end.
        closed: of both ends.
        why: of both ends; takes the reason why it was closed.
        on_send: called after each message that was sent.
    """

    def __init__(
        self,
        inlet: queue.Queue[bytes | None],
        outlet: queue.Queue[bytes | None],
        closed: threading.Event,
        why: list[str],
        on_send: Callable[[], object],
    ) -> None:
        self._inlet = inlet
        self._outlet = outlet
        self._closed = closed
        self._why = why
        self._on_send = on_send

    @classmethod
    def pair(
        cls, on_send: Callable[[], object] = lambda: None
    ) -> tuple[QueueChannel, QueueChannel]:
        """Return the two ends of a channel within this process.

        Args:
            on_send: called after each message that the first end has sent.
        """
        one: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED)
        other: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED)
        closed, why = threading.Event(), list[str]()
        return (
            cls(one, other, closed, why, on_send),
            cls(other, one, closed, why, lambda: None),
        )

    @property
    def closed(self) -> bool:
        """Whether either end has closed it."""
        return self._closed.is_set()

    def send(self, message: bytes) -> None:
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._outlet.put(message, timeout=_POLL_S)
                self._on_send()
                return
        raise OSError("the channel is closed")

    def poll(self) -> bytes | None:
        """Return the next message; None if there is none yet, or the channel has ended."""
        with suppress(queue.Empty):
            return self._inlet.get_nowait()
        return None

    def receive(self, timeout_s: float = math.inf) -> bytes | None:
        """See `Channel`; None also when nothing has come in time."""
        # `close` sets the event before it puts None, so None is missing only behind other messages.
        limit_s = 0.0 if self._closed.is_set() else timeout_s
        message = None
        with suppress(queue.Empty):
            message = self._inlet.get(timeout=None if limit_s == math.inf else limit_s)
            if message is None:
                self._closed.set()
        if message is None and self._why:
            raise OSError(self._why[0])
        return message

    def close(self, why: str = "") -> None:
        """See `Channel`. A `receive` of either end that finds it closed raises the reason."""
        if why:
            self._why.append(why)
        self._closed.set()
        for end in (self._inlet, self._outlet):
            with suppress(queue.Full):  # then its reader finds it closed once it has read the rest
                end.put_nowait(None)


class StreamChannel:
    """A `Channel` over a stream of bytes: each message follows its length, four bytes, big-endian.

    Args:
        read: returns the next bytes, at most as many as asked for, none at the end.
        write: takes all bytes; raises OSError.
        close: closes the stream.
    """

    def __init__(
        self,
        read: Callable[[int], bytes],
        write: Callable[[bytes], object],
        close: Callable[[], object],
    ) -> None:
        self._read = read
        self._write = write
        self._close = close

    @classmethod
    def of_pipes(cls, inlet: int, outlet: int) -> StreamChannel:
        """Return a channel over two descriptors, which it owns."""

        def write(data: bytes) -> None:
            rest = memoryview(data)
            while rest:
                if closed.is_set():  # its number may belong to another file now
                    raise OSError("the channel is closed")
                rest = rest[os.write(outlet, rest) :]

        # Only the other side's end wakes a thread that reads a pipe, so `inlet` stays open.
        closed = threading.Event()

        def close() -> None:
            if not closed.is_set():
                closed.set()
                os.close(outlet)

        return cls(lambda size: os.read(inlet, size), write, close)

    def send(self, message: bytes) -> None:
        self._write(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes | None:
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        size = _LENGTH.unpack(head)[0]
        if size > MAX_MESSAGE_BYTES:
            with suppress(OSError):
                head += self._read(80)
            said = head.decode(errors="backslashreplace").strip()
            raise OSError(
                f"what answers there is not an agent of Poseidon: '{printable(said)}'; the files that "
                "its shell reads first (~/.bashrc) must print nothing when SSH runs a command"
            )
        return self._exactly(size)

    def close(self) -> None:
        with suppress(OSError):
            self._close()

    def _exactly(self, size: int) -> bytes | None:
        """Return so many bytes; None at an end before them."""
        pieces: list[bytes] = []
        while size:
            try:
                piece = self._read(min(size, 1 << 18))
            except OSError:
                return None
            if not piece:
                return None
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)
