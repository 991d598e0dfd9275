"""What the user of a job reads while it runs: worker 0's log or everyone's, each warning once,
and the progress.

Law: what a script's rank 0 writes to standard output goes to the launcher's, byte for byte, and
nothing else does. On a terminal its output appears as it comes, so that a progress bar of a script
moves.

A terminal or a pipe that is written on a thread of its own: one that is paused (Ctrl-S), or whose
reader reads nothing, does not hold the launcher.

Law: text keeps its order. What a terminal cannot take is left out, with a line that says so; the
writer of a pipe waits, unless it is in a hurry: the user has asked the job for something.
"""

from __future__ import annotations

import os
import re
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TextIO

from poseidon.base.text_files import OutputLine, visible
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.process import OutputStream
from poseidon.cluster.supervision.loop import JobListener
from poseidon.flags.flag import ShownProgress
from poseidon.launcher.request import ShownLogs
from poseidon.observe.metrics.progress import ProgressLine, ProgressMeter

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


MOST_REMEMBERED = 10_000
MOST_SCORES = 8
_GLOG = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.")
_MAY_BE_GLOG = re.compile(r"[IWEF](\d{0,4}$|\d{4} )")


def on_one_terminal() -> bool:
    """Return whether standard output and standard error of this process are a terminal."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))


class Terminal(JobListener):
    """Shows a job to its user.

    Args:
        title: the net's name.
        stream: usually standard error.
        stdout: for what a script's rank 0 prints; None: standard output.
        on_started: called when the job runs.
        shown: whose logs are shown.
        progress: how the progress is shown.
        interval_s: seconds between two lines on the progress, where there is no bar; 0: none.
        clock: seconds, monotonic.
        in_a_hurry: see `Outlet`.
    """

    def __init__(
        self,
        title: str,
        stream: TextIO,
        *,
        on_started: Callable[[], None],
        stdout: TextIO | None = None,
        shown: ShownLogs = ShownLogs.FIRST,
        progress: ShownProgress = ShownProgress.AUTO,
        interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        in_a_hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        self._shown = shown
        plain = getattr(stream, "unescaped", stream)
        self._outlet = Outlet(plain, in_a_hurry) if may_wait(plain) else None
        shown_on: Any = self._outlet or plain
        self._line = ProgressLine(title, shown_on, bar=progress is not ShownProgress.LINES)
        self._bar_alone = progress is ShownProgress.BAR and self._line.on_terminal
        self._stdout = _StandardOutput(stdout or sys.stdout, self.print, in_a_hurry)
        self._live = stream.isatty() and shown is ShownLogs.FIRST and not self._bar_alone
        self._stderr = _LogLines()
        self._started = on_started
        self._printed: set[str] = set()
        self._last_scores: dict[int, str] = {}
        self._loss: float | None = None
        self._iteration = 0
        self._tested_at = 0
        self._meter, self._clock = ProgressMeter(clock), clock
        self._interval_s, self._printed_s = interval_s, clock()

    def print(self, text: str) -> None:
        """Print a line of the launcher's own."""
        self._line.write(visible(text))

    def on_started(self) -> None:
        self._started()

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        if not _is_first(name):
            return
        if event.get("event") == "tested":
            self._keep_scores(event)
        if event.get("event") != "progress":
            return
        progress = self._meter.update(event)
        if progress is None:
            return
        self._loss = progress.loss if progress.loss is not None else self._loss
        self._iteration = progress.iteration
        self._line.update(progress)
        now = self._clock()
        if (
            self._interval_s
            and not self._line.on_terminal
            and now - self._printed_s >= self._interval_s
        ):
            self._printed_s = now
            self._line.write(f"progress: {progress.summary()}")

    def on_output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        """Pass on what worker 0 writes, as it comes."""
        if not _is_first(name):
            return
        if stream is OutputStream.STDOUT:
            self._stdout.write(text)
        elif self._live:
            for piece, is_log in self._stderr.split(text):
                if is_log:
                    self._show(name, piece)
                else:
                    self._line.pass_on(piece)

    def on_log(self, name: ProcessName, stream: OutputStream, line: OutputLine) -> None:
        """Show a warning once, whichever processes it comes from."""
        passed_on = self._live or stream is OutputStream.STDOUT
        if _is_first(name) and passed_on:
            return
        if line.redrawn and not _is_first(name) and self._shown is ShownLogs.FIRST:
            return  # a progress bar of another worker
        self._show(name, line.text)

    def _show(self, name: ProcessName, line: str) -> None:
        level = line[0] if _GLOG.match(line) else ""
        if level == "F":
            return  # the last line of a process; the launcher's last sentence has it
        # A line that is not of the log is a print, which may come from every worker, or from a
        # library or an interpreter.
        plain = level == "I" or (not level and self._shown is ShownLogs.ALL)
        plain = plain or (_is_first(name) and level != "W")
        if plain and self._shown is ShownLogs.FIRST and not _is_first(name):
            return
        if plain and self._bar_alone:
            return
        if not plain and not self._is_new(line):
            return
        if self._shown is ShownLogs.ALL:
            self._line.write(f"client {name.client}, {name.short}: {line}")
        else:
            self._line.write(line if _is_first(name) else f"{name.short}: {line}")

    def scores(self) -> list[str]:
        """Return the scores of the last test of each net, a line each; before them the last loss,
        if training has continued since.
        """
        loss = []
        if self._loss is not None and not self._last_scores:
            loss = [f"training loss {self._loss:.4g}"]
        elif self._loss is not None and self._iteration > self._tested_at:
            loss = [f"training loss {self._loss:.4g} (at iteration {self._iteration})"]
        several = len(self._last_scores) > 1
        return loss + [
            (f"test net #{net}: " if several else "") + text
            for net, text in sorted(self._last_scores.items())
        ]

    def _keep_scores(self, event: Mapping[str, object]) -> None:
        iteration, net, scores = (event.get(key) for key in ("iteration", "net", "scores"))
        if isinstance(net, int) and isinstance(scores, list) and all(map(_is_score, scores)):
            self._tested_at = iteration if isinstance(iteration, int) else 0
            text = ", ".join(f"{name} = {value}" for name, value in scores[:MOST_SCORES])
            more = f" and {len(scores) - MOST_SCORES} more" if len(scores) > MOST_SCORES else ""
            self._last_scores[net] = f"{text}{more} (test at iteration {iteration})"

    def _is_new(self, line: str) -> bool:
        """Return whether the text, without its time and place, comes for the first time."""
        text = line.partition("] ")[2] or line
        if text in self._printed:
            return False
        if len(self._printed) < MOST_REMEMBERED:
            self._printed.add(text)
        return True

    def close(self) -> None:
        """Show what a process has left within a line, and end the progress line."""
        if rest := self._stderr.finish():
            self._line.pass_on(rest)
        self._stdout.close()
        self._line.close()
        if self._outlet is not None:
            with suppress(OSError):  # the terminal has gone
                self._outlet.close()


