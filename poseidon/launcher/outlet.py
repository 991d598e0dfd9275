"""A terminal or a pipe that is written on a thread of its own: one that is paused (Ctrl-S), or whose
reader reads nothing, does not hold the launcher.

Law: text keeps its order. What a terminal cannot take is left out, with a line that says so; the
writer of a pipe waits, unless it is in a hurry: the user has asked the job for something.
"""

from __future__ import annotations

import os
import select
import stat
import threading
from collections.abc import Callable
from typing import Any, TextIO

MOST_HELD = 1 << 20
"""Bytes that wait to be written."""
_LOOK_S = 0.1


def may_wait(stream: TextIO) -> bool:
    """Return whether writing to a stream may take any time: it is a terminal or a pipe."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or of a notebook
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stream.isatty()


class Outlet:
    """The stream.

    Args:
        stream: see `may_wait`. Nobody else writes to it until `close`.
        in_a_hurry: returns whether a writer of a pipe must not wait.
    """

    def __init__(self, stream: TextIO, in_a_hurry: Callable[[], bool]) -> None:
        self._stream = stream
        self._drops = stream.isatty()
        self._in_a_hurry = in_a_hurry
        self._changed = threading.Condition()
        self._waiting = bytearray()
        self._left_out = 0
        self._is_writing = self._is_closed = self._is_given_up = False
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, soon.

        Raises:
            OSError: what was written before could not be.
        """
        encoding, errors = self._stream.encoding or "utf-8", self._stream.errors or "strict"
        self.write_bytes(text.encode(encoding, errors))
        return len(text)

    def write_bytes(self, content: bytes) -> None:
        """Write bytes; see `write`."""
        with self._changed:
            self._check()
            if self._is_closed:
                self._write_now(content)
                return
            while len(self._waiting) >= MOST_HELD and not self._drops and not self._in_a_hurry():
                self._changed.wait(_LOOK_S)
                self._check()
            if len(self._waiting) >= MOST_HELD and self._drops:
                self._left_out += content.count(b"\n")
                return
            self._note_what_is_left_out()
            self._waiting += content
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="poseidon-outlet", daemon=True
                )
                self._thread.start()

    def flush(self) -> None:
        """Do nothing: the thread writes at once."""

    def close(self) -> None:
        """Wait until all is written; what follows is written at once. Ctrl-C ends the waiting: then
        nothing follows. May be called twice.

        Raises:
            OSError: it cannot be written.
        """
        with self._changed:
            if self._is_closed:
                return
            self._note_what_is_left_out()
            try:
                while (self._waiting or self._is_writing) and self._error is None:
                    self._changed.wait(_LOOK_S)
            except KeyboardInterrupt:
                self._is_given_up = True
                raise
            finally:
                self._is_closed = True
                self._changed.notify_all()
            self._check()

    def _note_what_is_left_out(self) -> None:
        if self._left_out:
            lines, self._left_out = self._left_out, 0
            note = (
                f"... {lines:,} lines are left out: the terminal was paused; the logs have them\n"
            )
            self._waiting += note.encode()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_now(self, content: bytes) -> None:
        if not self._is_given_up:
            _write(self._stream.fileno(), content)

    def _run(self) -> None:
        try:
            self._stream.flush()
            descriptor = self._stream.fileno()
            while (content := self._next()) is not None:
                _write(descriptor, content)
        except (OSError, ValueError) as error:
            with self._changed:
                self._error = error if isinstance(error, OSError) else OSError(str(error))
                self._changed.notify_all()

    def _next(self) -> bytes | None:
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            content = bytes(self._waiting)
            self._waiting.clear()
            self._is_writing = True
            return content


def _write(descriptor: int, content: bytes) -> None:
    """Write all of it. Without the locks of a file object: a thread may wait here as Python ends."""
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another program has made the terminal non-blocking
            select.select([], [descriptor], [])
