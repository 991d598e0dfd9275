"""The progress of a job, and the progress bar of jobs and of other commands on a terminal.

    CIFAR10_quick:  42%|####      | 1680/4000 [01:10<01:37, 23.9it/s, 2390 images/s, loss 1.03]

Law: the bar is shown on a terminal only. All other output to that terminal goes through `write` and
`pass_on`, so that it does not mix with the bar. If the terminal disappears, the bar ends and the
job continues.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TextIO

from tqdm import tqdm

from ps_server.json_fields import value_of

WINDOW_S = 30.0
"""The maximum time over which rates are measured, without tests."""
_SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """The progress of a job.

    Attributes:
        iteration: the number of finished iterations.
        max_iter: the number of iterations in all; 0: unknown.
        images: the number of images that all workers have read since the start; 0: not counted.
        loss: the latest loss; None: unknown.
        tested: the number of batches of the current test that worker 0 has scored.
        to_test: the number of batches that it will score; 0: no test is running.
        rate: iterations per second, without tests; 0: not measured yet.
        images_rate: images per second.
    """

    iteration: int = 0
    max_iter: int = 0
    images: int = 0
    loss: float | None = None
    tested: int = 0
    to_test: int = 0
    rate: float = 0.0
    images_rate: float = 0.0

    @property
    def eta_s(self) -> float | None:
        """The seconds to the last iteration, without tests; None: unknown."""
        if not self.max_iter or not self.rate:
            return None
        return max(0, self.max_iter - self.iteration) / self.rate

    def position(self) -> str:
        """Return `120 of 4000`, with `, testing 12 of 50` during a test."""
        of = f" of {self.max_iter}" if self.max_iter else ""
        test = f", testing {self.tested} of {self.to_test}" if self.to_test else ""
        return f"{self.iteration}{of}{test}"

    def rate_text(self) -> str:
        """Return the rate as `23.9/s`; `-` if unknown."""
        return f"{self.rate:.3g}/s" if self.rate else "-"

    def eta_text(self) -> str:
        """Return the remaining time as `0:02:42`; `-` if unknown."""
        return "-" if self.eta_s is None else str(timedelta(seconds=round(self.eta_s)))

    def summary(self) -> str:
        """Return `iteration 120 of 4000, 23.9/s, 2390 images/s, loss 1.03, 0:02:42 left`."""
        parts = [
            f"iteration {self.position()}",
            *([self.rate_text()] if self.rate else []),
            *self.details(),
        ]
        return ", ".join([*parts, *([f"{self.eta_text()} left"] if self.eta_s is not None else [])])

    def details(self) -> list[str]:
        """Return the images per second and the loss, if known."""
        images = [f"{self.images_rate:.4g} images/s"] if self.images_rate else []
        return images + ([f"loss {self.loss:.4g}"] if self.loss is not None else [])


class ProgressMeter:
    """A meter of rates from the progress events of worker 0."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int, int]] = deque()
        self._rates = (0.0, 0.0)

    def update(self, event: Mapping[str, object]) -> JobProgress | None:
        """Return the progress after a `progress` event; None if the event is invalid."""
        loss = event.get("loss")  # which need not be finite
        try:
            said = value_of(JobProgress, {"iteration": None, **event, "loss": None})
        except ValueError:
            return None
        if said.to_test:
            self._samples.clear()  # a test's time does not count
        else:
            self._measure(said.iteration, said.images)
        rate, images_rate = self._rates
        loss = loss if isinstance(loss, float) else None
        return replace(said, loss=loss, rate=rate, images_rate=images_rate)

    def _measure(self, iteration: int, images: int) -> None:
        now, samples = self._clock(), self._samples
        if samples and iteration < samples[-1][1]:
            samples.clear()  # the job has restarted
        if not samples or now - samples[-1][0] >= _SAMPLE_S:
            samples.append((now, iteration, images))
        while now - samples[0][0] > WINDOW_S and len(samples) > 2:
            samples.popleft()
        began_s, first, first_images = samples[0]
        if now - began_s >= _SAMPLE_S and iteration > first:
            self._rates = (
                (iteration - first) / (now - began_s),
                (images - first_images) / (now - began_s),
            )


class _Bar(tqdm):  # type: ignore[type-arg]
    """tqdm without its monitor thread, which would not be joined."""

    monitor_interval = 0


