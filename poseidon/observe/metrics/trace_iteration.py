"""One iteration of a worker's trace: its activities, and the communication of each tensor.

Law: no I/O. The view of an iteration lasts until the end of the next one, because the answers to
its messages arrive during the next one. Times are milliseconds from its start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from poseidon.errors import JobError
from poseidon.observe.metrics.trace_merge import Event

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
        end_ms: the end.
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
