"""Traces: spans and counters of a process in the trace-event format that Perfetto and
chrome://tracing open.

    [ {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "worker 0"}}, {"ph": "X",
    "name": "forward conv1", "cat": "forward", "pid": 7, "tid": 1, "ts": 1.25, "dur": 2.5}, {"ph":
    "C", "name": "queue", "pid": 7, "ts": 3.0, "args": {"messages": 4}} ]

Laws:
* Recording costs one tuple; a thread of the trace's own writes them, each second, in pieces that
  end with a whole event. The list's end is written by `close` alone, and the format lets it be
  missing: the file of a killed process can be read.
* Both the events that wait to be written and the events of the file are bounded; more are counted
  and dropped.
* Times are read from this machine's clock since 1970, advanced by its monotonic clock, so that the
  traces of all its processes lie on one axis. Begin and end are rounded alike, so spans that were
  nested stay nested.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from ps_server.protocol.settings import TableSpec

WRITE_EVERY_S = 1.0
MOST_WAITING = 200_000
"""Events between two writings: some 20 MB."""
MOST_EVENTS = 2_000_000
"""Events of a file: some 250 MB, about what a viewer takes in."""
MOST_NAMES = 20_000
"""Names whose text is kept: names of layers and tables recur, names of iterations do not."""
_QUARTER_NS = 250
"""Microseconds since 1970 have 51 bits before the point; a double keeps two more behind it."""


class Track(Enum):
    """The rows of a process in the viewer; spans of one row are nested or apart."""

    COMPUTE = 1
    """Forward and backward, and what the training loop's thread waits for."""
    SEND = 2
    """Messages being handed to the network."""
    RECEIVE = 3
    """Messages being taken from the network."""
    SUM = 4
    """A shard adding a message to what came before it."""
    APPLY = 5
    """A shard moving values on."""
    FACTORS = 6
    """Factors being handed to, and taken from, the connections to the other workers."""
    REBUILD = 7
    """Gradients being rebuilt from factors, and applied."""
    GPU = 8
    """What the GPU computes, by its events."""


class Tracer:
    """Records what happens; this one, of a job that is not traced, nothing. Any thread may call it."""

    def now(self) -> int:
        """Return the time in nanoseconds, for `span` later."""
        return 0

    def span(
        self,
        track: Track,
        kind: str,
        name: str,
        began_ns: int,
        ended_ns: int | None = None,
        **facts: int | float | str,
    ) -> None:
        """Record something that has ended.

        Args:
            track: the row it is shown in; it must lie within or apart from every other span there.
            kind: `forward`, `send`...: decides the colour, and begins the shown name.
            name: what it was done to: a layer, a table.
            began_ns: `now` at its beginning.
            ended_ns: `now` at its end; this moment when not given.
            facts: shown when the span is selected.
        """

    def count(self, name: str, **values: int | float) -> None:
        """Record that a counter has these values from now on."""

    def close(self) -> None:
        """Write what is left. Safe to call twice."""


NO_TRACE = Tracer()

_Span = tuple[Track, str, str, int, int, dict[str, "int | float | str"]]
_Count = tuple[str, int, dict[str, "int | float"]]


