"""Merging of the traces of a job's processes into one file for Perfetto and chrome://tracing.

Law: the input is what `ps_server.trace` writes, an event a line. The end of a killed process's
trace may be missing; incomplete lines are skipped. In the merged file times count from the earliest
event, and processes are renumbered, because hosts may use the same process ids.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from poseidon.base.foreign_files import open_in
from poseidon.errors import JobError

Event = dict[str, object]
_LONGEST_LINE = 1 << 20
_LARGEST_NUMBER = 2**53


def trace_files(folder: Path) -> list[Path]:
    """Return the trace files of a job, workers first, by number.

    Raises:
        JobError: the folder has no traces.
    """
    found = []
    for kind in ("worker", "shard"):
        stems = {
            path: path.stem.removeprefix(f"trace_{kind}_")
            for path in folder.glob(f"trace_{kind}_*.json")
        }
        found += sorted(
            (path for path in stems if stems[path].isdecimal()), key=lambda path: int(stems[path])
        )
    if not found:
        raise JobError(f"{folder} has no traces; expected the folder of a job with --trace")
    return found


def read_trace(path: Path, *, most_bytes: int | None = None) -> Iterator[Event]:
    """Yield the events of a file.

    Args:
        path: in the real path of a job's folder; see `open_in`.
        most_bytes: a larger one is not read; None: of any size.

    Raises:
        JobError: the file cannot be read or is not a trace.
    """
    try:
        with io.TextIOWrapper(
            open_in(path.parent, path.name, most_bytes=most_bytes),
            encoding="utf-8",
            errors="backslashreplace",
        ) as stream:
            if stream.readline(_LONGEST_LINE).strip() != "[":
                raise JobError(f"{path} is not a trace: expected a list of events, one a line")
            while line := stream.readline(_LONGEST_LINE):
                event = _event(line)
                if event is not None:
                    yield event
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror or error}") from error


def merge(paths: Sequence[Path], write: Callable[[str], object]) -> int:
    """Merge traces. Return the number of events.

    Raises:
        JobError: a file cannot be read or is not a trace.
    """
    earliest = min((time for path in paths for time in _times(path)), default=0.0)
    count = 0
    for process, path in enumerate(paths):
        for event in read_trace(path):
            event["pid"] = process
            if isinstance(time := event.get("ts"), int | float):
                event["ts"] = time - earliest
            if event.get("name") == "process_sort_index":
                event["args"] = {"sort_index": process}
            write(("[\n" if count == 0 else ",\n") + json.dumps(event))
            count += 1
    write("\n]\n" if count else "[]\n")
    return count


def _times(path: Path) -> Iterator[float]:
    for event in read_trace(path):
        if isinstance(time := event.get("ts"), int | float):
            yield time


def _event(line: str) -> Event | None:
    try:
        event = json.loads(line.strip().removesuffix(","))
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
        return None
    numbers = [event[name] for name in ("ts", "dur", "tid") if name in event]
    valid = all(
        isinstance(number, int | float) and 0 <= number <= _LARGEST_NUMBER for number in numbers
    )
    return event if valid and isinstance(event.get("args", {}), dict) else None
