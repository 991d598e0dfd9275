"""Spans of a trace for the calls of an exchange: iterations, waits, and gradients that are handed over.

Law: every span of an iteration lies inside the iteration's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.exchange.observe.observed import Call, Observer
from ps_server.trace import Tracer, Track

_SPANS = {
    Call.BEGIN: "begin",
    Call.WAIT: "wait",
    Call.FINISH: "finish",
    Call.SETTLE: "settle",
    Call.GATHER: "gather",
}


class ExchangeTrace(Observer):
    """Writes a span for each call.

    Args:
        names: of the tensors, by index.
        trace: where spans go.
    """

    def __init__(self, names: Sequence[str], trace: Tracer) -> None:
        self._names = tuple(names)
        self._trace = trace
        self._iteration = 0
        self._began_ns = 0

    def after(self, call: Call, index: int, began_ns: int, ended_ns: int) -> None:
        """See `Observer`."""
        if call is Call.START:
            self._iteration, self._began_ns = index, began_ns
        kind = _SPANS.get(call)
        if kind is None:
            return
        name = self._names[index] if call in (Call.BEGIN, Call.WAIT) else str(self._iteration)
        self._trace.span(Track.COMPUTE, kind, name, began_ns, ended_ns)
        if call is Call.FINISH:
            self._trace.span(Track.COMPUTE, "iteration", name, self._began_ns, ended_ns)
