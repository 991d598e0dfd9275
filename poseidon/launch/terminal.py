"""What the user of a job reads while it runs: worker 0's log or everyone's, each warning once, and the progress."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from poseidon.cluster.plan import ProcessName, Role
from poseidon.cluster.supervision.loop import JobListener
from poseidon.launch.request import ShownLogs
from poseidon.metrics.progress import ProgressLine, ProgressMeter, ShownProgress

MOST_REMEMBERED = 10_000
MOST_SCORES = 8
_GLOG = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.")


class Terminal(JobListener):
    """Shows a job to its user.

    Args:
        title: the net's name.
        stream: usually standard error.
        on_started: called when the job runs.
        shown: whose logs are shown.
        progress: how the progress is shown.
        interval_s: seconds between two lines on the progress, where there is no bar; 0: none.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        title: str,
        stream: TextIO,
        *,
        on_started: Callable[[], None],
        shown: ShownLogs = ShownLogs.FIRST,
        progress: ShownProgress = ShownProgress.AUTO,
        interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shown = shown
        self._line = ProgressLine(title, stream, bar=progress is not ShownProgress.LINES)
        self._bar_alone = progress is ShownProgress.BAR and self._line.on_terminal
        self._started = on_started
        self._printed: set[str] = set()
        self._last_scores: dict[int, str] = {}
        self._loss: float | None = None
        self._meter, self._clock = ProgressMeter(clock), clock
        self._interval_s, self._printed_s = interval_s, clock()

    def print(self, text: str) -> None:
        """Print a line of the launcher's own."""
        self._line.write(text)

    def on_started(self) -> None:
        """See `JobListener`."""
        self._started()

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """See `JobListener`."""
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
        self._line.update(progress)
        now = self._clock()
        if self._interval_s and not self._line.on_terminal and now - self._printed_s >= self._interval_s:
            self._printed_s = now
            self._line.write(f"progress: {progress.summary()}")

    def on_log(self, name: ProcessName, line: str) -> None:
        """See `JobListener`. The same warning is shown once, whichever process it comes from."""
        level = line[0] if _GLOG.match(line) else ""
        if level == "F":
            return  # the last line of a process; the launcher's last sentence has it
        # A line that is not of the log is a print, which may come from every worker, or from a library or an
        # interpreter.
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
        """Return the scores of the last test of each net, a line each; else the last loss."""
        if not self._last_scores and self._loss is not None:
            return [f"training loss {self._loss:.4g}"]
        several = len(self._last_scores) > 1
        return [
            (f"test net #{net}: " if several else "") + text
            for net, text in sorted(self._last_scores.items())
        ]

    def _keep_scores(self, event: Mapping[str, object]) -> None:
        iteration, net, scores = (event.get(key) for key in ("iteration", "net", "scores"))
        if isinstance(net, int) and isinstance(scores, list) and all(map(_is_score, scores)):
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
        """End the progress line."""
        self._line.close()


def _is_score(score: object) -> bool:
    return isinstance(score, list) and len(score) == 2 and all(isinstance(word, str) for word in score)


def _is_first(name: ProcessName) -> bool:
    return name.role is Role.WORKER and name.index == 0
