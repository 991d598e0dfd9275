"""The state of a job as the page shows it, from the records of `metrics.jsonl` (docs/metrics.md).

Law: pure; the time comes with every call. Records are checked before (`decode_record`); what a
file of any length can make it keep is bounded.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from poseidon.observe.dashboard.bottleneck import JobLimit, ShardLoad, WorkerLoad, find_bottleneck
from poseidon.observe.metrics.job_records import Record
from poseidon.observe.metrics.job_statistics import GpuReading, parsed
from poseidon.observe.metrics.record import RATES, is_loss, score
from poseidon.observe.metrics.statistics_tables import UNKNOWN, gpu_cells

WINDOW_S = 20.0
"""Seconds over which loads are measured."""
SILENT_S = 15.0
"""A process of which nothing came for so long is silent."""
MOST_POINTS = 2000
MOST_EVENTS = 200
MOST_CURVES = 1000
MOST_PANELS = 40
MOST_PROCESSES = 10_000
MOST_RECENT = 100
"""Records of a process that are kept; in `WINDOW_S` a job writes four."""


PANELS = {"loss": "Loss", "images/s": "Images a second", "learning rate": "Learning rate"}
"""The panels of curves that every kind of job may have."""


class Series:
    """A curve: pairs of iteration and value, thinned out when there are too many.

    Args:
        panel: in which the curve is drawn; empty: in none.

    Attributes:
        points: so far.
        revision: grows when points were dropped; with the same revision only points were added.
    """

    def __init__(self, panel: str = "") -> None:
        self.panel = panel
        self.points: list[tuple[float, float]] = []
        self.revision = 0
        self._step, self._skipped = 1, 0

    def add(self, x: float, y: float) -> None:
        """Add a point; every second one is dropped each time the curve has grown too long."""
        self._skipped += 1
        if self._skipped < self._step:
            return
        self._skipped = 0
        if self.points and x < self.points[-1][0]:  # the job was restarted from a snapshot
            self.points = [point for point in self.points if point[0] < x]
            self.revision += 1
        self.points.append((x, y))
        if len(self.points) > MOST_POINTS:
            self.points, self._step = self.points[::2], 2 * self._step
            self.revision += 1


class JobView:
    """The state of one job. Records are added in the order of the file."""

    def __init__(self) -> None:
        self.job: Mapping[str, Any] = {}
        self.series: dict[str, Series] = {}
        self.outcome = ""
        self.updated_s = self.started_s = 0.0
        self._progress: Record = {}
        self._logged_loss: float | None = None
        self._recent: dict[tuple[str, int], deque[Record]] = {}
        self._events: deque[tuple[float, str]] = deque(maxlen=MOST_EVENTS)

    def add(self, record: Record) -> None:
        """Add a record that `decode_record` has returned."""
        kind, now = record["kind"], record["time"]
        self.updated_s = max(self.updated_s, now)
        if kind == "start":
            self._start(record, now)
        elif kind == "progress":
            self._progress = record
            if record["images_rate"]:
                self._point("images/s", record, record["images_rate"])
        elif kind == "train":
            if self.job.get("script") and record["loss"] is not None:
                self._logged_loss = record["loss"]
            self._point("loss", record, record["loss"])
            self._point("learning rate", record, record["rate"])
            train = "" if self.job.get("script") else "train "
            for name, value in record["outputs"].items():
                if train or name not in ("loss", *RATES):
                    self._point(f"{train}{name}", record, value)
        elif kind == "test":
            for name, value in record["outputs"].items():
                self._point(f"test {record['net']} {name}", record, value)
        elif kind in ("worker", "shard"):
            process = (kind, record["index"])
            if process not in self._recent and len(self._recent) == MOST_PROCESSES:
                return
            recent = self._recent.setdefault(process, deque(maxlen=MOST_RECENT))
            recent.append(record)
            while len(recent) > 2 and now - recent[1]["time"] >= WINDOW_S:
                recent.popleft()
        elif kind == "snapshot":
            self._events.append(
                (now, f"snapshot at iteration {record['iteration']}: {record['path']}")
            )
        elif kind == "end":
            self.outcome = str(record["outcome"])
            where = ""
            if record["iteration"] is not None:
                self._progress = {**self._progress, "iteration": record["iteration"]}
                where = f" at iteration {record['iteration']}"
            self._events.append((now, f"the job {self.outcome}{where}"))

    def _start(self, record: Record, now: float) -> None:
        restarted = bool(self.job)
        self.started_s = self.started_s or now
        self.job, self.outcome = record, ""
        self._recent.clear()
        self._events.append((now, "the job was restarted" if restarted else "the job was started"))

    def _point(self, name: str, record: Record, value: float | None) -> None:
        if value is None or (name not in self.series and len(self.series) == MOST_CURVES):
            return
        if name not in self.series:
            self.series[name] = Series(self._panel(name))
        self.series[name].add(record["iteration"], value)

    def _panel(self, name: str) -> str:
        """Return the title of the panel of a new curve; empty: it is not drawn."""
        kind, _, rest = name.partition(" ")
        if name in PANELS:
            return PANELS[name]
        if kind == "test" and rest:
            return "Loss" if "loss" in name else "Scores"
        if kind == "train" and rest:  # the total loss has a curve
            return "" if "loss" in name else "Scores"
        panels = {series.panel for series in self.series.values()}
        panel = "Loss" if is_loss(name) else score(name)
        panel = panel.capitalize() if panel.isalpha() else panel
        return panel if panel in panels or len(panels) < MOST_PANELS else "Others"

    def loads(self) -> tuple[list[WorkerLoad], list[ShardLoad]]:
        """Return the loads of workers and shards over the last seconds."""
        workers, shards = [], []
        for (kind, index), recent in sorted(self._recent.items()):
            first, last = recent[0], recent[-1]
            seconds = last["time"] - first["time"]
            if seconds <= 0:
                continue
            names = self.job.get("addresses", {})
            sending = {
                names.get(host, host): _part(busy - first["sending_s"].get(host, 0.0), seconds)
                for host, busy in last["sending_s"].items()
            }
            if kind == "shard":
                busy = max(
                    _part(last[name] - first[name], seconds) for name in ("busy_s", "stalled_s")
                )
                shards.append(ShardLoad(index=index, host=last["host"], busy=busy, sending=sending))
                continue
            workers.append(
                WorkerLoad(
                    rank=index,
                    host=last["host"],
                    iterations=max(0.0, (last["iteration"] - first["iteration"]) / seconds),
                    waited=_part(last["waited_s"] - first["waited_s"], seconds),
                    read=_part(last["read_s"] - first["read_s"], seconds),
                    sending=sending,
                    host_busy=statistics.median(record["host_busy"] for record in recent),
                )
            )
        return workers, shards

    def summary(self, now: float, *, running: bool) -> dict[str, Any]:
        """Return what the page shows beside the curves.

        Args:
            now: seconds since 1970.
        """
        workers, shards = self.loads()
        bottleneck = find_bottleneck(workers, shards)
        if bottleneck.cause is JobLimit.UNKNOWN and self.outcome:
            bottleneck = replace(
                bottleneck, sentence="The job was too short to name what limits it."
            )
        progress = self._progress
        rate = progress.get("rate", 0.0)
        left = progress.get("max_iter", 0) - progress.get("iteration", 0)
        return {
            "job": self.job.get("job", ""),
            "state": self._state(running=running),
            "started": self.started_s,
            "updated": self.updated_s,
            "iteration": progress.get("iteration", 0),
            "max_iter": progress.get("max_iter", 0),
            "loss": self._loss(),
            "rate": rate,
            "images_rate": progress.get("images_rate", 0.0),
            "eta_s": left / rate if running and rate and left > 0 else None,
            "bottleneck": {**asdict(bottleneck), "cause": bottleneck.cause.value},
            "workers": self._worker_rows(workers, now, running=running),
            "shards": self._shard_rows(shards),
            "events": [{"time": time, "text": text} for time, text in self._events],
        }

    def _loss(self) -> float | None:
        """Return the latest loss; of a script, the last finite one that it has logged."""
        return self._progress.get("loss") if self._logged_loss is None else self._logged_loss

    def _state(self, *, running: bool) -> str:
        if self.outcome:
            return self.outcome
        if running:
            return "running" if self.job else "starting"
        return "lost" if self.job else "never started"

    def _worker_rows(
        self, loads: Sequence[WorkerLoad], now: float, *, running: bool
    ) -> list[dict[str, Any]]:
        by_rank = {load.rank: load for load in loads}
        latest = [
            recent[-1] for (kind, _), recent in sorted(self._recent.items()) if kind == "worker"
        ]
        leads = _leads(latest, by_rank)
        rows = []
        for record in latest:
            load = by_rank.get(record["index"])
            gpu = parsed(GpuReading, record.get("gpu"))
            rows.append(
                {
                    "rank": record["index"],
                    "client": record["client"],
                    "host": record["host"],
                    "iteration": record["iteration"],
                    "lead": leads[record["index"]],
                    "waited": load.waited if load else None,
                    "read": load.read if load else None,
                    "own_s": (load.own_s or None) if load else None,
                    "gpu": [text for text in gpu_cells(gpu or GpuReading()) if text != UNKNOWN],
                    "silent": running and not self.outcome and now - record["time"] > SILENT_S,
                }
            )
        return rows

    def _shard_rows(self, loads: Sequence[ShardLoad]) -> list[dict[str, Any]]:
        busy = {load.index: load.busy for load in loads}
        rows = []
        for (kind, index), recent in sorted(self._recent.items()):
            if kind == "shard":
                first, last = recent[0], recent[-1]
                seconds = last["time"] - first["time"]
                rows.append(
                    {
                        "index": index,
                        "host": last["host"],
                        "busy": busy.get(index),
                        "queue": last["queue"],
                        "in_per_s": (last["bytes_in"] - first["bytes_in"]) / seconds
                        if seconds > 0
                        else None,
                        "out_per_s": (last["bytes_out"] - first["bytes_out"]) / seconds
                        if seconds > 0
                        else None,
                    }
                )
        return rows


def _leads(latest: Sequence[Record], loads: Mapping[int, WorkerLoad]) -> dict[int, int]:
    """Return the iterations that each worker is ahead of the last one, at the moment of the
    earliest record: an estimate, within the bound that holds.
    """
    then = min((record["time"] for record in latest), default=0.0)
    clocks = {}
    for record in latest:
        load = loads.get(record["index"])
        later_s = record["time"] - then
        clocks[record["index"]] = record["iteration"] - (load.iterations * later_s if load else 0.0)
    first = min(clocks.values(), default=0.0)
    bounds = [math.inf if (most := record["most_lead"]) is None else most for record in latest]
    most = max(bounds, default=0)
    return {rank: round(min(clock - first, most)) for rank, clock in clocks.items()}


def _part(busy_s: float, seconds: float) -> float:
    return min(1.0, max(0.0, busy_s / seconds))
