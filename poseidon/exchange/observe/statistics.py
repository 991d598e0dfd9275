"""Statistics of an exchange for each tensor: waits, bytes, and times in transit.

They decide nothing.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from poseidon.exchange.observe.observer import ObservedCall, Observer


class WaitTimes(Observer):
    """The time of `Exchange.wait` by tensor.

    It is always measured: two reads of the clock for each wait.

    Attributes:
        waited_s: for each tensor the total time of its waits, in seconds.
    """

    def __init__(self, tensors: int) -> None:
        self.iterations = 0
        self.waited_s = [0.0] * tensors

    def after(self, call: ObservedCall, index: int, began_ns: int, ended_ns: int) -> None:
        if call is ObservedCall.WAIT:
            self.waited_s[index] += (ended_ns - began_ns) * 1e-9
        elif call is ObservedCall.FINISH:
            self.iterations += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The traffic of one tensor at this worker, since the start.

    Attributes:
        bytes_out: bytes sent for it.
        bytes_in: bytes received for it.
        on_way_s: total time from each gradient's `begin` to the arrival of the value that follows
            from it.
        held_back: L2 norm of what a lossy codec has held back; None: no codec.
    """

    bytes_out: int
    bytes_in: int
    on_way_s: float
    held_back: float | None = None

    def plus(self, other: Traffic) -> Traffic:
        """Return the traffic of two parts of a tensor."""
        own = [norm for norm in (self.held_back, other.held_back) if norm is not None]
        return Traffic(
            bytes_out=self.bytes_out + other.bytes_out,
            bytes_in=self.bytes_in + other.bytes_in,
            on_way_s=self.on_way_s + other.on_way_s,
            held_back=math.hypot(*own) if own else None,
        )


class TransitTimes:
    """Times in transit by kind. Within a kind, arrivals have the order of departures.

    Args:
        now: seconds, monotonic.
    """

    def __init__(self, kinds: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._under_way: list[deque[float]] = [deque() for _ in range(kinds)]
        self.total_s = [0.0] * kinds
        """The total time in transit of all that have arrived, by kind."""

    def depart(self, kind: int) -> None:
        """Note a departure of this kind."""
        self._under_way[kind].append(self._now())

    def arrive(self, kind: int) -> None:
        """Note the arrival of the earliest departure of this kind; without one this does
        nothing.
        """
        if self._under_way[kind]:
            self.total_s[kind] += self._now() - self._under_way[kind].popleft()
