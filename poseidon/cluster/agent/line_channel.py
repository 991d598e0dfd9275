"""A channel of text lines in both directions, over any transport.

Law: a line is bytes without a line end; a longer one than `MAX_LINE_BYTES` is cut.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import IO, Protocol

MAX_LINE_BYTES = 4 << 20


class LineChannel(Protocol):
    """One end of a channel of lines. One thread sends, one receives, any may close."""

    def send(self, line: bytes) -> None:
        """Send one line. May wait for the other side to read.

        Raises:
            OSError: the channel is broken or closed.
        """

    def receive(self) -> bytes | None:
        """Return the next line; None once the other side has closed, or the channel broke.

        Waits until `close`.
        """

    def close(self) -> None:
        """Close the channel: a `receive` that waits returns. May be called twice; never raises."""


class PipeLineChannel:
    """A line channel over two pipes, such as a process's standard input and output.

    Args:
        inlet: what is read.
        outlet: what is written; nothing may be in its buffer.
    """

    def __init__(self, inlet: IO[bytes], outlet: IO[bytes]) -> None:
        self._inlet = inlet
        self._outlet = outlet
        self._lock = threading.Lock()

    def send(self, line: bytes) -> None:
        """See `LineChannel`."""
        with self._lock:
            rest = memoryview(line + b"\n")
            try:
                while rest:  # past the stream's buffer, whose lock would hold up `close`
                    rest = rest[os.write(self._outlet.fileno(), rest) :]
            except ValueError as error:
                raise OSError("the pipe is closed") from error

    def receive(self) -> bytes | None:
        """See `LineChannel`."""
        try:
            line = self._inlet.readline(MAX_LINE_BYTES)
        except (OSError, ValueError):
            return None
        return line.rstrip(b"\r\n") if line else None

    def close(self) -> None:
        """See `LineChannel`. The other side reads an end of file; our own `receive`
        returns when the other side closes, too.
        """
        with suppress(OSError, ValueError):
            self._outlet.close()
