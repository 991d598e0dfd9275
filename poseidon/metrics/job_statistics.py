"""What the processes of a job say of themselves (`{"event": "statistics", ...}`), and the file that keeps the last of each.

A worker:   {"iterations": 120, "tensors": [{"name": "conv1.0", "scheme": "ps", "bytes_out": 1, "bytes_in": 1,
             "waited_s": 0.1, "hidden_s": 0.5}, ...], "other_bytes_out": 1, "other_bytes_in": 1}
A shard:    {"bytes_in": 1, "bytes_out": 1, "messages_in": 1, "messages_out": 1, "queue": 0, "longest_queue": 3,
             "updates": 7, "busy_s": 0.5, "memory_bytes": 4096, "peak_bytes": 200000000,
             "refused": 0, "dropped": 0}
The file:   {"job": "...", "workers": {"0": {...}}, "shards": {"0": {...}}, "progress": {"iteration": 120, ...}}

Law: numbers count from the start of a process. `parse_worker` and `parse_shard` are the border: what does not fit is
None there, as any event that is not understood is a sign of life and no more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast

from poseidon.errors import JobError
from poseidon.metrics.progress import JobProgress

FILE_NAME = "statistics.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatistics:
    """One tensor, as seen by one worker.

    Attributes:
        name: the tensor's, `<layer>.<blob>`.
        scheme: how it travels: `ps`, `svb`, `allreduce` or `local`.
        bytes_out: sent for it by this worker; None: not counted.
        bytes_in: received for it.
        waited_s: how long training has stood still for it.
        hidden_s: how long it was on its way while training went on; None: not measured.
    """

    name: str
    scheme: str = ""
    bytes_out: int | None = None
    bytes_in: int | None = None
    waited_s: float = 0.0
    hidden_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatistics:
    """One worker.

    Attributes:
        iterations: how many it has finished in this run.
        tensors: in the order of the net.
        other_bytes_out: sent for no tensor's iterations: joining, first values, clocks, meetings, snapshots.
        other_bytes_in: likewise.
    """

    iterations: int
    tensors: tuple[TensorStatistics, ...] = ()
    other_bytes_out: int = 0
    other_bytes_in: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatistics:
    """One shard; see `ps_server.statistics`."""

    bytes_in: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    messages_out: int = 0
    queue: int = 0
    longest_queue: int = 0
    updates: int = 0
    busy_s: float = 0.0
    memory_bytes: int = 0
    peak_bytes: int = 0
    refused: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatistics:
    """The last that each process of a job has said.

    Attributes:
        job: its id.
        workers: by rank.
        shards: by index.
        progress: how far it has come, without its loss.
    """

    job: str
    workers: Mapping[int, WorkerStatistics] = field(default_factory=dict)
    shards: Mapping[int, ShardStatistics] = field(default_factory=dict)
    progress: JobProgress = field(default_factory=JobProgress)


def parse_worker(said: Mapping[str, object]) -> WorkerStatistics | None:
    """What a worker's event says, or None."""
    try:
        tensors = tuple(TensorStatistics(**_checked(TensorStatistics, part)) for part in _parts(said))
        return WorkerStatistics(**{**_checked(WorkerStatistics, said), "tensors": tensors})
    except (ValueError, TypeError):
        return None


def parse_shard(said: Mapping[str, object]) -> ShardStatistics | None:
    """What a shard's event says, or None."""
    try:
        return ShardStatistics(**_checked(ShardStatistics, said))
    except (ValueError, TypeError):
        return None


def encode_statistics(statistics: JobStatistics) -> str:
    """Return the file's text."""
    return json.dumps(asdict(statistics), indent=1) + "\n"


def decode_statistics(text: str) -> JobStatistics:
    """What `encode_statistics` wrote.

    Raises:
        ValueError: the text is something else.
    """
    document = json.loads(text)
    if not isinstance(document, dict) or not isinstance(document.get("job"), str):
        raise ValueError("it names no job")
    return JobStatistics(
        job=document["job"],
        workers=_by_number(document.get("workers"), parse_worker),
        shards=_by_number(document.get("shards"), parse_shard),
        progress=JobProgress(**_checked(JobProgress, document.get("progress") or {})),
    )


def read_statistics(path: Path) -> JobStatistics:
    """Return the statistics in a file.

    Raises:
        JobError: there is no such file, or it holds something else.
    """
    try:
        return decode_statistics(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise JobError(f"{path} holds no statistics of a job: {error}") from error


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "int | None": (int, NoneType),
    "float | None": (int, float, NoneType),
}


def _checked(kind: type, said: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a dataclass that are there, each of its type; numbers finite and not below 0."""
    found: dict[str, Any] = {}
    for name in fields(kind):
        value, legal = said.get(name.name, MISSING), _KINDS.get(str(name.type))
        if value is MISSING or legal is None:
            continue
        number = isinstance(value, int | float)
        if type(value) not in legal or (number and not 0 <= cast(float, value) < math.inf):
            raise ValueError(f"{name.name} is {value!r:.60}")
        found[name.name] = value
    return found


def _parts(said: Mapping[str, object]) -> list[dict[str, object]]:
    parts = said.get("tensors")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ValueError("it lists no tensors")
    return parts


T = TypeVar("T")


def _by_number(value: object, parse: Callable[[Mapping[str, object]], T | None]) -> dict[int, T]:
    if not isinstance(value, dict):
        raise ValueError("it lists no processes")
    found = {}
    for key, said in value.items():
        parsed = parse(said) if isinstance(said, dict) else None
        if parsed is None or not key.isdecimal():
            raise ValueError(f"what process {key!r:.20} said is not understood")
        found[int(key)] = parsed
    return dict(sorted(found.items()))
