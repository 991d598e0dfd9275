"""The output folders of jobs, read as they grow.

Law: nothing is written. A line that is not whole yet is read later; a line that is not a record is
skipped. The folders may be other users': see `poseidon.base.foreign_files`. What is wrong with one of
them is shown with its job, and the others are shown as always.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from poseidon.base.foreign_files import open_in, read_end
from poseidon.errors import DataError, JobError
from poseidon.launcher.job_folder import is_running, log_paths
from poseidon.launcher.sinks import FILE_NAME
from poseidon.observe.dashboard.view import JobView
from poseidon.observe.metrics.glog_lines import merge_logs
from poseidon.observe.metrics.job_records import LONGEST_LINE, decode_record
from poseidon.observe.metrics.job_statistics import FILE_NAME as STATISTICS
from poseidon.observe.metrics.job_statistics import read_statistics
from poseidon.observe.metrics.statistics_tables import tensor_rows
from poseidon.observe.metrics.trace_iteration import read_trace, view_iteration
from poseidon.observe.metrics.trace_picture import draw_iteration

MOST_LINES = 500
TRACE = "trace_worker_0.json"
_CHUNK_BYTES = 1 << 22
_MOST_CHUNKS = 16
_LOG_BYTES = 8 << 20
_TRACE_BYTES = 256 << 20


class JobFolder:
    """The output folder of one job. One thread uses it at a time.

    Args:
        name: of the job on the page, where no other one has it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.view = JobView()
        self.problem = ""
        self._read_bytes = 0
        self._rest = b""

    def refresh(self) -> None:
        """Read what the job has recorded since the last call, if it can be read: of a large file
        a part in each call. `problem` is a sentence about a file that is refused, else empty.
        """
        self.problem = ""
        try:
            with open_in(self.folder, FILE_NAME) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._read_bytes:  # another job took the folder
                    self.view, self._read_bytes, self._rest = JobView(), 0, b""
                file.seek(self._read_bytes)
                for _ in range(_MOST_CHUNKS):
                    if not (chunk := file.read(_CHUNK_BYTES)):
                        break
                    self._read_bytes += len(chunk)
                    self._add(chunk)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.problem = f"{FILE_NAME} cannot be read: {error.strerror}"

    def _add(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            record = decode_record(line)
            if record is not None:
                self.view.add(record)
        if len(self._rest) > LONGEST_LINE:  # no record; its rest is none either
            self._rest = b"-"

    def summary(self) -> dict[str, Any]:
        """Return what the page shows beside the curves; see `JobView.summary`."""
        summary = self.view.summary(time.time(), running=self.running())
        if self.problem:
            summary["events"].append({"time": time.time() // 1, "text": self.problem})
        return summary

    def running(self) -> bool:
        """Return whether the job's launcher runs on this machine."""
        try:
            return is_running(self.folder)
        except JobError:
            return False  # this user's records cannot be read

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
                content = read_end(
                    self.folder, path.relative_to(self.folder), most_bytes=_LOG_BYTES
                )
            except OSError:
                continue
            logs[name] = content.decode(errors="backslashreplace").splitlines()
        for name, line in merge_logs(logs):
            text = f"{name}: {line}"
            if wanted in text.lower():
                lines.append(text)
        return lines[-MOST_LINES:]

    def has_trace(self) -> bool:
        """Return whether the job writes a trace (--trace)."""
        try:
            open_in(self.folder, TRACE, most_bytes=_TRACE_BYTES).close()
        except OSError:
            return False
        return True

    def timeline(self) -> bytes | None:
        """Return a picture of an iteration of worker 0, as SVG; None without a trace (--trace)."""
        if not self.has_trace():
            return None
        try:
            view = view_iteration(read_trace(self.folder / TRACE, most_bytes=_TRACE_BYTES), None)
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
        real = folder.resolve()
        candidates = [real]
        with suppress(OSError):
            candidates += (path for path in real.iterdir() if not path.is_symlink())
        for candidate in candidates:
            with suppress(OSError):  # no job, or one that this user may not look at
                found[candidate] = (candidate / FILE_NAME).lstat().st_mtime
    return sorted(found, key=lambda path: -found[path])
