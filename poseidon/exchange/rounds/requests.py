"""The requests of rank 0 with local steps."""

from __future__ import annotations

from collections.abc import Container

from poseidon.exchange.job_control import Delivery, JobControl
from ps_server import Collection, Signal, SignalKind


class RoundDelivery(Delivery):
    """Requests of the outer exchange, whose clocks are rounds, with clocks that are iterations.

    All workers see a request before they end the round that it names (`Delivery`'s law for the
    outer exchange). All end the same rounds after the same iterations. So all give a request the
    same iteration, before they end it.

    Args:
        lag: rounds by which a worker may be further ahead of the others than the outer exchange
            knows.

    Attributes:
        next_end: the iteration at whose end the next whole round ends.
    """

    def __init__(self, outer: JobControl, *, lag: int = 0) -> None:
        self._outer = outer
        self._lag = lag
        self._due: dict[Signal, int] = {}
        self.next_end = 0

    def end_round(self, iteration: int, rounds: int, *, next_end: int) -> None:
        """Note that a whole round has ended, after so many iterations and rounds."""
        for signal in self._outer.requests:
            if signal.clock + self._lag <= rounds:
                self._due.setdefault(signal, iteration)
        self.next_end = next_end

    def gather(self, payload: bytes, to: Container[int] | None = None) -> Collection:
        return self._outer.gather(payload, to)

    def request(self, kind: SignalKind) -> None:
        self._outer.request(kind)

    @property
    def requests(self) -> tuple[Signal, ...]:
        """A request whose round has not ended has the earliest iteration that it may get."""
        return tuple(
            Signal(signal.kind, self._due.get(signal, self.next_end))
            for signal in self._outer.requests
        )
