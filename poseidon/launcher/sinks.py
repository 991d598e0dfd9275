"""The sinks of a job's records: `metrics.jsonl` in its folder, TensorBoard, Prometheus.

Law: a sink never delays a job and never ends it. Records wait in a queue of bounded length; a full
queue drops them. A sink that fails is one warning, and no more is written to it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.supervision.loop import JobListener
from poseidon.errors import JobError, UsageError
from poseidon.launcher.metrics_page import MetricsPage
from poseidon.observe.metrics.job_records import (
    Record,
    encode_record,
    progress_record,
    shard_record,
    test_record,
    train_record,
    worker_record,
)
from poseidon.observe.metrics.job_statistics import parsed
from poseidon.observe.metrics.netoutputs import LoggedMeans
from poseidon.observe.metrics.progress import ProgressMeter
from ps_server.statistics import ShardStatistics

FILE_NAME = "metrics.jsonl"
MOST_WAITING = 10_000
CLOSE_S = 5.0
PERIOD_S = 5.0
"""Seconds between two records of one process, or of the progress."""


class RecordSink(Protocol):
    """An output for the records of a job. One thread calls it."""

    name: str
    """In warnings."""

    def write(self, record: Record) -> None:
        """Write a record; any exception ends the sink."""

    def close(self) -> None:
        """Write what is buffered, and release what the sink holds."""


class JobRecords(JobListener):
    """Makes records of a job's events, and passes them to sinks on a thread of its own.

    Args:
        job: returns its id, and the counts and hosts of its processes, which may be others at each
            start.
        sinks: owned from here on.
        warn: takes a sentence when a sink fails.
        now: seconds since 1970.
        monotonic: seconds, for periods.
    """

    def __init__(
        self,
        job: Callable[[], Mapping[str, Any]],
        sinks: list[RecordSink],
        warn: Callable[[str], None],
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._sinks = sinks
        self._warn = warn
        self._now, self._monotonic = now, monotonic
        self._meter = ProgressMeter(monotonic)
        self._iterations: dict[int, int] = {}
        self._periods: dict[str, tuple[float, Record | None]] = {}
        """When the next record of each is due, and the latest one, unless it was passed on."""
        self._means = LoggedMeans(job()["workers"])
        self._started = False
        self._queue: queue.Queue[Record | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None

    def on_started(self) -> None:
        self._iterations.clear()
        self._periods = {period: (due_s, None) for period, (due_s, _) in self._periods.items()}
        self._put_means(everything=True)
        job = self._job()
        self._means = LoggedMeans(job["workers"])
        self._started = True
        self._put({"kind": "start", **job})

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        kind = event.get("event")
        if kind == "statistics" and name.role is Role.SHARD:
            shard = parsed(ShardStatistics, event)
            if shard is not None:
                record = shard_record(shard, event)
                self._put({**record, **_process(name)}, period=name.short)
        if name.role is not Role.WORKER:
            return
        iteration = event.get("iteration")
        if kind == "progress" and isinstance(iteration, int):
            self._iterations[name.index] = iteration
        if kind == "logged":
            self._means.add(name.index, event, self._monotonic())
        self._put_means()
        if kind == "alive":
            worker = worker_record(event, self._iterations.get(name.index, 0))
            if worker is not None:
                self._put({**worker, **_process(name)}, period=name.short)
        if name.index == 0:
            self._put_first(kind, event)

    def ended(self, outcome: str) -> None:
        """Record the end of the job, if it has started.

        Args:
            outcome: in one word: finished, stopped, failed.
        """
        self._put_means(everything=True)
        for _, record in self._periods.values():
            if record is not None:
                self._put(record)
        if self._started:
            self._put({"kind": "end", "outcome": outcome, "iteration": self._iterations.get(0)})

    def close(self) -> None:
        """Deliver what waits, for at most `CLOSE_S` seconds, and close the sinks."""
        self._start()
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return  # the thread is a daemon, and its sink does not answer
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._deliver, name="poseidon-sinks", daemon=True)
            thread.start()  # fails if the process may have no further thread
            self._thread = thread

    def _put_means(self, *, everything: bool = False) -> None:
        """Pass on the means of what a script has logged, once they are due."""
        for record in self._means.due(self._monotonic(), everything=everything):
            self._put(record)

    def _put_first(self, kind: object, event: Mapping[str, object]) -> None:
        if kind == "progress" and (progress := self._meter.update(event)) is not None:
            self._put(progress_record(progress), period="progress")
        if kind == "trained" and (record := train_record(event)) is not None:
            self._put(record)
        if kind == "tested" and (record := test_record(event)) is not None:
            self._put(record)
        if kind == "snapshot":
            self._put(
                {
                    "kind": "snapshot",
                    "iteration": event.get("iteration"),
                    "path": str(event.get("state")),
                }
            )

    def _put(self, record: Record, *, period: str = "") -> None:
        """Pass a record on, unless one of the same period came a short while ago."""
        if period:
            now, (due_s, _) = self._monotonic(), self._periods.get(period, (0.0, None))
            if now < due_s:
                self._periods[period] = due_s, record
                return
            self._periods[period] = now + PERIOD_S, None
        self._start()
        with suppress(queue.Full):
            self._queue.put_nowait({"time": round(self._now(), 3), **record})

    def _deliver(self) -> None:
        while (record := self._queue.get()) is not None:
            self._each(lambda sink, record=record: sink.write(record))  # type: ignore[misc]
        self._each(lambda sink: sink.close())

    def _each(self, call: Callable[[RecordSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001 - the outermost frame of a thread; a sink never ends a job
                self._sinks.remove(sink)
                reason = (
                    error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                )
                self._warn(f"no more is written to {sink.name}: {reason or type(error).__name__}")


class JsonLines:
    """Writes records to a file, one a line. See `RecordSink`."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._file: Any = None

    def write(self, record: Record) -> None:
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self._file.write(encode_record(record) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class TensorBoard:
    """Writes losses, rates and scores as TensorBoard's event files. See `RecordSink`.

    Args:
        folder: that `tensorboard --logdir` shows, or one below it.

    Raises:
        UsageError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise UsageError(
                f"--tensorboard_dir needs the package tensorboard ({error}): pip install "
                "'poseidon[tensorboard]'"
            ) from error
        self.name = f"--tensorboard_dir={folder}"
        self._event, self._summary = Event, Summary
        try:
            self._writer = EventFileWriter(str(folder))
        except OSError as error:
            raise JobError(
                f"--tensorboard_dir: cannot write to {folder}: {error.strerror or error}"
            ) from error

    def write(self, record: Record) -> None:
        values = {tag: value for tag, value in scalars(record).items() if value is not None}
        if not values:
            return
        summary = self._summary(
            value=[
                self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()
            ]
        )
        self._writer.add_event(
            self._event(wall_time=record["time"], step=record["iteration"], summary=summary)
        )

    def close(self) -> None:
        self._writer.close()


def scalars(record: Record) -> dict[str, float | None]:
    """Return the values of a record that TensorBoard shows, by tag."""
    kind = record["kind"]
    if kind == "train":
        outputs = {f"train/{name}": value for name, value in record["outputs"].items()}
        return {
            **outputs,
            "train/total_loss": record.get("loss"),
            "train/learning_rate": record.get("rate"),
        }
    if kind == "test":
        return {f"test_{record['net']}/{name}": value for name, value in record["outputs"].items()}
    if kind == "progress":
        return {
            "job/iterations_per_s": record["rate"] or None,
            "job/images_per_s": record["images_rate"] or None,
        }
    if kind == "worker":
        return {f"waited_s/worker_{record['index']}": record["waited_s"]}
    return {}


_OF_PROCESSES = ("worker", "gpu", "shard")
GAUGES: Mapping[tuple[str, ...], Mapping[str, tuple[str, str]]] = {
    ("start",): {"starts": ("starts", "Starts of the job, restarts included")},
    ("progress",): {
        "iteration": ("iteration", "Iterations that worker 0 has finished"),
        "max_iter": ("max_iteration", "Iterations of the whole job; 0: unknown"),
        "rate": ("iterations_per_second", "Iterations a second, without tests"),
        "images_rate": ("images_per_second", "Images a second of all workers"),
    },
    ("train",): {
        "loss": ("loss", "Total loss of the train net, averaged over average_loss iterations"),
        "rate": ("learning_rate", "The solver's rate"),
    },
    ("outputs of train", "output"): {
        "outputs": (
            "train_output",
            "Outputs of the train net, or what a script logs; means over all workers",
        )
    },
    ("outputs of test", "net", "output"): {
        "outputs": ("test_output", "Outputs of a test net, averaged over its iterations")
    },
    ("worker", "rank", "host"): {
        "iteration": ("worker_iteration", "Iterations of a worker"),
        "waited_s": ("worker_waited_seconds", "Time a worker has waited for others"),
    },
    ("gpu", "rank", "host"): {
        "memory_bytes": ("gpu_memory_bytes", "Memory of a worker's GPU in use, by all"),
        "total_bytes": ("gpu_memory_total_bytes", "Memory of the GPU"),
        "busy": ("gpu_busy", "Busy part of the GPU's time, 0 to 1"),
        "temperature_c": ("gpu_celsius", "Temperature of the GPU"),
    },
    ("shard", "index", "host"): {
        "bytes_in": ("shard_bytes_received", "Since the shard's start"),
        "bytes_out": ("shard_bytes_sent", "Since the shard's start"),
        "busy_s": ("shard_busy_seconds", "Time not spent waiting for messages"),
        "queue": ("shard_queue", "Messages that wait to be handled"),
    },
}
"""The gauges of each kind of record, and their labels beside the job's: by the key in the record
the name, without `poseidon_`, and what it is.
"""


class Prometheus:
    """Serves the latest values to Prometheus over HTTP, on loopback.

    See `RecordSink`; docs/metrics.md has the names.

    Args:
        port: 1..65535, or 0 for a free one.
        job: its id, a label of all values.

    Raises:
        JobError: the port cannot be used.
    """

    def __init__(self, port: int, job: str) -> None:
        try:
            self._page = MetricsPage(port)
        except OSError as error:
            why = (error.strerror or str(error)).partition(" (while")[0]
            raise JobError(
                f"--metrics_port={port}: {why}; choose a different port, or 0 for a free one"
            ) from error
        self.port = self._page.port
        self.name = f"--metrics_port={self.port}"
        self._job = job
        self._gauges = {
            kind: {
                key: self._page.gauge(f"poseidon_{name}", text, "job", *labels)
                for key, (name, text) in of_kind.items()
            }
            for (kind, *labels), of_kind in GAUGES.items()
        }

    def write(self, record: Record) -> None:
        kind, gauges = record["kind"], self._gauges.get(record["kind"], {})
        labels: tuple[str, ...] = ()
        if kind == "start":
            starts = gauges["starts"]
            starts.set(starts.values.get((self._job,), 0) + 1, self._job)
            for gauge in (g for of in _OF_PROCESSES for g in self._gauges[of].values()):
                gauge.values.clear()  # this start may have fewer of them, or on other hosts
            return
        if kind == "test":
            labels = (str(record["net"]),)
        elif kind in _OF_PROCESSES:
            labels = (str(record["index"]), record["host"])
        for name, gauge in gauges.items():
            if name in record:  # a script need not log loss and rate
                gauge.set(_number(record[name]), self._job, *labels)
        for name, value in record.get("outputs", {}).items():
            outputs = self._gauges[f"outputs of {kind}"]["outputs"]
            outputs.set(_number(value), self._job, *labels, name)
        for name, value in record.get("gpu", {}).items():
            self._gauges["gpu"][name].set(value, self._job, *labels)

    def close(self) -> None:
        self._page.close()


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _process(name: ProcessName) -> Record:
    return {"index": name.index, "client": name.client, "host": name.host}
