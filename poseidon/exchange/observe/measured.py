"""An exchange whose waits are measured, tensor by tensor: always on, for it costs two looks at a clock a wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from poseidon.exchange.base import Exchange
from poseidon.exchange.observe.forwarding import ForwardingExchange


class MeasuredExchange(ForwardingExchange):
    """See `Exchange`.

    Args:
        inner: gets every call.
        tensors: how many there are.
        now: seconds, monotonic.

    Attributes:
        iterations: how many have been finished.
        waited_s: how long each tensor's waits have taken, added up.
    """

    def __init__(
        self, inner: Exchange, tensors: int, *, now: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(inner)
        self.iterations = 0
        self.waited_s = [0.0] * tensors
        self._now = now

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        began_s = self._now()
        self._inner.wait(index)
        self.waited_s[index] += self._now() - began_s

    def finish(self) -> None:
        """See `Exchange`."""
        self._inner.finish()
        self.iterations += 1
