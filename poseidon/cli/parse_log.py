"""`poseidon parse_log`: the numbers of a training log as two tables, in the form of Caffe's parse_log.py."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path

from poseidon.cli.logs import log_paths
from poseidon.errors import DataError, JobError, UsageError
from poseidon.launch.stopping import job_folder
from poseidon.metrics.training_log import TrainingLog, as_csv, parse_log
from poseidon.snapshot.files import make_folder, write_atomically


def run(arguments: argparse.Namespace) -> int:
    """Write the tables that have rows; 0 when done.

    Raises:
        UsageError: the delimiter is not one sign.
        DataError: the log cannot be read, or has no iteration.
        SnapshotError: a table cannot be written.
    """
    if len(arguments.delimiter) != 1:
        raise UsageError(f"--delimiter is '{arguments.delimiter}', expected one sign")
    _, source = log_of(arguments.logfile_path)
    log = read_log(source)
    folder = arguments.output_dir or source.parent
    make_folder(folder)
    for ending, rows in (("train", log.train), ("test", log.test)):
        path = folder / f"{source.name}.{ending}"
        if rows:
            write_atomically(path, as_csv(rows, delimiter=arguments.delimiter).encode())
        if arguments.verbose:
            print(f"Wrote {path}" if rows else f"Not writing {path}; no lines to write")
    return 0


def log_of(word: str | None) -> tuple[str, Path]:
    """The log that a word of the command line means.

    Args:
        word: a log, or a job's id or folder, whose worker 0 has the log; None: the job that was started last.

    Returns:
        A name for it, and its path.

    Raises:
        DataError: the job has no log of worker 0.
        JobError: there is no last job.
    """
    given = Path(word) if word is not None else None
    if given is not None and given.is_file():
        return given.name, given
    try:
        folder = job_folder(word)
    except JobError:
        if given is None:
            raise
        return given.name, given  # which cannot be read
    path = log_paths(folder).get("worker 0")
    if path is None:
        raise DataError(f"{folder} holds no log of worker 0, expected a job's folder or a log")
    return folder.absolute().name, path


def read_log(path: Path) -> TrainingLog:
    """The tables of a log file, which began in the year in which the file was last written, or before.

    Raises:
        DataError: it cannot be read, or has no output of any iteration.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        year = datetime.fromtimestamp(path.stat().st_mtime).year
    except OSError as error:
        raise DataError(f"cannot read the log {path}: {error.strerror}") from error
    log = parse_log(text.splitlines(), year)
    if not log.train and not log.test:
        raise DataError(
            f"{path} has no line of a net's output, expected a log of Caffe or of `poseidon train` "
            "(output/<job>/worker_0.log)"
        )
    return log
