"""The output folders of jobs, read as they grow.

Law: nothing is written. A line that is not whole yet is read later; a line that is not a record is
skipped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from poseidon.dashboard.view import JobView
from poseidon.errors import DataError, JobError
from poseidon.launcher.job_folder import is_running, log_paths
from poseidon.launcher.sinks import FILE_NAME
from poseidon.metrics.job_statistics import FILE_NAME as STATISTICS
from poseidon.metrics.job_statistics import read_statistics
from poseidon.metrics.log_merge import merge_logs
from poseidon.metrics.statistics_tables import tensor_rows
from poseidon.metrics.trace_iteration import view_iteration
from poseidon.metrics.trace_merge import read_trace
from poseidon.metrics.trace_picture import draw_iteration

MOST_LINES = 500
TRACE = "trace_worker_0.json"
_CHUNK_BYTES = 1 << 22


class JobFolder:
    """The output folder of one job. One thread uses it at a time.

    Args:
        folder: of the job.
        name: of the job on the page, where no other one has it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.view = JobView()
        self._read_bytes = 0
        self._rest = b""

    def refresh(self) -> None:
        """Read what the job has recorded since the last call, if it can be read."""
        path = self.folder / FILE_NAME
        with suppress(OSError):
            if path.stat().st_size < self._read_bytes:  # another job took the folder
                self.view, self._read_bytes, self._rest = JobView(), 0, b""
            with path.open("rb") as file:
                file.seek(self._read_bytes)
                while chunk := file.read(_CHUNK_BYTES):
                    self._read_bytes += len(chunk)
                    *lines, self._rest = (self._rest + chunk).split(b"\n")
                    for line in lines:
                        self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if isinstance(record, dict):
            self.view.add(record)

    def running(self) -> bool:
        """Return whether the job's launcher runs on this machine."""
        return is_running(self.folder)

    def tensors(self) -> list[dict[str, Any]]:
        """Return a row for each tensor, per iteration, the mean over the workers; none before the
        job has written statistics.
        """
        try:
            statistics = read_statistics(self.folder / STATISTICS)
        except (JobError, OSError):
            return []
        return [asdict(row) for row in tensor_rows(list(statistics.workers.values()))]

    def log(self, search: str) -> list[str]:
        """Return the last lines of all logs, in the order of time, each after its process.

        Args:
            search: only lines with this text, in any case; empty: all.
        """
        wanted, lines = search.lower(), []
        logs = {}
        for name, path in log_paths(self.folder).items():
            try:
                logs[name] = path.read_text(
                    encoding="utf-8", errors="backslashreplace"
                ).splitlines()
            except OSError:
                continue
        for name, line in merge_logs(logs):
            text = f"{name}: {line}"
            if wanted in text.lower():
                lines.append(text)
        return lines[-MOST_LINES:]

    def has_trace(self) -> bool:
        """Return whether the job writes a trace (--trace)."""
        return (self.folder / TRACE).exists()

    def timeline(self) -> bytes | None:
        """Return a picture of an iteration of worker 0, as SVG; None without a trace (--trace)."""
        if not self.has_trace():
            return None
        try:
            view = view_iteration(read_trace(self.folder / TRACE), None)
        except (DataError, JobError, OSError):
            return None  # the trace has no whole iteration yet
        return draw_iteration(
            view, title=f"iteration {view.iteration}: {view.length_ms:.1f} ms", kind="svg"
        )


def find_folders(given: Sequence[Path]) -> list[Path]:
    """Return the output folders of jobs, newest first.

    Args:
        given: folders of jobs, or folders that hold some.
    """
    found: dict[Path, float] = {}
    for folder in given:
        candidates = [folder]
        with suppress(OSError):
            candidates += folder.iterdir()
        for candidate in candidates:
            with suppress(OSError):  # no job, or one that this user may not look at
                found[candidate.resolve()] = (candidate / FILE_NAME).stat().st_mtime
    return sorted(found, key=lambda path: -found[path])
