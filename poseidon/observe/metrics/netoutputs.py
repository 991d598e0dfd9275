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
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from poseidon.base.durable import write_whole
from poseidon.errors import JobError
from poseidon.observe.metrics.glog_lines import number
from poseidon.observe.metrics.record import TestRecord, TrainRecord

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
