"""What a worker tells of itself while it trains: statistics to the launcher, and a trace.

Law: it looks on. Training with it gives the bits of training without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from torch import nn

from poseidon.errors import JobError
from poseidon.exchange.base import Exchange
from poseidon.exchange.build import Built
from poseidon.exchange.cost import Choice, ExchangePlan
from poseidon.exchange.observe.exchange_trace import ExchangeTrace
from poseidon.exchange.observe.observed import ObservedExchange, Observer
from poseidon.exchange.observe.tracing_hooks import TracingHooks
from poseidon.exchange.observe.traffic import Traffic
from poseidon.exchange.observe.waits import WaitTimes
from poseidon.metrics.job_statistics import TensorStatistics, WorkerStatistics
from ps_server.trace import NO_TRACE, Trace, Tracer

LOGGER = logging.getLogger("poseidon.engine.observation")
STATISTICS_S = 3.0

Tell = Callable[..., None]


def open_trace(output: Path, rank: int) -> Tracer:
    """Where a worker's spans go: `trace_worker_<rank>.json` in the job's folder.

    Raises:
        JobError: the file cannot be written.
    """
    path = output / f"trace_worker_{rank}.json"
    try:
        return Trace(path, process=f"worker {rank}", order=rank)
    except OSError as error:
        raise JobError(f"cannot write the trace {path}: {error.strerror or error}") from error


def log_plan(plan: ExchangePlan, output: Path) -> None:
    """Keep the plan in the job's folder as far as its disk has room, and log a line on it."""
    path = output / "exchange_plan.txt"
    LOGGER.info("%s; the way of each tensor is in %s", plan.in_words(), path)
    try:
        path.write_text("\n".join(plan.table()) + "\n")
    except OSError as error:
        LOGGER.warning("cannot write %s: %s; the job goes on without it", path, error.strerror or error)


class Observation:
    """One worker's.

    Args:
        built: its exchange; this object closes it.
        layers: name and module of each layer, for the trace.
        trace: where spans go; this object closes it.
        tell: writes an event to the launcher.
        observers: others of the exchange.
    """

    def __init__(
        self,
        built: Built,
        layers: Sequence[tuple[str, nn.Module]],
        trace: Tracer,
        tell: Tell,
        *,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._built = built
        self._trace = trace
        self._tell = tell
        names = [choice.name for choice in built.plan.choices]
        self._waits = WaitTimes(len(names))
        self._layers = layers
        self._hooks: TracingHooks | None = None
        traces = [ExchangeTrace(names, trace)] if trace is not NO_TRACE else []
        self.exchange: Exchange = ObservedExchange(built.exchange, [*observers, self._waits, *traces])
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._report, name="poseidon-statistics", daemon=True)
        self._thread.start()

    def watch(self) -> None:
        """See `Observed`."""
        if self._trace is not NO_TRACE:
            self._hooks = TracingHooks(self._layers, self._trace)

    def statistics(self) -> WorkerStatistics:
        """What has happened so far."""
        built, waits = self._built, self._waits
        traffic = built.traffic.traffic() if built.traffic is not None else {}
        totals = built.client.statistics() if built.client is not None else None
        return WorkerStatistics(
            iterations=waits.iterations,
            tensors=tuple(_tensor(choice, waits, traffic.get(choice.index)) for choice in built.plan.choices),
            other_bytes_out=totals.other_bytes_out if totals else 0,
            other_bytes_in=totals.other_bytes_in if totals else 0,
        )

    def close(self) -> None:
        """Tell the last, leave the exchange, and end the trace. Safe to call twice."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        if self._hooks is not None:
            self._hooks.close()
        self._tell_launcher(self.statistics())
        try:
            self.exchange.close()
        finally:
            self._trace.close()

    def _report(self) -> None:
        while not self._over.wait(STATISTICS_S):
            self._tell_launcher(self.statistics())

    def _tell_launcher(self, statistics: WorkerStatistics) -> None:
        self._tell("statistics", **asdict(statistics))


def _tensor(choice: Choice, waits: WaitTimes, traffic: Traffic | None) -> TensorStatistics:
    """One tensor; its bytes are not known where another worker speaks for this one."""
    waited_s = waits.waited_s[choice.index]
    bytes_out = bytes_in = None
    hidden_s = None
    if traffic is not None:
        bytes_out, bytes_in = traffic.bytes_out, traffic.bytes_in
        hidden_s = max(0.0, traffic.on_way_s - waited_s)
    return TensorStatistics(
        name=choice.name,
        scheme=choice.scheme.value,
        bytes_out=bytes_out,
        bytes_in=bytes_in,
        waited_s=waited_s,
        hidden_s=hidden_s,
    )
