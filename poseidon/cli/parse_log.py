"""`poseidon parse_log`: the numbers of a training log as two tables, in the form of Caffe's
parse_log.py.
"""

from __future__ import annotations

import argparse

from poseidon.engine.snapshots.files import make_folder, write_atomically
from poseidon.errors import UsageError
from poseidon.launcher.job_folder import find_training_log, read_training_log
from poseidon.observe.metrics.training_log import as_csv


def run(arguments: argparse.Namespace) -> int:
    """Write the tables that have rows; 0 when done."""
    if len(arguments.delimiter) != 1:
        raise UsageError(f"--delimiter is '{arguments.delimiter}', expected one character")
    _, source = find_training_log(arguments.logfile_path)
    log = read_training_log(source)
    folder = arguments.output_dir or source.parent
    make_folder(folder)
    for ending, rows in (("train", log.train), ("test", log.test)):
        path = folder / f"{source.name}.{ending}"
        if rows:
            write_atomically(path, as_csv(rows, delimiter=arguments.delimiter).encode())
            print(f"Wrote {path}")
        elif arguments.verbose:
            print(f"Not writing {path}; no lines to write")
    return 0
