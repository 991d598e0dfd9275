"""What the user of a job reads while it runs: worker 0's log or everyone's, each warning once,
and the progress.

Law: what a script's rank 0 writes to standard output goes to the launcher's, byte for byte, and
nothing else does. On a terminal its output appears as it comes, so that a progress bar of a script
moves.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TextIO

from poseidon.base.text_files import OutputLine, visible
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.process import OutputStream
from poseidon.cluster.supervision.loop import JobListener
from poseidon.flags.flag import ShownProgress
from poseidon.launcher.outlet import Outlet, may_wait
from poseidon.launcher.request import ShownLogs
from poseidon.observe.metrics.progress import JobProgress, ProgressLine, ProgressMeter

MOST_REMEMBERED = 10_000
MOST_SCORES = 8
_GLOG = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.")
_MAY_BE_GLOG = re.compile(r"[IWEF](\d{0,4}$|\d{4} )")


def on_one_terminal() -> bool:
    """Return whether standard output and standard error of this process are a terminal."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))


class _Scores:
    """The last loss, and the scores of the last test of each net."""

    def __init__(self) -> None:
        self._last: dict[int, str] = {}
        self._loss: float | None = None
        self._iteration = 0
        self._tested_at = 0

    def take_progress(self, progress: JobProgress) -> None:
        self._loss = progress.loss if progress.loss is not None else self._loss
        self._iteration = progress.iteration

    def take_test(self, event: Mapping[str, object]) -> None:
        iteration, net, scores = (event.get(key) for key in ("iteration", "net", "scores"))
        if isinstance(net, int) and isinstance(scores, list) and all(map(_is_score, scores)):
            self._tested_at = iteration if isinstance(iteration, int) else 0
            text = ", ".join(f"{name} = {value}" for name, value in scores[:MOST_SCORES])
            more = f" and {len(scores) - MOST_SCORES} more" if len(scores) > MOST_SCORES else ""
            self._last[net] = f"{text}{more} (test at iteration {iteration})"

    def lines(self) -> list[str]:
        loss = []
        if self._loss is not None and not self._last:
            loss = [f"training loss {self._loss:.4g}"]
        elif self._loss is not None and self._iteration > self._tested_at:
            loss = [f"training loss {self._loss:.4g} (at iteration {self._iteration})"]
        several = len(self._last) > 1
        return loss + [
            (f"test net #{net}: " if several else "") + text
            for net, text in sorted(self._last.items())
        ]


class Terminal(JobListener):
    """Shows a job to its user.

    Args:
        title: the net's name.
        stream: usually standard error.
        stdout: for what a script's rank 0 prints; None: standard output.
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
        self._scores = _Scores()
        self._meter = ProgressMeter(clock)
        self._interval_s, self._clock, self._written_s = interval_s, clock, clock()

    def print(self, text: str) -> None:
        """Print a line of the launcher's own."""
        self._line.write(visible(text))

    def on_started(self) -> None:
        self._started()

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        if not _is_first(name):
            return
        if event.get("event") == "tested":
            self._scores.take_test(event)
        if event.get("event") != "progress":
            return
        progress = self._meter.update(event)
        if progress is None:
            return
        self._scores.take_progress(progress)
        self._line.update(progress)
        if not self._line.on_terminal and self._is_due():
            self._line.write(f"progress: {progress.summary()}")

    def _is_due(self) -> bool:
        """Return whether a line on the progress is due; the next one is then an interval later."""
        now_s = self._clock()
        due = self._interval_s > 0 and now_s - self._written_s >= self._interval_s
        self._written_s = now_s if due else self._written_s
        return due

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
        return self._scores.lines()

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
