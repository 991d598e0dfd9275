"""What an exchange has moved for each tensor, and how long that took: for statistics, never for decisions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One tensor's, since the start, at this worker.

    Attributes:
        bytes_out: sent for it.
        bytes_in: received for it.
        on_way_s: from each gradient's beginning to the arrival of the value that follows from it, added up.
    """

    bytes_out: int
    bytes_in: int
    on_way_s: float


class CountsTraffic(Protocol):
    """What knows the traffic of its tensors."""

    def traffic(self) -> Mapping[int, Traffic]:
        """By the tensor's index. Any thread may ask."""


class Flights:
    """How long things were on their way, of several kinds; those of one kind arrive in the order of their departures.

    Args:
        kinds: number of kinds.
        now: seconds, monotonic.
    """

    def __init__(self, kinds: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._under_way: list[deque[float]] = [deque() for _ in range(kinds)]
        self._total_s = [0.0] * kinds

    def depart(self, kind: int) -> None:
        """One of this kind begins its way."""
        self._under_way[kind].append(self._now())

    def arrive(self, kind: int) -> None:
        """The one that has been under way longest is there."""
        if self._under_way[kind]:
            self._total_s[kind] += self._now() - self._under_way[kind].popleft()

    def total_s(self, kind: int) -> float:
        """Time of all that have arrived, added up."""
        return self._total_s[kind]
