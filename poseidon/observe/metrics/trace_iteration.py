"""One iteration of a worker's trace: its activities, and the communication of each tensor.

Law: no I/O. The view of an iteration lasts until the end of the next one, because the answers to
its messages arrive during the next one. Times are milliseconds from its start.

Merging of the traces of a job's processes into one file for Perfetto and chrome://tracing.

Law: the input is what `ps_server.trace` writes, an event a line. The end of a killed process's
trace may be missing; incomplete lines are skipped. In the merged file times count from the earliest
event, and processes are renumbered, because hosts may use the same process ids.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

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
    times = (event.get("ts") for path in paths for event in read_trace(path))
    earliest = min((time for time in times if isinstance(time, int | float)), default=0.0)
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


_MOST_DIGITS = 16
COMPUTE = 1
"""The row of the training thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """An activity.

    Attributes:
        row: the row (thread) of the process.
        kind: `forward`, `send`, ...
        name: the layer, the tensor, ...
        begin_ms: the start, from the start of the iteration.
    """

    row: int
    kind: str
    name: str
    begin_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The communication of a tensor in the iteration.

    Attributes:
        begin_ms: when its gradient is sent.
        arrival_ms: when the resulting value is available: its last chunk has been
            received, or its last factors applied.
        waited_ms: how long the next iteration waited for it.
        used_ms: the end of that wait.
    """

    name: str
    begin_ms: float
    arrival_ms: float
    waited_ms: float
    used_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationView:
    """An iteration of a worker.

    Attributes:
        until_ms: the end of the next one.
        bars: the activities from the start to `until_ms`, clipped, by start.
        transfers: the communication of the tensors, in the order of their use.
    """

    iteration: int
    length_ms: float
    until_ms: float
    bars: tuple[Bar, ...]
    transfers: tuple[Transfer, ...]
    rows: dict[int, str]


def view_iteration(events: Iterable[Event], iteration: int | None = None) -> IterationView:
    """Extract an iteration from a trace.

    Args:
        iteration: the number of the iteration; None: the middle one.

    Raises:
        JobError: the trace does not have this iteration and the next one.
    """
    known = list(events)
    spans = [event for event in known if event.get("ph") == "X"]
    named = {str(event.get("name")): event for event in spans if event.get("cat") == "iteration"}
    numbers = {number for name in named if (number := _number(name)) is not None}
    whole = sorted(number for number in numbers if number + 1 in numbers)
    if not whole or (iteration is not None and iteration not in whole):
        found = f"{whole[0]} to {whole[-1]}" if whole else "none"
        wanted = "an iteration" if iteration is None else f"iteration {iteration}"
        raise JobError(f"the trace does not have {wanted} and the next one; it has {found}")
    chosen = whole[len(whole) // 2] if iteration is None else iteration
    start, own_end = _times(named[f"iteration {chosen}"])
    until = _times(named[f"iteration {chosen + 1}"])[1]
    bars = [bar for span in spans if (bar := _bar(span, start, until)) is not None]
    bars.sort(key=lambda bar: (bar.begin_ms, -bar.end_ms))
    return IterationView(
        iteration=chosen,
        length_ms=(own_end - start) / 1000,
        until_ms=(until - start) / 1000,
        bars=tuple(bars),
        transfers=tuple(_transfers(bars, (own_end - start) / 1000)),
        rows=_row_names(known),
    )


def _transfers(bars: list[Bar], own_end_ms: float) -> list[Transfer]:
    """Return the communication of all tensors that began in the iteration and were used in the
    next one.
    """
    transfers = []
    begins = {bar.name: bar for bar in bars if bar.kind == "begin" and bar.begin_ms < own_end_ms}
    waits = [bar for bar in bars if bar.kind == "wait" and bar.begin_ms >= own_end_ms]
    arrivals = [bar for bar in bars if bar.row != COMPUTE and bar.kind in ("receive", "apply")]
    for wait in waits:
        begin = begins.pop(wait.name, None)
        if begin is None:
            continue
        arrived = [
            bar.end_ms
            for bar in arrivals
            if bar.name == wait.name and begin.begin_ms < bar.end_ms <= wait.end_ms
        ]
        transfers.append(
            Transfer(
                name=wait.name,
                begin_ms=begin.begin_ms,
                arrival_ms=max(arrived, default=wait.end_ms),
                waited_ms=wait.end_ms - wait.begin_ms,
                used_ms=wait.end_ms,
            )
        )
    return transfers


def _bar(span: Event, start: float, until: float) -> Bar | None:
    begin, end = _times(span)
    kind, name, row = str(span.get("cat")), str(span.get("name")), span.get("tid")
    if end < start or begin > until or not isinstance(row, int) or kind == "iteration":
        return None
    return Bar(
        row=row,
        kind=kind,
        name=name.removeprefix(f"{kind} "),
        begin_ms=(max(begin, start) - start) / 1000,
        end_ms=(min(end, until) - start) / 1000,
    )


def _times(span: Event) -> tuple[float, float]:
    begin, duration = span.get("ts"), span.get("dur")
    if not isinstance(begin, int | float) or not isinstance(duration, int | float):
        raise JobError("an event of the trace has no time")
    return float(begin), float(begin + duration)


def _number(name: str) -> int | None:
    digits = name.removeprefix("iteration ")
    return int(digits) if digits.isdecimal() and len(digits) < _MOST_DIGITS else None


def _row_names(events: list[Event]) -> dict[int, str]:
    names = {}
    for event in events:
        if event.get("name") == "thread_name" and isinstance(row := event.get("tid"), int):
            names[row] = str(cast(dict[str, object], event.get("args", {})).get("name"))
    return names
