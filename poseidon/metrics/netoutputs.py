"""`<prefix>.netoutputs`: losses and scores of the whole job, averaged over all workers, as CSV.

    Iteration,time,loss,loss,
    0,0.1,2.30245,2.30245,
    100,20.4,1.68744,1.68744,

    Iteration,time,loss,accuracy,loss,
    0,6.2,2.30268,0.0926,2.30268,

The layout is the original's: every row ends in a comma, an empty line parts the train net from each test
net. The first `loss` is the total, the columns after it are the outputs by name. Train outputs are
multiplied by their loss weight, test outputs are not.

Laws:
* The file is whole at every moment: written beside, then renamed. The original wrote it at a clean end only.
* Writing takes no more than one part in fifty of the time: rows that come while that is used up are held,
  and go out with a later row or at `close`.
* A disk that is full costs no training: it is told once, and rows are held until one can be written.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from poseidon.errors import JobError
from poseidon.metrics.glog_lines import number
from poseidon.metrics.record import Output, TestRecord, TrainRecord

LOGGER = logging.getLogger("poseidon.metrics.netoutputs")
_FULL = (errno.ENOSPC, errno.EDQUOT)
# After a write that took t seconds, the next waits this many times t.
_REST = 49.0


class NetOutputs:
    """A sink that keeps the file.

    Args:
        prefix: the file is `<prefix>.netoutputs`, or the prefix itself where that ends in netoutputs; its folder is made, an older file is replaced.
        goes_on_at: the iteration at which the same job goes on: what an older file has from before it stays.
        clock: seconds, monotonic.
    """

    def __init__(
        self, prefix: Path, *, goes_on_at: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        named = prefix.name.endswith("netoutputs")
        self._path = prefix if named else prefix.with_name(prefix.name + ".netoutputs")
        self._clock = clock
        self._train: list[str] = []
        self._tests: dict[int, list[str]] = {}
        self._waiting = self._told = False
        self._write_from_s = clock()
        if goes_on_at:
            self._take_over(goes_on_at)

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def on_train(self, record: TrainRecord) -> None:
        """Add a row for the train net.

        Raises:
            JobError: the file cannot be written.
        """
        _add(self._train, record.iteration, record.elapsed_s, record.loss, record.outputs, weighted=True)
        self._write_if_due()

    def on_test(self, record: TestRecord) -> None:
        """Add a row for a test net.

        Raises:
            JobError: the file cannot be written.
        """
        rows = self._tests.setdefault(record.net, [])
        total = sum(output.value * output.loss_weight for output in record.outputs)
        loss = total if record.loss is None else record.loss
        _add(rows, record.iteration, record.elapsed_s, loss, record.outputs, weighted=False)
        self._write_if_due()

    def close(self) -> None:
        """Write the rows that wait.

        Raises:
            JobError: the file cannot be written.
        """
        if self._waiting:
            self._write()

    def _take_over(self, before: int) -> None:
        """Keep the rows of iterations before one; nothing where there is no such file."""
        with suppress(OSError, UnicodeDecodeError):
            # A line end before the whole, so that a section without rows is seen to be empty.
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
        temporary = self._path.with_name(f".{self._path.name}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self._path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            sentence = f"cannot write the net outputs {self._path}: {error.strerror or error}"
            if error.errno not in _FULL:
                raise JobError(sentence) from error
            if not self._told:
                LOGGER.warning("%s; training goes on, and the next row tries again", sentence)
            self._told = True
            return
        self._waiting = False
        ended_s = self._clock()
        self._write_from_s = ended_s + _REST * (ended_s - began_s)


def _rows_before(section: str, iteration: int) -> list[str]:
    """Return the header of a section and its rows of earlier iterations; nothing without such rows."""
    header, *rows = section.strip("\n").split("\n")
    kept = [row for row in rows if row.split(",")[0].isdecimal() and int(row.split(",")[0]) < iteration]
    return [f"{line}\n" for line in (header, *kept)] if kept else []


def _add(
    rows: list[str],
    iteration: int,
    elapsed_s: float,
    loss: float,
    outputs: Sequence[Output],
    *,
    weighted: bool,
) -> None:
    """Append a row to a section, and before the first one its header."""
    if not rows:
        rows.append(_line("Iteration", "time", "loss", *(output.name for output in outputs)))
    values = [
        output.value * output.loss_weight if weighted and output.loss_weight else output.value
        for output in outputs
    ]
    rows.append(_line(str(iteration), *(number(value) for value in (elapsed_s, loss, *values))))


def _line(*cells: str) -> str:
    return ",".join(cells) + ",\n"
