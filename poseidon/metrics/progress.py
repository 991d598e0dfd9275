"""The line at the foot of a terminal: iterations, their rate, images per second, the time that is left.

    CIFAR10_quick:  42%|####      | 1680/4000 [01:10<01:37, 23.9it/s, 2390 images/s, loss 1.03]

Law: it exists on a terminal only, and no log line ever runs into it: all that goes to that terminal goes
through `write`. A terminal that has gone away ends the line, never the job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

# Images per second are taken over at least this long, so that the number can be read.
_WINDOW_S = 2.0


class _Bar(tqdm):  # type: ignore[type-arg]
    """tqdm without its watching thread, which nobody would join."""

    monitor_interval = 0


class ProgressLine:
    """The progress of one job.

    Args:
        title: stands at the left, usually the net's name.
        stream: usually standard error.
        clock: seconds, monotonic.
    """

    def __init__(self, title: str, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._stream = stream
        self._clock = clock
        self._on_terminal = stream.isatty()
        self._bar: _Bar | None = None
        self._window_s = clock()
        self._window_images = 0
        self._images_per_s: float | None = None

    def update(self, *, iteration: int, max_iter: int, images: int, loss: float | None = None) -> None:
        """Show where training stands; nothing happens off a terminal.

        Args:
            iteration: finished iterations; where a resumed run begins when called for the first time.
            max_iter: the last one.
            images: how many all workers have seen since the job began.
            loss: the latest.
        """
        if not self._on_terminal:
            return
        try:
            self._show(iteration, max_iter, images, loss)
        except (OSError, ValueError):
            self._abandon()

    def write(self, line: str) -> None:
        """Write a line of log above the progress line."""
        try:
            if self._bar is None:
                self._stream.write(line + "\n")
                self._stream.flush()
            else:
                self._bar.clear()
                self._stream.write(line + "\n")
                self._bar.refresh()
        except (OSError, ValueError):
            self._abandon()

    def close(self) -> None:
        """Leave the last state standing and end the line. May be called twice."""
        bar, self._bar = self._bar, None
        self._on_terminal = False
        if bar is not None:
            try:
                bar.close()
            except (OSError, ValueError):
                bar.disable = True

    def _show(self, iteration: int, max_iter: int, images: int, loss: float | None) -> None:
        if self._bar is None:
            self._bar = self._new_bar(iteration, max_iter)
            self._window_s, self._window_images = self._clock(), images
        self._measure(images)
        parts = [f"{self._images_per_s:.4g} images/s"] if self._images_per_s is not None else []
        parts += [f"loss {loss:.4g}"] if loss is not None else []
        self._bar.set_postfix_str(", ".join(parts), refresh=False)
        self._bar.update(iteration - self._bar.n)

    def _new_bar(self, iteration: int, max_iter: int) -> _Bar:
        _Bar.set_lock(
            threading.RLock()
        )  # tqdm's own also locks against other processes, and costs a semaphore
        return _Bar(
            desc=self._title,
            initial=iteration,
            total=max_iter,
            file=self._stream,
            unit="it",
            dynamic_ncols=True,
        )

    def _measure(self, images: int) -> None:
        now = self._clock()
        if now - self._window_s >= _WINDOW_S:
            self._images_per_s = (images - self._window_images) / (now - self._window_s)
            self._window_s, self._window_images = now, images

    def _abandon(self) -> None:
        """The terminal has gone: what comes now is for the log files alone."""
        self._on_terminal = False
        if self._bar is not None:
            self._bar.disable = True
            self._bar = None
