"""The log file of a training: comma-separated values, a line for each call of `log`."""

from __future__ import annotations

import csv
import datetime
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("experiment_logger")
log.setLevel(logging.INFO)


class ExternalLogger(ABC):
    """Something beside the file that gets the rows, such as a database."""

    @abstractmethod
    def set_runtime_args(self, runtime_args: Any) -> None:
        """Take the arguments of the run."""

    @abstractmethod
    def log(self, log_dict: Mapping[str, Any]) -> None:
        """Take a row, by the names of its columns."""


class ModelTrainerLog:
    """Writes `<expname>_<year><month><day>_<hour><minute><second>.log` in the current directory.

    The first line is `# ` and the arguments, the second the names of the columns; then there is a
    row for each `log`: seconds since the row before and in all, inputs since the row before and in
    all, batches, inputs a second, and the additional values by their names.

    Attributes:
        filename: the file.
        experiment_id: the time in its name.
    """

    def __init__(
        self,
        expname: str,
        runtime_args: Any,
        external_loggers: Iterable[ExternalLogger] | None = None,
        continued: str | Path | None = None,
    ) -> None:
        """Begin a log.

        Args:
            expname: the beginning of the file's name.
            runtime_args: what the first line shows.
            external_loggers: what gets the rows too.
            continued: the log of an earlier run whose totals this one continues (not in Caffe2).
        """
        self.experiment_id = datetime.datetime.now().strftime("%Y%m%d_%H%M%S")
        self.filename = str(continued) if continued else f"{expname}_{self.experiment_id}.log"
        self.external_loggers = list(external_loggers or ())
        self.headers: list[str] | None = None
        self.start_time = self.last_time = time.time()
        self.last_input_count = 0
        rows = read_log(continued) if continued else []
        if rows:
            self.headers = list(rows[-1])
            self.last_input_count = int(rows[-1]["cumulative_input_count"])
            self.start_time -= float(rows[-1]["cumulative_time_spent"])
        self.logstr(f"# {runtime_args}")
        for logger in self.external_loggers:
            logger.set_runtime_args(runtime_args)

    def logstr(self, line: str) -> None:
        with open(self.filename, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        log.info(line)

    def log(self, input_count: int, batch_count: int, additional_values: Mapping[str, Any]) -> None:
        """Write a row.

        Args:
            input_count: the inputs from the beginning of the training.
            batch_count: the batches.
            additional_values: further columns.
        """
        now = time.time()
        seconds, inputs = now - self.last_time, input_count - self.last_input_count
        row = {
            "time_spent": seconds,
            "cumulative_time_spent": now - self.start_time,
            "input_count": inputs,
            "cumulative_input_count": input_count,
            "cumulative_batch_count": batch_count,
            "inputs_per_sec": inputs / seconds if seconds > 0 else 0.0,
            **{name: additional_values[name] for name in sorted(additional_values)},
        }
        self.last_time, self.last_input_count = now, input_count
        if self.headers is None:
            self.headers = list(row)
            self.logstr(",".join(self.headers))
        self.logstr(",".join(map(str, row.values())))
        for logger in self.external_loggers:
            logger.log(row)


def read_log(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a log by the names of its columns."""
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))