class Trace(Tracer):
    """A `Tracer` that writes a file.

    Args:
        path: the file; replaced.
        process: the process's name in the viewer, `worker 0`.
        order: where the viewer puts it among the processes; smaller is higher.
        most_events: the bound of what the file holds.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self, path: Path, *, process: str, order: int = 0, most_events: int = MOST_EVENTS
    ) -> None:
        self._events: deque[_Span | _Count] = deque()
        self._left = most_events
        self._lock = threading.Lock()
        self._dropped = 0  # under the lock
        self._pid = os.getpid()
        self._lines = _Lines(self._pid, since_1970_ns=time.time_ns() - time.perf_counter_ns())
        self._file = path.open("w", encoding="utf-8")
        head = [json.dumps(event) for event in describe_process(self._pid, process, order)]
        self._file.write("[\n" + ",\n".join(head))
        self._file.flush()
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="ps-trace", daemon=True)
        self._thread.start()

    def now(self) -> int:
        return time.perf_counter_ns()

    def span(
        self,
        track: Track,
        kind: str,
        name: str,
        began_ns: int,
        ended_ns: int | None = None,
        **facts: int | float | str,
    ) -> None:
        if len(self._events) < MOST_WAITING:
            ended_ns = time.perf_counter_ns() if ended_ns is None else ended_ns
            self._events.append((track, kind, name, began_ns, ended_ns, facts))
        else:
            self._drop()

    def count(self, name: str, **values: int | float) -> None:
        if len(self._events) < MOST_WAITING:
            self._events.append((name, time.perf_counter_ns(), values))
        else:
            self._drop()

    def _drop(self) -> None:
        with self._lock:
            self._dropped += 1

    def close(self) -> None:
        """See `Tracer`.

        Raises:
            OSError: the file could not be written; it ends where that was.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        try:
            self._end()
        finally:
            # what could not be written above cannot be written now
            with contextlib.suppress(OSError):
                self._file.close()

    def _end(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._write_piece()
        if self._dropped:
            lost = {
                "ph": "M",
                "name": "dropped_events",
                "pid": self._pid,
                "args": {"count": self._dropped},
            }
            self._file.write(",\n" + json.dumps(lost))
        self._file.write("\n]\n")
        self._file.flush()

    def _write(self) -> None:
        try:
            while not self._closing.wait(WRITE_EVERY_S):
                self._write_piece()
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: `close` raises the error
            self._failure = error

    def _write_piece(self) -> None:
        lines = []
        for _ in range(len(self._events)):
            event = self._events.popleft()
            if self._left <= 0:
                self._drop()
                continue
            self._left -= 1
            lines.append(self._lines.make(event))
        if lines:
            self._file.write(",\n" + ",\n".join(lines))
            self._file.flush()


def trace_message(
    trace: Tracer,
    track: Track,
    message: object,
    tables: Sequence[TableSpec],
    began_ns: int,
    **facts: int,
) -> None:
    """Record that a message was sent, received or acted upon, from `began_ns` until now.

    Args:
        trace: records it.
        track: which of the three.
        message: named by its table, or by its type where it has none.
        tables: by id; none while they are not known.
        began_ns: `now` at the beginning.
        facts: shown when the span is selected.
    """
    if trace is NO_TRACE:
        return
    table = getattr(message, "table", None)
    known = isinstance(table, int) and table < len(tables)
    for fact in ("chunk", "clock"):
        if isinstance(value := getattr(message, fact, None), int):
            facts[fact] = value
    if (array := getattr(message, "array", None)) is not None:
        facts["bytes"] = array.nbytes
    name = tables[table].name if known and table is not None else type(message).__name__
    trace.span(track, track.name.lower(), name, began_ns, **facts)


def describe_process(pid: int, name: str, order: int) -> list[dict[str, object]]:
    """Return the metadata events that name a process and its rows."""
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": order}},
    ]
    for track in Track:
        about: dict[str, object] = {"ph": "M", "pid": pid, "tid": track.value}
        events.append({**about, "name": "thread_name", "args": {"name": track.name.lower()}})
        events.append({**about, "name": "thread_sort_index", "args": {"sort_index": track.value}})
    return events


class _Lines:
    """Makes the text of events, of which a job has some million: recurring text is encoded once.

    Args:
        pid: of the process.
        since_1970_ns: what to add to times.
    """

    def __init__(self, pid: int, since_1970_ns: int) -> None:
        self._pid = pid
        self._since_1970_ns = since_1970_ns
        self._heads: dict[tuple[str, str, Track], str] = {}

    def make(self, event: _Span | _Count) -> str:
        """Return one event as JSON."""
        if len(event) == 3:
            name, at_ns, values = event
            at = self._quarters(at_ns) / 4
            return json.dumps({"ph": "C", "name": name, "pid": self._pid, "ts": at, "args": values})
        track, kind, name, began_ns, ended_ns, facts = event
        head = self._heads.get((kind, name, track)) or self._head(kind, name, track)
        began = self._quarters(began_ns)
        lasted = self._quarters(ended_ns) - began
        args = f', "args": {json.dumps(facts)}' if facts else ""
        return f'{head}, "ts": {began / 4!r}, "dur": {lasted / 4!r}{args}}}'

    def _head(self, kind: str, name: str, track: Track) -> str:
        event = {
            "ph": "X",
            "name": f"{kind} {name}",
            "cat": kind,
            "pid": self._pid,
            "tid": track.value,
        }
        head = json.dumps(event).removesuffix("}")
        if len(self._heads) < MOST_NAMES:
            self._heads[kind, name, track] = head
        return head

    def _quarters(self, time_ns: int) -> int:
        return (time_ns + self._since_1970_ns) // _QUARTER_NS
