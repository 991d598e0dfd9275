"""One iteration out of a worker's trace: what was done when, and how long each tensor was on its way.

Law: pure. An iteration is shown from the beginning of its span to the end of the next one's, for what it sends comes back
while the next one runs. Times are milliseconds from its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from poseidon.errors import JobError
from poseidon.metrics.trace_merge import Event

COMPUTE = 1
"""The row of the training loop's thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that was done.

    Attributes:
        row: of the process.
        kind: `forward`, `send`, ...
        name: a layer, a tensor, ...
        begin_ms: from the iteration's beginning.
        end_ms: likewise.
    """

    row: int
    kind: str
    name: str
    begin_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One tensor's way in the iteration.

    Attributes:
        name: the tensor's.
        begin_ms: its gradient leaves.
        arrival_ms: the value that follows from it is there: its last chunk has come, or its last factors are applied.
        waited_ms: how long the next iteration stood still for it.
        used_ms: that wait's end.
    """

    name: str
    begin_ms: float
    arrival_ms: float
    waited_ms: float
    used_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationView:
    """One iteration of one worker.

    Attributes:
        iteration: its number.
        length_ms: its own.
        until_ms: the end of the next one.
        bars: all that the worker did between the beginning and `until_ms`, clipped to it, by beginning.
        ways: by the order in which the tensors are used.
        rows: the rows' names.
    """

    iteration: int
    length_ms: float
    until_ms: float
    bars: tuple[Bar, ...]
    ways: tuple[Way, ...]
    rows: dict[int, str]


def view_iteration(events: Iterable[Event], iteration: int | None = None) -> IterationView:
    """Look at one iteration.

    Args:
        events: a worker's trace.
        iteration: its number; None: the one in the middle.

    Raises:
        JobError: the trace has no such iteration with another one after it.
    """
    known = list(events)
    spans = [event for event in known if event.get("ph") == "X"]
    named = {str(event.get("name")): event for event in spans if event.get("cat") == "iteration"}
    numbers = [number for name in named if (number := _number(name)) is not None]
    whole = sorted(number for number in numbers if number + 1 in numbers)
    if not whole or (iteration is not None and iteration not in whole):
        found = f"{whole[0]} to {whole[-1]}" if whole else "none"
        wanted = "an iteration" if iteration is None else f"iteration {iteration}"
        raise JobError(f"the trace does not hold {wanted} and the next; it holds {found}")
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
        ways=tuple(_ways(bars, (own_end - start) / 1000)),
        rows=_row_names(known),
    )


def _ways(bars: list[Bar], own_end_ms: float) -> list[Way]:
    """Of all tensors that began in the iteration and were waited for in the next."""
    ways = []
    begins = {bar.name: bar for bar in bars if bar.kind == "begin" and bar.begin_ms < own_end_ms}
    waits = [bar for bar in bars if bar.kind == "wait" and bar.begin_ms >= own_end_ms]
    arrivals = [bar for bar in bars if bar.row != COMPUTE and bar.kind in ("receive", "apply")]
    for wait in waits:
        begin = begins.pop(wait.name, None)
        if begin is None:
            continue
        came = [
            bar.end_ms
            for bar in arrivals
            if bar.name == wait.name and begin.begin_ms < bar.end_ms <= wait.end_ms
        ]
        ways.append(
            Way(
                name=wait.name,
                begin_ms=begin.begin_ms,
                arrival_ms=max(came, default=wait.end_ms),
                waited_ms=wait.end_ms - wait.begin_ms,
                used_ms=wait.end_ms,
            )
        )
    return ways


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
    begin, lasted = span.get("ts"), span.get("dur")
    if not isinstance(begin, int | float) or not isinstance(lasted, int | float):
        raise JobError("a span of the trace has no time")
    return float(begin), float(begin + lasted)


def _number(name: str) -> int | None:
    digits = name.removeprefix("iteration ")
    return int(digits) if digits.isdecimal() else None


def _row_names(events: list[Event]) -> dict[int, str]:
    names = {}
    for event in events:
        if event.get("name") == "thread_name" and isinstance(row := event.get("tid"), int):
            names[row] = str(cast(dict[str, object], event.get("args", {})).get("name"))
    return names
