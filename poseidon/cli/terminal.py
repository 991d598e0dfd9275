"""What the user of a running job sees: worker 0's log, everyone's warnings, one progress line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TextIO

from poseidon.cluster.plan import ProcessName, Role
from poseidon.metrics.progress import ProgressLine

SEVERE = ("W", "E", "F")


class Terminal:
    """The callbacks of a job, for a person. See `JobCallbacks`.

    Args:
        title: the net's name.
        stream: usually standard error.
        on_started: told once when the job runs.
    """

    def __init__(self, title: str, stream: TextIO, *, on_started: Callable[[], None]) -> None:
        self._line = ProgressLine(title, stream)
        self._started = on_started
        self._told: set[str] = set()

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._line.write(text)

    def on_started(self) -> None:
        """See `JobCallbacks`."""
        self._started()

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """See `JobCallbacks`."""
        if event.get("event") != "progress" or not _is_first(name):
            return
        iteration, max_iter, images = (event.get(key) for key in ("iteration", "max_iter", "images"))
        loss = event.get("loss")
        if isinstance(iteration, int) and isinstance(max_iter, int) and isinstance(images, int):
            self._line.update(
                iteration=iteration,
                max_iter=max_iter,
                images=images,
                loss=loss if isinstance(loss, float) else None,
            )

    def on_log(self, name: ProcessName, line: str) -> None:
        """See `JobCallbacks`. Other workers' lines are shown when they are not information, and each text once."""
        if _is_first(name):
            self._line.write(line)
        elif line.startswith(SEVERE) or not line.startswith("I"):
            text = line.partition("] ")[2] or line
            if text not in self._told:
                self._told.add(text)
                self._line.write(f"{name.short}: {line}")

    def close(self) -> None:
        """End the progress line."""
        self._line.close()


def _is_first(name: ProcessName) -> bool:
    return name.role is Role.WORKER and name.index == 0
