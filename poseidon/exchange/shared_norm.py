"""The norm over all gradients of an iteration at staleness 0, where carriers beside the server
have some.

At staleness > 0 each worker limits its own gradients (`Exchange.finish`).

Law: nobody waits for the server with a lock held.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from itertools import chain

from ps_server import Client


class SharedNorm:
    """The norm that carriers share: one sum for the server.

    Args:
        carriers: their names. Each adds once an iteration, on rank 0, and takes each total once.
    """

    def __init__(self, client: Client, carriers: Collection[str]) -> None:
        self._client = client
        self._carriers = carriers
        self._lock = threading.Lock()
        self._squares: dict[int, dict[str, Sequence[float]]] = {}
        self._totals: dict[int, tuple[Future[float], int]] = {}

    def add(self, carrier: str, clock: int, squares: Sequence[float]) -> None:
        """Add numbers whose exact sum is the sum of squares of a carrier's gradients. Rank 0."""
        with self._lock:
            parts = self._squares.setdefault(clock, {})
            parts[carrier] = squares
            if len(parts) < len(self._carriers):
                return
            del self._squares[clock]
        self._client.add_norm(clock, list(chain(*parts.values())))

    def total(self, clock: int) -> float:
        """Wait for the sum of squares over all gradients; each carrier calls it once an
        iteration.
        """
        with self._lock:
            total, taken = self._totals.pop(clock, (Future(), 0))
            if taken + 1 < len(self._carriers):
                self._totals[clock] = total, taken + 1
        if taken == 0:
            try:
                total.set_result(self._client.total_norm(clock))
            except BaseException as error:  # the waits of the others end with it, too
                total.set_exception(error)
                raise
        return total.result()
