"""An exchange that hands every call on to another one: the base of those that look on, or change a few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from poseidon.exchange.base import Ask, Exchange, History
from ps_server import Signal, SignalKind


class ForwardingExchange:
    """See `Exchange`.

    Args:
        inner: gets every call.
    """

    def __init__(self, inner: Exchange) -> None:
        self._inner = inner

    def open(self, histories: Sequence[History] | None) -> None:
        """See `Exchange`."""
        self._inner.open(histories)

    def reopen(self, histories: Sequence[History] | None, clock: int) -> None:
        """See `Exchange`."""
        self._inner.reopen(histories, clock)

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._inner.start(iteration, rate)

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        self._inner.begin(index, gradient)

    def takes_factors(self, index: int) -> bool:
        """See `Exchange`."""
        return self._inner.takes_factors(index)

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange`."""
        self._inner.begin_factors(index, u_KN, v_KM)

    def release(self, index: int) -> None:
        """See `Exchange`."""
        self._inner.release(index)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        self._inner.wait(index)

    def finish(self) -> None:
        """See `Exchange`."""
        self._inner.finish()

    def settle(self) -> None:
        """See `Exchange`."""
        self._inner.settle()

    def histories(self) -> list[History]:
        """See `Exchange`."""
        return self._inner.histories()

    def replicated_state(self) -> Mapping[str, Tensor]:
        """See `Exchange`."""
        return self._inner.replicated_state()

    def gather(self, payload: bytes) -> Ask:
        """See `Exchange`."""
        return self._inner.gather(payload)

    def gathered(self, ask: Ask) -> tuple[bytes, ...]:
        """See `Exchange`."""
        return self._inner.gathered(ask)

    def signal(self, kind: SignalKind) -> None:
        """See `Exchange`."""
        self._inner.signal(kind)

    @property
    def signals(self) -> tuple[Signal, ...]:
        """See `Exchange`."""
        return self._inner.signals

    def close(self) -> None:
        """See `Exchange`."""
        self._inner.close()
