"""Parsing of training logs to tables, as by Caffe's tools/extra/parse_log.py, for logs of Caffe
and Poseidon; and the same tables of what a script has logged.

Law: no I/O. A row has the outputs of a net at an iteration. Lines without a glog header and lines
before the first iteration are ignored.
"""

from __future__ import annotations

import calendar
import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from poseidon.observe.metrics.job_records import Record
from poseidon.observe.metrics.record import RATES, is_loss, own_names, repeated

# Newer glog writes the year, too.
_HEAD = re.compile(r"^[IWEF](\d{4})?(\d{2})(\d{2}) (\d{2}):(\d{2}):(\d{2})\.(\d{1,6})\s")
_NUMBER = r"""
    ([-+]?(?:
        (?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?
        | 1\.[#$]\w*                                # Visual C++ before 2015: 1.#QNAN, -1.#IND, 1.#INF00
        | (?i:nan[qs]?|inf(?:inity)?)(?:\(\w*\))?   # nan, -nan(ind), nan(0x8000000000000)
    ))
    (?=[,;]?(?:\s|$))
"""
_RATE = re.compile(rf"\blr\ =\ {_NUMBER}", re.VERBOSE)
_OUTPUT = re.compile(rf"(Train|Test)\ net\ output\ \#(\d+):\ (\S+)\ =\ {_NUMBER}(.*)", re.VERBOSE)
_ITERATION = re.compile(r"\bIteration (\d+)")
_START = "Solving"
COLUMNS = ("NumIters", "Seconds", "LearningRate")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """The outputs of a net at an iteration.

    Attributes:
        seconds: the seconds since the line `Solving ...`.
        rate: the latest learning rate; NaN before the first.
        outputs: the values by name; of several values of one name, as of a vector, each by the name
            with its number: `accuracy[0]`, `accuracy[1]`.
    """

    iteration: int
    seconds: float
    rate: float
    outputs: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """The tables of a log.

    Attributes:
        losses: the names of outputs with a loss weight, as the rows have them.
        of_script: whether the train rows have what a script has logged, and there are no test rows.
    """

    train: tuple[LogRow, ...]
    test: tuple[LogRow, ...]
    losses: frozenset[str]
    of_script: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A row while it is read; its outputs, name and value, are by their number in the log."""

    iteration: int
    seconds: float
    rate: float
    outputs: dict[int, tuple[str, float]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.outputs.values()]


def read_number(text: str) -> float:
    """Return a number of a log, in the form of any system that Caffe has run on.

    >>> read_number("1e+06"), read_number("-1.#INF00"), read_number("-nan(ind)"), read_number("1.#QNAN")
    (1000000.0, -inf, nan, nan)
    """
    sign, digits = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
    if digits.startswith(("1.#", "1.$")):  # rounded to few digits, 1.#INF is 1.#J
        return sign * math.inf if digits[3:].startswith(("INF", "J")) else math.nan
    return math.nan if digits[:3].lower() == "nan" else sign * float(digits)


def parse_log(lines: Iterable[str], year: int) -> TrainingLog:
    """Parse a log.

    Args:
        year: the year of its start, for a log that does not say it.
    """
    reader = _Reader(year)
    for line in lines:
        reader.read(line)
    return reader.log()


def script_log(records: Iterable[Record]) -> TrainingLog:
    """Return the table of what a script has logged.

    After a restart the later value of an iteration counts, and no value of a later iteration from
    before.

    Args:
        records: of `metrics.jsonl`, in its order.
    """
    start_s: float | None = None
    curves: dict[str, list[tuple[int, float, float]]] = {}
    for record in records:
        start_s = record["time"] if start_s is None else start_s
        if record["kind"] != "train":
            continue
        iteration, seconds = record["iteration"], round(record["time"] - start_s, 3)
        for name, value in record["outputs"].items():
            points = curves.setdefault(name, [])
            while points and points[-1][0] >= iteration:
                points.pop()
            points.append((iteration, seconds, math.nan if value is None else value))
    times: dict[int, float] = {}
    outputs: dict[int, dict[str, float]] = {}
    for name, points in curves.items():
        for iteration, seconds, value in points:
            times.setdefault(iteration, seconds)
            outputs.setdefault(iteration, {})[name] = value
    rates = {i: row[name] for i, row in outputs.items() for name in RATES[::-1] if name in row}
    rows = [
        LogRow(
            iteration=iteration,
            seconds=times[iteration],
            rate=rates.get(iteration, math.nan),
            outputs=outputs[iteration],
        )
        for iteration in sorted(outputs)
    ]
    losses = frozenset(filter(is_loss, curves))
    return TrainingLog(train=tuple(rows), test=(), losses=losses, of_script=True)


class _Reader:
    """The state of the parser."""

    def __init__(self, year: int) -> None:
        self._year = year
        self._start: datetime | None = None
        self._last: datetime | None = None
        self._iteration: int | None = None
        self._rate = math.nan
        self._rows: dict[str, list[_Row]] = {"Train": [], "Test": []}
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
            self._rate = read_number(found[1])
        if found := _OUTPUT.search(line):
            self._output(found, (time - self._start).total_seconds())

    def log(self) -> TrainingLog:
        losses: set[str] = set()
        tables = []
        for rows in self._rows.values():
            several = {name for row in rows for name in repeated(row.names)}
            tables.append([self._named(row, several, losses) for row in rows])
        train, test = map(_with_first_rate, tables)
        return TrainingLog(train=train, test=test, losses=frozenset(losses))

    def _named(self, row: _Row, several: set[str], losses: set[str]) -> LogRow:
        """Return a row with a name of its own for each output; add the losses' to `losses`."""
        names = own_names(row.names, several)
        losses.update(
            own for own, name in zip(names, row.names, strict=True) if name in self._losses
        )
        values = [value for _, value in row.outputs.values()]
        outputs = dict(zip(names, values, strict=True))
        return LogRow(iteration=row.iteration, seconds=row.seconds, rate=row.rate, outputs=outputs)

    def _time(self, line: str) -> datetime | None:
        found = _HEAD.match(line)
        if found is None:
            return None
        month, day, hour, minute, second = (int(part) for part in found.groups()[1:6])
        if found[1]:
            self._year = int(found[1])
        elif self._last is not None and month < self._last.month:
            self._year += 1  # the log continues in January
        if (month, day) == (2, 29) and not found[1] and not calendar.isleap(self._year):
            self._move_to_leap_year()
        try:
            time = datetime(
                self._year, month, day, hour, minute, second, int(found[7].ljust(6, "0"))
            )
        except ValueError:
            return None
        self._last = time
        return time

    def _move_to_leap_year(self) -> None:
        """Set the year, which the log leaves out, to one that has a 29 February."""
        years = next(n for n in range(1, 9) if calendar.isleap(self._year + n))
        self._year += years
        self._start, self._last = (
            time and time.replace(year=time.year + years) for time in (self._start, self._last)
        )

    def _output(self, found: re.Match[str], seconds: float) -> None:
        net, number, name = found[1], int(found[2]), found[3]
        rows = self._rows[net]
        # Output 0 begins a row, of the next iteration or of the next test net.
        if not rows or number == 0 or rows[-1].iteration != self._iteration:
            assert self._iteration is not None
            rows.append(_Row(iteration=self._iteration, seconds=seconds, rate=self._rate))
        rows[-1].outputs[number] = (name, read_number(found[4]))
        if found[5].rstrip().endswith("loss)"):
            self._losses.add(name)


def _with_first_rate(rows: Sequence[LogRow]) -> tuple[LogRow, ...]:
    """Give the first row, which precedes the first rate in the log, the rate of the second, as in
    Caffe's tool.
    """
    if len(rows) > 1 and math.isnan(rows[0].rate):
        return (replace(rows[0], rate=rows[1].rate), *rows[1:])
    return tuple(rows)


def as_csv(rows: Sequence[LogRow], *, delimiter: str = ",") -> str:
    """Return a table in the format of Caffe's tool: NumIters, Seconds, LearningRate, then the
    outputs.
    """
    names = list(dict.fromkeys(name for row in rows for name in row.outputs))
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow([*COLUMNS, *names])
    for row in rows:
        values = [row.outputs.get(name, "") for name in names]
        writer.writerow([float(row.iteration), row.seconds, row.rate, *values])
    return text.getvalue()
