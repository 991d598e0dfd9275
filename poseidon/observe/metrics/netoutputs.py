"""`<prefix>.netoutputs`: the losses and outputs of a job, averaged over all workers, as CSV.

    Iteration,time,loss,loss,
    0,0.1,2.30245,2.30245,
    100,20.4,1.68744,1.68744,

    Iteration,time,loss,accuracy,loss,
    0,6.2,2.30268,0.0926,2.30268,

The format is the original Poseidon's: every row ends with a comma, and an empty line separates the
train net and the test nets. The first `loss` is the total; the other columns are the outputs by
name. Train outputs are multiplied by their loss weight, test outputs are not.

Laws:
* The file is always complete, because it is replaced atomically. The original wrote it only at the
  end of a job.
* Writing takes at most one fiftieth of the time. Rows that exceed this are buffered until a later
  row or `close`.
* A full disk does not stop training. It is reported once, and rows are buffered until the file can
  be written.

The means over workers of what a script logs (`poseidon.log`), as `train` records.

Law: pure. A mean has all values that workers have sent for an iteration until it is recorded, each
with the same weight, and does not depend on the order in which they came. It is recorded once every
worker has sent a later iteration of that name, or `WAIT_S` after its last value: some workers may
log nothing under that name. What comes later is left out. Where a worker goes back to an earlier
iteration, the script trains once more.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from poseidon.base.durable import write_whole
from poseidon.errors import JobError
from poseidon.observe.metrics.glog_lines import number
from poseidon.observe.metrics.job_records import Record, finite
from poseidon.observe.metrics.record import RATES, TestRecord, TrainRecord

LOGGER = logging.getLogger("poseidon.observe.metrics.netoutputs")
_FULL = (errno.ENOSPC, errno.EDQUOT)
# After a write that took t seconds, the next one is at least this many times t later.
_PAUSE_FACTOR = 49.0


class NetOutputs:
    """A sink that writes the file.

    Args:
        prefix: the file is `<prefix>.netoutputs`, or the prefix itself if it ends in
            netoutputs. An older file is replaced.
        resumed_at: the iteration from which the same job resumes; an older file's rows before it
            are kept.
    """

    def __init__(
        self, prefix: Path, *, resumed_at: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        named = prefix.name.endswith("netoutputs")
        self._path = prefix if named else prefix.with_name(prefix.name + ".netoutputs")
        self._clock = clock
        self._train: list[str] = []
        self._tests: dict[int, list[str]] = {}
        self._waiting = self._reported = False
        self._write_from_s = clock()
        if resumed_at:
            self._read_earlier_rows(resumed_at)

    @property
    def path(self) -> Path:
        return self._path

    def on_train(self, record: TrainRecord) -> None:
        """Add a row for the train net.

        Raises:
            JobError: the file cannot be written.
        """
        _add(self._train, record, record.loss, weighted=True)
        self._write_if_due()

    def on_test(self, record: TestRecord) -> None:
        """Add a row for a test net.

        Raises:
            JobError: the file cannot be written.
        """
        rows = self._tests.setdefault(record.net, [])
        total = sum(output.value * output.loss_weight for output in record.outputs)
        loss = total if record.loss is None else record.loss
        _add(rows, record, loss, weighted=False)
        self._write_if_due()

    def close(self) -> None:
        """Write buffered rows.

        Raises:
            JobError: the file cannot be written.
        """
        if self._waiting:
            self._write()

    def _read_earlier_rows(self, before: int) -> None:
        """Read the rows of earlier iterations from an existing file."""
        with suppress(OSError, UnicodeDecodeError):
            # With a leading newline, so that an empty first section is recognized.
            train, *tests = ("\n" + self._path.read_text(encoding="utf-8")).split("\n\n")
            self._train += _rows_before(train, before)
            for net, section in enumerate(tests):
                self._tests[net] = _rows_before(section, before)

    def _write_if_due(self) -> None:
        self._waiting = True
        if self._clock() >= self._write_from_s:
            self._write()

    def _write(self) -> None:
        began_s = self._clock()
        sections = [self._train, *(rows for _, rows in sorted(self._tests.items()))]
        text = "\n".join("".join(rows) for rows in sections)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = text.encode("utf-8", errors="backslashreplace")
            write_whole(self._path, content, durably=False)
        except OSError as error:
            message = f"cannot write the net outputs {self._path}: {error.strerror or error}"
            if error.errno not in _FULL:
                raise JobError(message) from error
            if not self._reported:
                LOGGER.warning("%s; training continues, and the next row tries again", message)
            self._reported = True
            return
        self._waiting = False
        ended_s = self._clock()
        self._write_from_s = ended_s + _PAUSE_FACTOR * (ended_s - began_s)


def _rows_before(section: str, iteration: int) -> list[str]:
    """Return the header of a section and its rows before an iteration; an empty list without
    such rows.
    """
    header, *rows = section.strip("\n").split("\n")
    kept = [
        row for row in rows if row.split(",")[0].isdecimal() and int(row.split(",")[0]) < iteration
    ]
    return [f"{line}\n" for line in (header, *kept)] if kept else []


def _add(rows: list[str], record: TrainRecord | TestRecord, loss: float, *, weighted: bool) -> None:
    """Append a row to a section, with a header before the first one."""
    if not rows:
        rows.append(_line("Iteration", "time", "loss", *(output.name for output in record.outputs)))
    values = [
        output.value * output.loss_weight if weighted and output.loss_weight else output.value
        for output in record.outputs
    ]
    cells = (number(value) for value in (record.elapsed_s, loss, *values))
    rows.append(_line(str(record.iteration), *cells))


def _line(*cells: str) -> str:
    return ",".join(cells) + ",\n"


WAIT_S = 10.0
"""A worker that is late by more has its part in no mean; a value that one worker logs is shown so
much later."""


_Place = tuple[int, int]
"""How often a worker has gone back, and an iteration."""


@dataclass(slots=True)
class _Values:
    """What was sent under one name for one iteration."""

    last_s: float = 0.0
    values: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Name:
    """What was sent under one name.

    Attributes:
        waiting: what is not recorded, in any order.
        latest: where each worker is.
        recorded: what was recorded last.
    """

    waiting: dict[_Place, _Values] = field(default_factory=dict)
    latest: dict[int, _Place] = field(default_factory=dict)
    recorded: _Place = (0, -1)


class LoggedMeans:
    """The values of one start of a job that wait for others."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._names: dict[str, _Name] = {}

    def add(self, worker: int, event: Mapping[str, object], now: float) -> None:
        """Add a `logged` event of a worker; one that is not valid adds nothing."""
        iteration, values = event.get("iteration"), event.get("values")
        if not isinstance(iteration, int) or iteration < 0 or not isinstance(values, dict):
            return
        for key, value in values.items():
            name = self._names.setdefault(str(key), _Name())
            back, last = name.latest.get(worker, (0, -1))
            place = name.latest[worker] = back + (iteration < last), iteration
            if place > name.recorded:
                found = name.waiting.setdefault(place, _Values())
                found.last_s = now
                number = finite(value)
                found.values.append(math.nan if number is None else number)

    def due(self, now: float, *, everything: bool = False) -> Iterator[Record]:
        """Yield the records whose time has come, in the order of their iterations.

        Args:
            everything: also those that wait.
        """
        means: dict[_Place, dict[str, float | None]] = {}
        for key, name in self._names.items():
            passed = min(name.latest.values()) if len(name.latest) >= self._workers else (0, -1)
            for place in sorted(name.waiting):
                found = name.waiting[place]
                if everything or place < passed or now >= found.last_s + WAIT_S:
                    del name.waiting[place]
                    name.recorded = max(name.recorded, place)
                    means.setdefault(place, {})[key] = _mean(found.values)
        for place in sorted(means):
            yield _record(place[1], means[place])


def _record(iteration: int, means: Mapping[str, float | None]) -> Record:
    rates = [name for name in RATES if name in means]
    return {
        "kind": "train",
        "iteration": iteration,
        **({"loss": means["loss"]} if "loss" in means else {}),
        **({"rate": means[rates[0]]} if rates else {}),
        "outputs": dict(means),
    }


def _mean(values: list[float]) -> float | None:
    """Return the mean of finite values; None if one is not."""
    if not all(map(math.isfinite, values)):
        return None
    return finite(math.fsum(values) / len(values))
