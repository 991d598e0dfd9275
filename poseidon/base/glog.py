"""Logging in glog's format, on the standard library's `logging`.

    I1126 20:40:16.731869 29444 solver.cpp:294] Iteration 100, loss: 1.64066, time: 141.762

A line has the letter of the severity, month and day, the time, the thread id, and the source
location. A record can carry the location of Caffe's own line (`extra=at("solver.cpp", 294)`), which
log parsers look for; other records carry their Python file.

Law: modules log to `logging.getLogger(__name__)`, never to a stream. Only `setup` chooses the
outputs.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from poseidon.base.text_files import visible, visible_line

LOGGER = logging.getLogger("poseidon.base.glog")
_LETTERS = {logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}
_LOCATION = "glog_location"
# The loggers of all modules are below these two.
_ROOTS = ("poseidon", "ps_server")


def at(file: str, line: int) -> dict[str, tuple[str, int]]:
    """Return the `extra` of a record that carries a line of Caffe's source.

    Args:
        file: a file name without folders, `solver.cpp`.
    """
    return {_LOCATION: (file, line)}


class GlogFormatter(logging.Formatter):
    """A formatter for glog's line format (`src/logging.cc`, LogMessage::Init)."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line without a line end; a traceback follows on separate lines."""
        file, line = getattr(record, _LOCATION, (record.filename, record.lineno))
        # The thread that logs also formats, so this is the kernel's thread id, as in glog.
        head = glog_head(
            record.levelno,
            datetime.fromtimestamp(record.created),
            threading.get_native_id(),
            file,
            line,
        )
        text = head + visible_line(record.getMessage())
        if record.exc_info:
            text += "\n" + visible(self.formatException(record.exc_info))
        return text


def glog_head(level: int, time: datetime, thread: int, file: str, line: int) -> str:
    """Return the start of a line, before the text: `I1126 20:40:16.731869 29444 solver.cpp:294] `.

    Args:
        level: a level of `logging`; glog has no debug level, so that counts as information.
        time: local time.
        thread: id of the thread, padded to five characters.
        file: name of the source file.
    """
    return f"{_LETTERS.get(level, 'I')}{time:%m%d %H:%M:%S.%f} {thread:>5} {file}:{line}] "


class _LogStream(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 has none
    """A stream whose write errors, as of a terminal that has gone, end nothing."""

    def handleError(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _LogFile(logging.FileHandler):
    """A log file whose write errors, such as a full disk, are reported once in the other outputs
    and end nothing.
    """

    _reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            message = "the log %s cannot be written: %s; the job continues without it"
            LOGGER.warning(message, self.baseFilename, error.strerror or error)

    def move(self, file: Path) -> None:
        """Append to a different file from now on."""
        with self.lock or contextlib.nullcontext():
            self.close()
            self.baseFilename = str(file.absolute())

    def close(self) -> None:
        """See `logging.Handler`. A write error was reported before."""
        with contextlib.suppress(OSError):
            super().close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOutputs:
    """The outputs that `setup` opened; `close` (or leaving the `with`) detaches them."""

    handlers: tuple[logging.Handler, ...]

    def close(self) -> None:
        """Flush and detach the outputs. A second call does nothing."""
        for handler in self.handlers:
            for name in _ROOTS:
                logger = logging.getLogger(name)
                logger.removeHandler(handler)
                logger.propagate = not logger.handlers
            handler.close()

    def __enter__(self) -> LogOutputs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def setup(
    *, stream: TextIO | None = None, file: Path | None = None, level: int = logging.INFO
) -> LogOutputs:
    """Send the log of Poseidon and its server to a stream, a file, or both. Return the open
    outputs, to be closed by the caller.

    Args:
        stream: usually standard error; each line is written at once.
        file: appended to; its folder is made.
        level: the lowest level that is written.

    Raises:
        OSError: the file cannot be opened.
    """
    handlers: list[logging.Handler] = []
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(_LogFile(file, encoding="utf-8", errors="backslashreplace"))
    if stream is not None:
        handlers.append(_LogStream(stream))
    for handler in handlers:
        handler.setFormatter(GlogFormatter())
        handler.setLevel(level)
        for name in _ROOTS:
            logger = logging.getLogger(name)
            logger.addHandler(handler)
            logger.propagate = False  # else a script's own handlers write each line once more
    for name in _ROOTS:
        logging.getLogger(name).setLevel(level)
    return LogOutputs(handlers=tuple(handlers))


def move_file(file: Path) -> None:
    """Append to a different file from now on, in the process's output to a file, if there is one."""
    for handler in logging.getLogger(_ROOTS[0]).handlers:
        if isinstance(handler, _LogFile):
            handler.move(file)
