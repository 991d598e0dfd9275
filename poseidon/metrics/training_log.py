"""A training log as tables: what Caffe's tools/extra/parse_log.py reads from it, of Caffe's logs of any year and ours.

Law: pure; lines in, tables out. A row is what one net put out at one iteration; a line that glog did not write is passed
over, as are all before the first iteration.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

_HEAD = re.compile(r"^[IWEF](\d{2})(\d{2}) (\d{2}):(\d{2}):(\d{2})\.(\d{1,6})\s")
_ITERATION = re.compile(r"\bIteration (\d+)")
_RATE = re.compile(r"\blr = ([-+]?[\d.]+(?:[eE][-+]?\d+)?)")
_OUTPUT = re.compile(
    r"(Train|Test) net output #(\d+): (\S+) = ([-+]?(?:nan|inf|[\d.]+(?:[eE][-+]?\d+)?))(.*)"
)
_START = "Solving"
COLUMNS = ("NumIters", "Seconds", "LearningRate")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """One net's outputs at one iteration.

    Attributes:
        iteration: iterations finished.
        seconds: since the line `Solving ...`.
        rate: the learning rate last heard of; NaN before the first.
        outputs: value by name; of several numbers of one name, the last.
    """

    iteration: int
    seconds: float
    rate: float
    outputs: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """The tables of a log.

    Attributes:
        train: rows of the train net.
        test: rows of the test nets.
        losses: outputs that weigh in the loss; the others are scores.
    """

    train: tuple[LogRow, ...]
    test: tuple[LogRow, ...]
    losses: frozenset[str]


def parse_log(lines: Iterable[str], year: int) -> TrainingLog:
    """Read a log.

    Args:
        lines: its lines.
        year: when it began; glog writes none.
    """
    reader = _Reader(year)
    for line in lines:
        reader.read(line)
    return reader.log()


class _Reader:
    """Where reading stands."""

    def __init__(self, year: int) -> None:
        self._year = year
        self._start: datetime | None = None
        self._last: datetime | None = None
        self._iteration: int | None = None
        self._rate = math.nan
        self._rows: dict[str, list[LogRow]] = {"Train": [], "Test": []}
        self._next_output = {"Train": 0, "Test": 0}
        self._losses: set[str] = set()

    def read(self, line: str) -> None:
        time = self._time(line)
        if time is None:
            return
        if self._start is None and _START in line:
            self._start = time
        if found := _ITERATION.search(line):
            self._iteration = int(found[1])
            self._start = self._start or time
        if self._iteration is None or self._start is None:
            return
        if found := _RATE.search(line):
            self._rate = float(found[1])
        if found := _OUTPUT.search(line):
            self._output(found, (time - self._start).total_seconds())

    def log(self) -> TrainingLog:
        return TrainingLog(
            train=_with_first_rate(self._rows["Train"]),
            test=_with_first_rate(self._rows["Test"]),
            losses=frozenset(self._losses),
        )

    def _time(self, line: str) -> datetime | None:
        found = _HEAD.match(line)
        if found is None:
            return None
        month, day, hour, minute, second = (int(part) for part in found.groups()[:5])
        if self._last is not None and month < self._last.month:
            self._year += 1  # the log goes on into January
        try:
            time = datetime(self._year, month, day, hour, minute, second, int(found[6].ljust(6, "0")))
        except ValueError:
            return None
        self._last = time
        return time

    def _output(self, found: re.Match[str], seconds: float) -> None:
        net, number, name = found[1], int(found[2]), found[3]
        rows = self._rows[net]
        # Output 0 begins a row: of the next iteration, or of the next test net at this one.
        if not rows or number == 0 or rows[-1].iteration != self._iteration:
            assert self._iteration is not None
            rows.append(LogRow(iteration=self._iteration, seconds=seconds, rate=self._rate))
        rows[-1].outputs[name] = float(found[4])
        if found[5].rstrip().endswith("loss)"):
            self._losses.add(name)


def _with_first_rate(rows: Sequence[LogRow]) -> tuple[LogRow, ...]:
    """Return the first row comes before the first word of a rate; it takes the second row's, as in Caffe's tool."""
    if len(rows) > 1 and math.isnan(rows[0].rate):
        return (replace(rows[0], rate=rows[1].rate), *rows[1:])
    return tuple(rows)


def as_csv(rows: Sequence[LogRow], *, delimiter: str = ",") -> str:
    """Return a table in the form of Caffe's tool: NumIters, Seconds, LearningRate, then the outputs."""
    names = list(dict.fromkeys(name for row in rows for name in row.outputs))
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow([*COLUMNS, *names])
    for row in rows:
        values = [row.outputs.get(name, "") for name in names]
        writer.writerow([float(row.iteration), row.seconds, row.rate, *values])
    return text.getvalue()
