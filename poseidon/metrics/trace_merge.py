"""Merging of the traces of a job's processes into one file for Perfetto and chrome://tracing.

Law: the input is what `ps_server.trace` writes, an event a line. The end of a killed process's
trace may be missing; incomplete lines are skipped. In the merged file times count from the earliest
event, and processes are renumbered, because hosts may use the same process ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from poseidon.errors import JobError

Event = dict[str, object]


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


def read_trace(path: Path) -> Iterator[Event]:
    """Yield the events of a file.

    Raises:
        JobError: the file cannot be read or is not a trace.
    """
    try:
        with path.open(encoding="utf-8", errors="backslashreplace") as stream:
            if stream.readline().strip() != "[":
                raise JobError(f"{path} is not a trace: expected a list of events, one a line")
            for line in stream:
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
    return event if isinstance(event, dict) and isinstance(event.get("ph"), str) else None
