"""The launcher's eye on stragglers: callbacks that hand everything on and name who holds the others up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from poseidon.cluster.plan import ProcessName, Role
from poseidon.cluster.supervision.loop import JobCallbacks
from poseidon.cluster.supervision.stragglers import Stragglers


class StragglerWatch:
    """See `JobCallbacks`.

    Args:
        inner: hears everything too.
        say: told a sentence when a worker becomes a straggler, and when it stops being one.
        now: seconds, monotonic.
    """

    def __init__(
        self, inner: JobCallbacks, say: Callable[[str], None], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner = inner
        self._say = say
        self._now = now
        self._stragglers = Stragglers()

    def on_started(self) -> None:
        """See `JobCallbacks`."""
        self._stragglers.forget()
        self._inner.on_started()

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """See `JobCallbacks`."""
        if name.role is Role.WORKER:
            self._look(name, event)
        self._inner.on_event(name, event)

    def on_log(self, name: ProcessName, line: str) -> None:
        """See `JobCallbacks`."""
        self._inner.on_log(name, line)

    def _look(self, name: ProcessName, event: Mapping[str, object]) -> None:
        iteration, waited_s = event.get("iteration"), event.get("waited_s")
        if event.get("event") == "progress" and isinstance(iteration, int):
            self._stragglers.progress(name, iteration)
        if event.get("event") == "alive" and isinstance(waited_s, int | float):
            sentence = self._stragglers.waited(name, float(waited_s), self._now())
            if sentence is not None:
                self._say(sentence)
