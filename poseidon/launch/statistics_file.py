"""The launcher's part in statistics: keeps the last of each process in `<output>/statistics.json`.

Law: the file is whole at every moment (written beside, then renamed). A file that cannot be written is said once and
never ends a job.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from poseidon.cluster.plan import ProcessName, Role
from poseidon.cluster.supervision.loop import JobCallbacks
from poseidon.metrics.job_statistics import (
    FILE_NAME,
    JobStatistics,
    ShardStatistics,
    WorkerStatistics,
    encode_statistics,
    parse_shard,
    parse_worker,
)
from poseidon.metrics.progress import JobProgress, Pace

WRITE_EVERY_S = 1.0


class StatisticsFile:
    """Callbacks of a job that hand everything on, and keep statistics. See `JobCallbacks`.

    Args:
        inner: hears everything too.
        job: the job's id.
        folder: the job's output folder.
        now: seconds, monotonic.
    """

    def __init__(
        self, inner: JobCallbacks, job: str, folder: Path, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner = inner
        self._job = job
        self._path = folder / FILE_NAME
        self._now = now
        self._written_s = float("-inf")
        self._workers: dict[int, WorkerStatistics] = {}
        self._shards: dict[int, ShardStatistics] = {}
        self._pace, self._progress = Pace(now), JobProgress()
        self._unwritten = False
        self._broken = False

    def on_started(self) -> None:
        """See `JobCallbacks`."""
        self._inner.on_started()

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """See `JobCallbacks`."""
        if event.get("event") == "statistics":
            self._keep(name, event)
        if event.get("event") == "progress" and name.role is Role.WORKER and name.index == 0:
            self._progress = self._pace.hear(event) or self._progress
            self._unwritten = True
        self._inner.on_event(name, event)

    def on_log(self, name: ProcessName, line: str) -> None:
        """See `JobCallbacks`."""
        self._inner.on_log(name, line)

    def close(self) -> None:
        """Write what is not written yet."""
        if self._unwritten:
            self._write()

    def _keep(self, name: ProcessName, event: Mapping[str, object]) -> None:
        if name.role is Role.WORKER and (worker := parse_worker(event)) is not None:
            self._workers[name.index] = worker
        elif name.role is Role.SHARD and (shard := parse_shard(event)) is not None:
            self._shards[name.index] = shard
        else:
            return
        self._unwritten = True
        if self._now() - self._written_s >= WRITE_EVERY_S:
            self._write()

    def _write(self) -> None:
        self._written_s, self._unwritten = self._now(), False
        workers, shards = dict(sorted(self._workers.items())), dict(sorted(self._shards.items()))
        progress = replace(self._progress, loss=None)
        text = encode_statistics(
            JobStatistics(job=self._job, workers=workers, shards=shards, progress=progress)
        )
        beside = self._path.with_name(f".{FILE_NAME}.partial")
        try:
            beside.write_text(text, encoding="utf-8")
            os.replace(beside, self._path)
        except OSError as error:
            if not self._broken:
                print(f"warning: cannot write {self._path}: {error.strerror or error}", file=sys.stderr)
            self._broken = True
