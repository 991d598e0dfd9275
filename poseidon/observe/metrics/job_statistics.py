"""The statistics that the processes of a job report (`{"event": "statistics", ...}`), and the
file of the latest ones.

A worker:   {"iterations": 120, "tensors": [{"name": "conv1.0", "scheme": "ps", "bytes_out": 1, "bytes_in": 1,
             "waited_s": 0.1, "hidden_s": 0.5}, ...], "other_bytes_out": 1, "other_bytes_in": 1}
A shard:    {"bytes_in": 1, "bytes_out": 1, "messages_in": 1, "messages_out": 1, "queue": 0, "longest_queue": 3,
             "updates": 7, "busy_s": 0.5, "memory_bytes": 4096, "peak_bytes": 200000000,
             "refused": 0, "dropped": 0}
The file:   {"job": "...", "workers": {"0": {...}}, "shards": {"0": {...}}, "progress": {"iteration": 120, ...},
             "gpus": {"0": {"memory_bytes": 1, "total_bytes": 2, "busy": 0.5, "temperature_c": 60}}}

Law: all numbers count from the start of a process. `parsed` validates the events; an invalid event
is None, and counts only as a heartbeat.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from poseidon.base.foreign_files import read_in
from poseidon.errors import JobError
from poseidon.observe.metrics.progress import JobProgress
from ps_server.json_fields import value_of
from ps_server.statistics import ShardStatistics

FILE_NAME = "statistics.json"
LARGEST_BYTES = 64 << 20
T = TypeVar("T")
_LARGEST = 1e300
"""Sums of such numbers are finite."""
_MOST_DIGITS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatistics:
    """The statistics of a tensor on a worker.

    Attributes:
        name: the name, `<layer>.<blob>`.
        scheme: `ps`, `svb`, `allreduce` or `local`.
        bytes_out: the bytes sent for it by this worker; None: not counted.
        waited_s: the time for which training has waited for it.
        hidden_s: the communication time overlapped with computation; None: not measured.
        held_back: the L2 norm of what a lossy codec has held back on this worker; None: no codec.
    """

    name: str
    scheme: str = ""
    bytes_out: int | None = None
    bytes_in: int | None = None
    waited_s: float = 0.0
    hidden_s: float | None = None
    held_back: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatistics:
    """The statistics of a worker.

    Attributes:
        iterations: the number of finished iterations in this run.
        other_bytes_out: the bytes sent for other purposes: joining, initial values, clocks,
            collections, snapshots.
    """

    iterations: int
    tensors: tuple[TensorStatistics, ...]
    other_bytes_out: int = 0
    other_bytes_in: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """The state of a worker's GPU; None: not known.

    Attributes:
        memory_bytes: the memory in use, by all processes.
        busy: the busy part of the time; 0..1.
    """

    memory_bytes: int | None = None
    total_bytes: int | None = None
    busy: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatistics:
    """The latest statistics of each process of a job.

    Attributes:
        progress: the progress, without the loss.
    """

    job: str
    workers: Mapping[int, WorkerStatistics] = field(default_factory=dict)
    shards: Mapping[int, ShardStatistics] = field(default_factory=dict)
    gpus: Mapping[int, GpuReading] = field(default_factory=dict)
    progress: JobProgress = field(default_factory=JobProgress)


def parsed(kind: type[T], found: object) -> T | None:
    """Return statistics; None: they are not valid, or a number is negative or too large."""
    try:
        value: Any = value_of(kind, found)
    except ValueError:
        return None
    parts = [value, *getattr(value, "tensors", ())]
    numbers = [n for part in parts for n in asdict(part).values() if isinstance(n, int | float)]
    return value if all(0 <= n <= _LARGEST for n in numbers) else None


def encode_statistics(statistics: JobStatistics) -> str:
    """Return the text of the file."""
    return json.dumps(asdict(statistics), indent=1) + "\n"


def decode_statistics(text: str) -> JobStatistics:
    """Parse the text of the file.

    Raises:
        ValueError: the text does not come from such a file.
    """
    document = json.loads(text)
    if not isinstance(document, dict) or not isinstance(document.get("job"), str):
        raise ValueError("it has no job")
    return JobStatistics(
        job=document["job"],
        workers=_by_number(WorkerStatistics, document.get("workers")),
        shards=_by_number(ShardStatistics, document.get("shards")),
        gpus=_by_number(GpuReading, document.get("gpus", {})),
        progress=value_of(JobProgress, document.get("progress") or {}),
    )


def read_statistics(path: Path) -> JobStatistics:
    """Read the statistics in a file.

    Args:
        path: in the real path of a job's folder; see `poseidon.base.foreign_files`.

    Raises:
        JobError: the file does not exist or does not hold statistics.
    """
    try:
        return decode_statistics(read_in(path.parent, path.name, most_bytes=LARGEST_BYTES).decode())
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise JobError(f"{path} does not hold statistics of a job: {error}") from error


def _by_number(kind: type[T], value: object) -> dict[int, T]:
    if not isinstance(value, dict):
        raise ValueError("it has no list of processes")
    found = {}
    for key, event in value.items():
        statistics = parsed(kind, event)
        if statistics is None or not key.isdecimal() or len(key) > _MOST_DIGITS:
            raise ValueError(f"the statistics of process {key!r:.20} are invalid")
        found[int(key)] = statistics
    return dict(sorted(found.items()))
