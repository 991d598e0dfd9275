"""The norm over the gradients of an iteration at staleness 0, summed over the carriers beside the server.

At staleness > 0 each worker limits its own gradients (`Exchange.finish`).
"""

from __future__ import annotations

import threading
from typing import Protocol

from ps_server.rules import plain_sum


class GlobalNorm(Protocol):
    """The sum of squares over all gradients of an iteration; see `ps_server.Client`."""

    def add_norm(self, clock: int, squares: float) -> None:
        """Add the sum of squares of the gradients that do not go through the server. Rank 0."""

    def total_norm(self, clock: int) -> float:
        """Wait for the sum of squares over all gradients, and return it."""


class SharedNorm:
    """The norm of several carriers: one sum for the server, in the order of the carriers.

    Args:
        norms: of the store.
        carriers: number of carriers; each adds once an iteration, on rank 0, and takes each total
            at most once.
    """

    def __init__(self, norms: GlobalNorm, carriers: int) -> None:
        self._norms = norms
        self._carriers = carriers
        self._adding, self._taking = threading.Lock(), threading.Lock()
        self._squares: dict[int, dict[int, float]] = {}
        self._totals: dict[int, tuple[float, int]] = {}

    def of_carrier(self, number: int) -> GlobalNorm:
        """Return the norm for one carrier."""
        return _CarrierNorm(self, number)

    def add(self, number: int, clock: int, squares: float) -> None:
        """Add the part of a carrier."""
        with self._adding:
            parts = self._squares.setdefault(clock, {})
            parts[number] = squares
            if len(parts) == self._carriers:
                del self._squares[clock]
                self._norms.add_norm(clock, plain_sum(part for _, part in sorted(parts.items())))

    def total(self, clock: int) -> float:
        """Wait for the total; each carrier calls it once an iteration."""
        with self._taking:
            total, taken = self._totals.pop(clock, (None, 0))
            if total is None:
                total = self._norms.total_norm(clock)
            if taken + 1 < self._carriers:
                self._totals[clock] = total, taken + 1
            return total


class _CarrierNorm(GlobalNorm):
    def __init__(self, norms: SharedNorm, number: int) -> None:
        self._norms = norms
        self._number = number

    def add_norm(self, clock: int, squares: float) -> None:
        self._norms.add(self._number, clock, squares)

    def total_norm(self, clock: int) -> float:
        return self._norms.total(clock)
