"""`poseidon compute_image_mean`: the mean picture of a database, as Caffe's tool of that name."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from poseidon.cli.progress import progress_bar
from poseidon.data.cursor import open_cursor
from poseidon.data.database import Backend, require
from poseidon.data.mean import compute_mean, write_mean


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "compute_image_mean",
        help="compute the mean picture of a database",
        description="Prints the mean of each channel, and writes the mean picture when OUTPUT_FILE is given.",
    )
    parser.add_argument(
        "--backend",
        "-backend",
        type=str.lower,
        choices=[backend.suffix for backend in Backend],
        help="kind of the database (default: what the folder holds)",
    )
    parser.add_argument("input_db", metavar="INPUT_DB", type=Path, help="folder of the database")
    parser.add_argument(
        "output_file", metavar="OUTPUT_FILE", type=Path, nargs="?", help="mean file, such as mean.binaryproto"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compute, print and write; 0 when it is written."""
    backend = Backend.parse(arguments.backend) if arguments.backend else require(arguments.input_db)
    with closing(open_cursor(arguments.input_db, backend)) as cursor:
        print(f"Processed {len(cursor)} files.")
        with progress_bar() as report:
            mean = compute_mean(cursor, report=report)
    for channel, value in enumerate(mean.mean(axis=(1, 2))):
        print(f"mean_value channel [{channel}]: {value:g}")
    if arguments.output_file is not None:
        write_mean(arguments.output_file, mean)
        print(f"Wrote {arguments.output_file}.")
    return 0
