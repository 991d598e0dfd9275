"""What a script prints: it goes to its launcher as it is, and to the worker's log line by line.

Law: a script is not ended by its output. A full disk costs lines of the log and one warning. After the
launcher has gone, the output is in the log alone.
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from poseidon.base.text_files import LineAssembler, OutputLine
from poseidon.engine.document import Prints

LOGGER = logging.getLogger(__name__)


class ScriptLog:
    """The worker's log, to which the script's lines are added."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._warned = False

    def fileno(self) -> int:
        """Return the descriptor, for the output of processes that a script starts."""
        return self._file.fileno()

    def add(self, lines: Sequence[OutputLine]) -> None:
        """Add lines; of one that was redrawn, the last state. The log stays UTF-8.

        Lines of a thread that outlives its script are dropped.
        """
        if not lines or self._file.closed:
            return
        text = "".join(f"{line.text}\n" for line in lines)
        try:
            self._file.write(text.encode("utf-8", errors="backslashreplace"))
        except OSError as error:
            if not self._warned:
                self._warned = True
                why = error.strerror or error
                LOGGER.warning(
                    "the script's output cannot be written to its log: %s; the job continues "
                    "without it",
                    why,
                )

    def close(self) -> None:
        with suppress(OSError):  # of a full disk, which was reported
            self._file.close()


class ScriptStream(io.RawIOBase):
    """A standard stream of a script.

    Args:
        descriptor: gets its bytes as they come; None: the log alone has them.
    """

    def __init__(self, log: ScriptLog, descriptor: int | None) -> None:
        super().__init__()
        self._log = log
        self._descriptor = descriptor
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._lines = LineAssembler()

    def fileno(self) -> int:
        """Return the descriptor, for processes that the script starts."""
        return self._log.fileno() if self._descriptor is None else self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, chunk: Any) -> int:
        """Write bytes, all of them."""
        content = bytes(chunk)
        if self._descriptor is not None:
            rest = memoryview(content)
            with suppress(BrokenPipeError):  # the launcher has gone
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
        self._log.add(self._lines.feed(self._decoder.decode(content)))
        return len(content)

    def finish(self) -> None:
        """Add the last line to the log, if it has no end."""
        self._log.add(self._lines.finish())


@contextmanager
def output_to_log(path: Path, prints: Prints) -> Iterator[None]:
    """Add what the process writes to the worker's log.

    Args:
        prints: where standard output goes too; standard error goes to the launcher.
    """
    before = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    with ExitStack() as stack:
        log = ScriptLog(path)
        stack.callback(log.close)
        if prints is not Prints.STDOUT:
            os.dup2(log.fileno() if prints is Prints.LOG else 2, 1)
        out, err = ScriptStream(log, None if prints is Prints.LOG else 1), ScriptStream(log, 2)
        sys.stdout = io.TextIOWrapper(out, "utf-8", "surrogateescape", line_buffering=True)
        sys.stderr = io.TextIOWrapper(err, "utf-8", "backslashreplace", line_buffering=True)
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
                # a script may have closed it, or may have put what has no `flush`
                with suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            out.finish()
            err.finish()
            sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__ = before  # type: ignore[misc]
