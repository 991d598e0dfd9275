"""An exchange whose calls are seen in a trace: iterations, waits, and gradients being handed over.

Law: numbers are those of the exchange within; and every span of an iteration lies inside the iteration's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from poseidon.exchange.base import Ask, Exchange
from poseidon.exchange.observe.forwarding import ForwardingExchange
from ps_server.trace import Tracer, Track


class TracedExchange(ForwardingExchange):
    """See `Exchange`.

    Args:
        inner: gets every call.
        names: of the tensors, by index.
        trace: told what was done when.
    """

    def __init__(self, inner: Exchange, names: Sequence[str], trace: Tracer) -> None:
        super().__init__(inner)
        self._names = tuple(names)
        self._trace = trace
        self._iteration = 0
        self._began_ns = 0

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._iteration, self._began_ns = iteration, self._trace.now()
        self._inner.start(iteration, rate)

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        began_ns = self._trace.now()
        self._inner.begin(index, gradient)
        self._span("begin", self._names[index], began_ns)

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange`."""
        began_ns = self._trace.now()
        self._inner.begin_factors(index, u_KN, v_KM)
        self._span("begin", self._names[index], began_ns)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        began_ns = self._trace.now()
        self._inner.wait(index)
        self._span("wait", self._names[index], began_ns)

    def finish(self) -> None:
        """See `Exchange`."""
        began_ns = self._trace.now()
        self._inner.finish()
        self._span("finish", str(self._iteration), began_ns)
        self._span("iteration", str(self._iteration), self._began_ns)

    def settle(self) -> None:
        """See `Exchange`."""
        began_ns = self._trace.now()
        self._inner.settle()
        self._span("settle", str(self._iteration), began_ns)

    def gathered(self, ask: Ask) -> tuple[bytes, ...]:
        """See `Exchange`."""
        began_ns = self._trace.now()
        payloads = self._inner.gathered(ask)
        self._span("gather", str(self._iteration), began_ns)
        return payloads

    def _span(self, kind: str, name: str, began_ns: int) -> None:
        self._trace.span(Track.COMPUTE, kind, name, began_ns)
