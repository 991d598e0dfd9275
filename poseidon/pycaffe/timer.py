"""Timer: Caffe's stopwatch."""

from __future__ import annotations

from poseidon.caffe.tools.benchmark import clock_of
from poseidon.pycaffe.mode import MODE


class Timer:
    """A stopwatch that waits for the work of the device which is chosen when it is created."""

    def __init__(self) -> None:
        self._clock = clock_of(MODE.device)
        self._began_s: float | None = None
        self._elapsed_s = 0.0

    def start(self) -> None:
        """Begin; while it runs, do nothing."""
        if self._began_s is None:
            self._began_s = self._clock()

    def stop(self) -> None:
        """Stop; if it does not run, do nothing."""
        if self._began_s is not None:
            self._elapsed_s, self._began_s = self._clock() - self._began_s, None

    @property
    def ms(self) -> float:
        """Milliseconds from the last start to its stop, which this is while it runs; 0 before."""
        self.stop()
        return self._elapsed_s * 1000
