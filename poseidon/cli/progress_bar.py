"""The progress of a command that is not a job: a bar on a terminal, or lines where they are
asked for.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO, TypeVar

from poseidon.base.text_files import visible
from poseidon.caffe.data.staging import UNITS
from poseidon.flags.flag import ShownProgress
from poseidon.observe.metrics.progress import ProgressBar

LINE_S = 60.0
"""Seconds between two lines of --progress=lines."""
Line = TypeVar("Line")


class CommandProgress:
    """The progress of a command: a `Report`; each activity gets a bar of its own.

    Args:
        stream: usually standard error.
        units: by activity; others count records.
        opening: a line that is written before the first activity where there is no bar; "": none.
    """

    def __init__(
        self,
        shown: ShownProgress,
        stream: TextIO,
        units: Mapping[str, str] = UNITS,
        clock: Callable[[], float] = time.monotonic,
        *,
        opening: str = "",
    ) -> None:
        self.bar = ProgressBar(stream, shown=shown is not ShownProgress.LINES)
        self._alone = shown is ShownProgress.BAR and self.bar.on_terminal
        self._as_lines = shown is ShownProgress.LINES
        self._units = units
        self._clock, self._printed_s = clock, clock()
        self._running = False
        self._opening = "" if self.bar.on_terminal else opening

    def __call__(self, activity: str, done: int, total: int) -> None:
        if self._opening:
            self.bar.write(self._opening)
            self._opening = ""
        unit = self._units.get(activity, "record")
        self._running = done < total
        self.bar.show(activity, done, total, unit=unit)
        now = self._clock()
        if self._as_lines and now - self._printed_s >= LINE_S:
            self._printed_s = now
            self.bar.write(f"progress: {activity} {done} of {total} ({unit})")

    def without_details(self, write: Callable[[Line], object]) -> Callable[[Line], None]:
        """Return `write`, but with --progress=bar a function that drops the lines during an
        activity.
        """

        def written(line: Line) -> None:
            if not (self._alone and self._running):
                write(line)

        return written


class _LinesAbove(io.TextIOBase):
    """A stream whose lines appear above a bar."""

    def __init__(self, bar: ProgressBar, stream: TextIO) -> None:
        self._bar, self._stream, self._rest = bar, stream, ""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._bar.write(visible(line))
        return len(text)

    def finish(self) -> None:
        """Write what has no line end yet, below the bar."""
        self._stream.write(self._rest)
        self._rest = ""


@contextmanager
def progress_bar(
    shown: str, units: Mapping[str, str] = UNITS, *, opening: str = ""
) -> Iterator[CommandProgress]:
    """Yield the progress of a command.

    On a terminal, what the block prints and logs appears above the bar.

    Args:
        shown: the value of --progress.
    """
    progress = CommandProgress(ShownProgress(shown), sys.stderr, units, opening=opening)
    with ExitStack() as stack:
        if progress.bar.on_terminal:
            for redirect, stream in ((redirect_stderr, sys.stderr), (redirect_stdout, sys.stdout)):
                if stream.isatty():
                    above = _LinesAbove(progress.bar, stream)
                    stack.callback(above.finish)
                    stack.enter_context(redirect(above))
        stack.callback(progress.bar.close)
        yield progress
