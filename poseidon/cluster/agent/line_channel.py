"""A line to another machine: text lines both ways, over whatever carries them.

Law: a line is bytes without a line end in it; what is longer than `LONGEST_LINE_BYTES` is no line of ours.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import IO, Protocol

LONGEST_LINE_BYTES = 4 << 20


class LineChannel(Protocol):
    """Both ends of a talk in lines have one. One thread sends, one receives, any may close."""

    def send(self, line: bytes) -> None:
        """Send one line. May wait for the other side to read.

        Raises:
            OSError: the line is gone.
        """

    def receive(self) -> bytes | None:
        """The next line; None once the other side has ended, or the line broke."""

    def close(self) -> None:
        """End the talk: a `receive` that waits returns. May be called twice."""


class PipeLines:
    """A talk over two pipes, such as a process's standard input and output.

    Args:
        inlet: what is read.
        outlet: what is written.
    """

    def __init__(self, inlet: IO[bytes], outlet: IO[bytes]) -> None:
        self._inlet = inlet
        self._outlet = outlet
        self._lock = threading.Lock()

    def send(self, line: bytes) -> None:
        """See `LineChannel`."""
        with self._lock:
            try:
                self._outlet.write(line + b"\n")
                self._outlet.flush()
            except ValueError as error:
                raise OSError("the pipe is closed") from error

    def receive(self) -> bytes | None:
        """See `LineChannel`."""
        try:
            line = self._inlet.readline(LONGEST_LINE_BYTES)
        except (OSError, ValueError):
            return None
        return line.rstrip(b"\r\n") if line else None

    def close(self) -> None:
        """See `LineChannel`. The other side reads an end; our own `receive` returns when it answers with one."""
        with suppress(OSError, ValueError):
            self._outlet.close()