class _StandardOutput:
    """Standard output for a script's bytes. When it cannot be written, there is one warning."""

    def __init__(
        self, stream: TextIO, warn: Callable[[str], None], in_a_hurry: Callable[[], bool]
    ) -> None:
        self._stream: TextIO | None = stream
        plain = getattr(stream, "unescaped", stream)
        self._outlet = Outlet(plain, in_a_hurry) if may_wait(plain) else None
        self._warn = warn

    def write(self, text: str) -> None:
        self._do(lambda stream: self._write(stream, text))

    def close(self) -> None:
        """Wait until what was written is there."""
        if self._outlet is not None:
            outlet = self._outlet
            self._do(lambda _: outlet.close())

    def _write(self, stream: TextIO, text: str) -> None:
        content = text.encode("utf-8", errors="surrogateescape")
        if self._outlet is None:
            write_bytes(stream, content)
        else:
            self._outlet.write_bytes(content)

    def _do(self, call: Callable[[TextIO], None]) -> None:
        if self._stream is None:
            return
        try:
            call(self._stream)
        except BrokenPipeError:  # its reader has read enough
            self._stream = None
        except (OSError, ValueError) as error:
            self._stream = None
            why = error.strerror if isinstance(error, OSError) else error
            self._warn(
                f"warning: standard output cannot be written: {why}; what the script prints is in "
                "its log"
            )


def write_bytes(stream: TextIO, content: bytes) -> None:
    """Write bytes to a text stream's file at once, so that nothing is left to be written at the
    interpreter's end.
    """
    buffer = getattr(stream, "buffer", None)
    if buffer is None:  # a stream of text alone, as in a notebook
        stream.write(content.decode("utf-8", errors="replace"))
        stream.flush()
        return
    stream.flush()
    file = getattr(buffer, "raw", buffer)
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) or 0 :]


class _LogLines:
    """Tells the lines of Poseidon's own log from other text in a stream that comes in pieces."""

    def __init__(self) -> None:
        self._held = ""
        self._within_line = False

    def finish(self) -> str:
        """Return what is held back."""
        rest, self._held = self._held, ""
        return rest

    def split(self, piece: str) -> Iterator[tuple[str, bool]]:
        """Yield parts of the stream, and whether each is a line of the log, then without its end.

        What may become a line of the log is held back until its end comes.
        """
        self._held += piece
        text = ""
        while self._held:
            if not self._within_line and _MAY_BE_GLOG.match(self._held):
                line, end, rest = self._held.partition("\n")
                if not end:
                    break
                self._held = rest
                if not _GLOG.match(line):
                    text += line + end
                    continue
                if text:
                    yield text, False
                    text = ""
                yield line, True
                continue
            line, end, self._held = self._held.partition("\n")
            self._within_line = not end
            text += line + end
        if text:
            yield text, False


def _is_score(score: object) -> bool:
    return (
        isinstance(score, list) and len(score) == 2 and all(isinstance(word, str) for word in score)
    )


def _is_first(name: ProcessName) -> bool:
    return name.role is Role.WORKER and name.index == 0
