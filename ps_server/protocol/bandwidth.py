"""The changes that a worker holds back under `SSPAggr`, and when they may leave.

Pure: the caller passes the time.

A worker adds up its changes of a chunk, and sends the sum as one push that covers several
iterations (managed communication: Wei et al., SoCC 2015). Laws:

* The budget: in any time T at most rate x T + `BURST_S` x rate + one chunk leave early. Changes
  that the staleness bound needs (`due`) leave in any case, and count for the budget.
* The order: of the changes that may leave early the most important leave first: |change| / |value|
  by their L2 norms.
* Nothing is lost or sent twice: `take` returns all that was added since the last `take` of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ps_server.errors import SpecError
from ps_server.protocol.messages import Array

BURST_S = 0.1
"""Seconds of the budget that can be saved up."""
_BYTES_PER_MEGABIT = 1e6 / 8
_TINY = 1e-30

Key = tuple[int, int]
"""Table id and chunk."""


class Budget:
    """A token bucket of bytes.

    Args:
        megabits_per_s: the rate; > 0.
        now_s: the time; the bucket is full.

    Raises:
        SpecError: the rate is not a number above 0.
    """

    __slots__ = ("_at_s", "_rate", "_saved")

    def __init__(self, megabits_per_s: float, now_s: float) -> None:
        if not (math.isfinite(megabits_per_s) and megabits_per_s > 0):
            raise SpecError(f"the bandwidth is {megabits_per_s} Mb/s; expected a number above 0")
        self._rate = megabits_per_s * _BYTES_PER_MEGABIT
        self._saved = self._rate * BURST_S
        self._at_s = now_s

    def spend(self, size_bytes: int) -> None:
        """Count bytes that leave, whether the budget allows them or not."""
        self._saved -= size_bytes

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until something may leave; 0 when it may leave now."""
        if now_s > self._at_s:
            earned = (now_s - self._at_s) * self._rate
            self._saved = min(self._saved + earned, self._rate * BURST_S)
            self._at_s = now_s
        return 0.0 if self._saved > 0 else (1.0 - self._saved) / self._rate


@dataclass(slots=True)
class Withheld:
    """The changes of one chunk, added up: of iterations `first` to `first + iterations - 1`."""

    first: int
    iterations: int
    array: Array
    squares: float
    """Sum of squares of `array`."""


class ChangeLog:
    """The changes that one worker holds back.

    Args:
        megabits_per_s: the budget.
        now_s: the time.
    """

    def __init__(self, megabits_per_s: float, now_s: float) -> None:
        self._budget = Budget(megabits_per_s, now_s)
        self._entries: dict[Key, Withheld] = {}
        self._values: dict[Key, float] = {}

    def add(self, key: Key, iteration: int, array: Array) -> None:
        """Add this worker's change of a chunk in an iteration.

        The array is held and not written to.
        """
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = Withheld(iteration, 1, array, _squares(array))
            return
        entry.iterations += 1
        entry.array = entry.array + array
        entry.squares = _squares(entry.array)

    def value(self, key: Key, array: Array) -> None:
        """Note the present value of a chunk, which its changes are compared with."""
        self._values[key] = _squares(array)

    def peek(self, key: Key) -> Array | None:
        """Return the changes of a chunk that are held back, added up."""
        entry = self._entries.get(key)
        return None if entry is None else entry.array

    def due(self, table: int, before: int) -> list[Key]:
        """Return the chunks of a table with changes of iterations before `before`."""
        return [
            key for key, entry in self._entries.items() if key[0] == table and entry.first < before
        ]

    def affordable(self, now_s: float) -> Iterator[Key]:
        """Yield the chunks that may leave now, most important first. Take each before the next."""
        if self._budget.wait_s(now_s) > 0:
            return  # called at every message: do not sort for nothing
        by_importance = sorted(self._entries, key=self._importance, reverse=True)
        for key in by_importance:
            if self._budget.wait_s(now_s) > 0:
                return
            yield key

    def take(self, key: Key) -> Withheld:
        """Take the changes of a chunk, which leave now."""
        entry = self._entries.pop(key)
        self._budget.spend(entry.array.nbytes)
        return entry

    def wait_s(self, now_s: float) -> float | None:
        """Return the seconds until something more may leave; None when nothing is held back."""
        return self._budget.wait_s(now_s) if self._entries else None

    def _importance(self, key: Key) -> float:
        return self._entries[key].squares / (self._values.get(key, 0.0) + _TINY)


def _squares(array: Array) -> float:
    return float(np.dot(array, array))
