"""Statistics and a trace of one worker while it trains.

Law: observation changes no bit of the training.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from poseidon.engine.worker_context import Observed
from poseidon.errors import JobError
from poseidon.exchange.cost import Choice, ExchangePlan
from poseidon.exchange.exchange import Built
from poseidon.exchange.observer import (
    ExchangeTrace,
    Observer,
    TracingHooks,
    Traffic,
    WaitTimes,
)
from poseidon.exchange.options import Scheme
from poseidon.observe.metrics.job_statistics import TensorStatistics, WorkerStatistics
from ps_server.trace import NO_TRACE, Trace, Tracer

LOGGER = logging.getLogger("poseidon.engine.observation")
STATISTICS_S = 3.0

Send = Callable[..., None]
"""Sends an event to the launcher."""


def open_trace(output: Path, rank: int) -> Tracer:
    """Open the trace of a worker: `trace_worker_<rank>.json` in the job's folder.

    Raises:
        JobError: the file cannot be written.
    """
    path = output / f"trace_worker_{rank}.json"
    try:
        return Trace(path, process=f"worker {rank}", order=rank)
    except OSError as error:
        raise JobError(f"cannot write the trace {path}: {error.strerror or error}") from error


def log_plan(plan: ExchangePlan, output: Path, number: int = 0) -> None:
    """Write the plan to the job's folder if the disk has room, and log a line about it.

    Args:
        number: of the exchange among the exchanges of the job, from 0.
    """
    path = output / (f"exchange_plan_{number + 1}.txt" if number else "exchange_plan.txt")
    LOGGER.info("%s; the scheme of each tensor is in %s", plan.summary(), path)
    try:
        path.write_text("\n".join(plan.table()) + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        LOGGER.warning(
            "cannot write %s: %s; the job continues without it", path, error.strerror or error
        )


class Observation(Observed):
    """The observation of one worker's exchange and layers.

    Args:
        built: the exchange; this object closes it.
        layers: name and module of each layer, for the trace.
        trace: records spans; its owner closes it.
    """

    def __init__(
        self,
        built: Built,
        layers: Sequence[tuple[str, nn.Module]],
        trace: Tracer,
        send: Send,
        *,
        observers: Sequence[Observer] = (),
    ) -> None:
        super().__init__(built)
        self._trace = trace
        self._send = send
        names = [choice.name for choice in built.plan.choices]
        self._waits = WaitTimes(len(names))
        self._layers = layers
        self._hooks: TracingHooks | None = None
        traces = [ExchangeTrace(names, trace)] if trace is not NO_TRACE else []
        self.exchange.observe([*observers, self._waits, *traces])
        self._closed = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(
            target=self._report, name="poseidon-statistics", daemon=True
        )
        self._thread.start()

    def watch(self) -> None:
        if self._trace is not NO_TRACE:
            self._hooks = TracingHooks(self._layers, self._trace)

    def statistics(self) -> WorkerStatistics:
        built, waits = self.built, self._waits
        choices, traffic = built.plan.choices, self.exchange.traffic()
        totals = built.client.statistics() if built.client is not None else None
        return WorkerStatistics(
            iterations=waits.iterations,
            tensors=(
                *(_tensor(choice, waits, traffic.get(choice.index)) for choice in choices),
                *(  # how long a worker waits for a row table is not known
                    TensorStatistics(
                        name=table.name,
                        scheme=Scheme.SERVER.value,
                        bytes_out=table.bytes_out,
                        bytes_in=table.bytes_in,
                    )
                    for table in (totals.row_tables if totals else ())
                ),
            ),
            other_bytes_out=totals.other_bytes_out if totals else 0,
            other_bytes_in=totals.other_bytes_in if totals else 0,
        )

    def close(self) -> None:
        """Send the last statistics, and close the exchange. Safe to call twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        if self._hooks is not None:
            self._hooks.close()
        try:
            if self._failure is not None:
                raise self._failure
            self._send_statistics(self.statistics())
        finally:
            self.exchange.close()

    def _report(self) -> None:
        try:
            while not self._closed.wait(STATISTICS_S):
                self._send_statistics(self.statistics())
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: `close` raises the error
            self._failure = error

    def _send_statistics(self, statistics: WorkerStatistics) -> None:
        self._send("statistics", **asdict(statistics))


def _tensor(choice: Choice, waits: WaitTimes, traffic: Traffic | None) -> TensorStatistics:
    """Return the statistics of one tensor.

    Its bytes are unknown where another worker exchanges for this one.
    """
    waited_s = waits.waited_s[choice.index]
    bytes_out = bytes_in = None
    hidden_s = held_back = None
    if traffic is not None:
        bytes_out, bytes_in = traffic.bytes_out, traffic.bytes_in
        hidden_s = max(0.0, traffic.on_way_s - waited_s)
        held_back = traffic.held_back
    return TensorStatistics(
        name=choice.name,
        scheme=choice.scheme.value,
        bytes_out=bytes_out,
        bytes_in=bytes_in,
        waited_s=waited_s,
        hidden_s=hidden_s,
        held_back=held_back,
    )


def combined_statistics(of_groups: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of the `statistics` event for the groups of a script together.

    The iterations of the first group count. The names of tensors of later groups begin with the
    group's number.

    Args:
        of_groups: the fields of each, by its number from 0; empty: it has reported none.
    """
    total: dict[str, Any] = {"iterations": 0, "tensors": ()}
    for number, fields in sorted(of_groups.items()):
        for name, value in fields.items():
            if name == "tensors":
                prefix = f"group {number + 1}: " if number else ""
                named = ({**tensor, "name": prefix + tensor["name"]} for tensor in value)
                total[name] = (*total[name], *named)
            elif name != "iterations" or number == 0:
                total[name] = total.get(name, 0) + value
    return total
