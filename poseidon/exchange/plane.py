"""The contract of a plane: the tensors of an exchange that travel by one scheme
beside the server; and the norm over planes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from poseidon.exchange.base import History
from poseidon.exchange.factors.products import Kernel
from poseidon.exchange.observe.statistics import Traffic
from ps_server import RemoteProtocolError
from ps_server.rules import plain_sum


class Plane(Protocol):
    """The tensors of an exchange that travel by one scheme beside the server. Its calls are those of `Exchange`."""

    def offer(self) -> dict[str, Any]:
        """Return what the other workers need to connect, as JSON."""

    def connect(self, offers: Sequence[Mapping[str, Any]], kernel: Kernel) -> None:
        """Connect to the other workers.

        Args:
            offers: of all workers, by rank.
            kernel: computes the same products of factors on all workers.

        Raises:
            RemoteProtocolError: a worker has offered no address.
        """

    def take_first(self, histories: Mapping[int, History]) -> None:
        """Take the tensors' present values as the first ones, with these histories: zeros where one is empty."""

    def rewind(self, clock: int) -> None:
        """Begin at another clock, before the first iteration. `take_first` follows."""

    def start(self, iteration: int, rate: float) -> None:
        """Begin an iteration."""

    def wait(self, index: int) -> None:
        """Return once a tensor may be used."""

    def finish(self, limit: float) -> None:
        """End the iteration.

        Args:
            limit: multiplies this worker's gradients that were held back for it, at staleness > 0.
        """

    def settle(self, clock: int) -> None:
        """Bring every tensor to the state after `clock` iterations of all workers."""

    def history(self, index: int) -> History:
        """Return a tensor's history; call it after `settle`."""

    def replicated_state(self) -> Mapping[str, Tensor]:
        """Return what all replicas keep equal beside the tensors."""

    def traffic(self) -> dict[int, Traffic]:
        """See `CountsTraffic`."""

    def close(self) -> None:
        """Disconnect. Safe to call twice."""


class GlobalNorm(Protocol):
    """The norm over all gradients of an iteration, summed over all schemes; see `ps_server.Client`."""

    def add_norm(self, clock: int, squares: float) -> None:
        """Add the sum of squares of the gradients that do not go through the server. Rank 0."""

    def total_norm(self, clock: int) -> float:
        """Wait for the sum of squares over all gradients, and return it."""


class SharedNorm:
    """The norm over all gradients for several planes: one sum for the server, in the order of the planes.

    Args:
        norms: of the store.
        planes: number of planes; each adds once an iteration, on rank 0, and takes each total at most once.
    """

    def __init__(self, norms: GlobalNorm, planes: int) -> None:
        self._norms = norms
        self._planes = planes
        self._adding, self._taking = threading.Lock(), threading.Lock()
        self._squares: dict[int, dict[int, float]] = {}
        self._totals: dict[int, tuple[float, int]] = {}

    def of_plane(self, plane: int) -> GlobalNorm:
        """Return the norm for one plane."""
        return _PlaneNorm(self, plane)

    def add(self, plane: int, clock: int, squares: float) -> None:
        """Add the part of a plane."""
        with self._adding:
            parts = self._squares.setdefault(clock, {})
            parts[plane] = squares
            if len(parts) == self._planes:
                del self._squares[clock]
                self._norms.add_norm(clock, plain_sum(part for _, part in sorted(parts.items())))

    def total(self, clock: int) -> float:
        """Wait for the total; each plane calls it once an iteration."""
        with self._taking:
            total, taken = self._totals.pop(clock, (None, 0))
            if total is None:
                total = self._norms.total_norm(clock)
            if taken + 1 < self._planes:
                self._totals[clock] = total, taken + 1
            return total


class _PlaneNorm:
    """See `GlobalNorm`."""

    def __init__(self, norms: SharedNorm, plane: int) -> None:
        self._norms = norms
        self._plane = plane

    def add_norm(self, clock: int, squares: float) -> None:
        """See `GlobalNorm`."""
        self._norms.add(self._plane, clock, squares)

    def total_norm(self, clock: int) -> float:
        """See `GlobalNorm`."""
        return self._norms.total(clock)


def offered_address(offer: Mapping[str, Any], name: str, rank: int) -> str:
    """Return the address that a worker has offered under a name.

    Raises:
        RemoteProtocolError: there is none.
    """
    address = offer.get(name)
    if not isinstance(address, str) or not address.startswith("tcp://"):
        raise RemoteProtocolError(f"worker {rank} sent no address at the rendezvous")
    return address