class ProgressBar:
    """A progress bar on a terminal, and the lines above it. Several threads may use it.

    Args:
        shown: whether a terminal gets a bar.
    """

    def __init__(self, stream: TextIO, *, shown: bool = True) -> None:
        # a bar moves the cursor, and what a script writes is passed on as it is
        self._stream = getattr(stream, "unescaped", stream)
        self._lock = threading.RLock()
        self._bar: _Bar | None = None
        self._title = ""
        self._line_is_open = False
        self._put_away = False
        self.on_terminal = shown and stream.isatty()
        """Whether the bar is shown; False after the terminal has disappeared."""

    def show(
        self,
        title: str,
        done: int,
        total: int,
        *,
        unit: str = "it",
        details: str = "",
        at_once: bool = False,
    ) -> None:
        """Update the bar; do nothing without a terminal.

        Args:
            title: the text on the left. A different title ends the bar, and begins one below it.
            done: what is done. The value at a title's first call is the start of its bar.
            total: what is done at the end; 0: unknown.
            unit: what is counted; B: bytes.
            details: the text on the right.
            at_once: draw now, not when the next drawing is due.
        """
        with self._lock:
            if not self.on_terminal or self._put_away or self._line_is_open:
                return
            try:
                if self._bar is None or title != self._title:
                    self._end()
                    self._bar, self._title = self._new_bar(title, done, total, unit), title
                self._bar.set_postfix_str(details, refresh=at_once)
                self._bar.update(done - self._bar.n)
            except (OSError, ValueError):
                self._abandon()

    def write(self, line: str) -> None:
        """Write a line above the bar."""
        with self._lock:
            begin = "\n" if self._line_is_open else ""
            self._write(f"{begin}{line}\n")

    def pass_on(self, text: str) -> None:
        """Write a piece of text above the bar as it is.

        The bar waits while the text ends within a line. It is put away for good when the text
        returns to the beginning of a line, because then it is a progress bar itself.
        """
        with self._lock:
            if "\r" in text.replace("\r\n", "\n"):
                self._remove_bar()
            self._write(text)

    def _write(self, text: str) -> None:
        try:
            if self._bar is not None and not self._line_is_open:  # else the bar is not there
                self._bar.clear()
            self._stream.write(text)
            self._stream.flush()
            self._line_is_open = not text.endswith("\n")
            if self._bar is not None and not self._line_is_open:
                self._bar.refresh()
        except (OSError, ValueError):
            self._abandon()

    def _remove_bar(self) -> None:
        self._put_away = True
        if self._bar is not None:
            self._bar.leave = False
            self._end()

    def close(self) -> None:
        """End the bar in its last state. A second call does nothing."""
        with self._lock:
            self.on_terminal = False
            self._end()

    def _end(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            try:
                bar.close()
            except (OSError, ValueError):
                bar.disable = True

    def _new_bar(self, title: str, done: int, total: int, unit: str) -> _Bar:
        # tqdm's default also locks against other processes, with a semaphore.
        _Bar.set_lock(threading.RLock())
        return _Bar(
            desc=title,
            initial=done,
            total=total or None,
            file=self._stream,
            unit=unit,
            unit_scale=unit == "B",
            unit_divisor=1024 if unit == "B" else 1000,
            **bar_size(self._stream),
        )

    def _abandon(self) -> None:
        """Stop all output to the terminal, which has disappeared."""
        self.on_terminal = False
        if self._bar is not None:
            self._bar.disable = True
            self._bar = None


class ProgressLine(ProgressBar):
    """The progress bar of a job.

    Args:
        title: the text on the left, usually the net's name.
        bar: whether a terminal gets a bar.
    """

    def __init__(self, title: str, stream: TextIO, *, bar: bool = True) -> None:
        super().__init__(stream, shown=bar)
        self._name = title

    def update(self, progress: JobProgress) -> None:
        """Update the bar; do nothing without a terminal."""
        test = [f"testing {progress.tested}/{progress.to_test}"] if progress.to_test else []
        self.show(
            self._name,
            progress.iteration,
            progress.max_iter,
            details=", ".join([*test, *progress.details()]),
            at_once=bool(test),
        )


def bar_size(stream: TextIO) -> dict[str, Any]:
    """Return tqdm's settings of the size.

    A terminal of unknown size (in a container) gets 80 x 24, not 0 columns.
    """
    with suppress(OSError, ValueError):
        if os.get_terminal_size(stream.fileno()).columns == 0:
            return {"ncols": 80, "nrows": 24}
    return {"dynamic_ncols": True}
