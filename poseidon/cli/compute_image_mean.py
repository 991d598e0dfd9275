"""`poseidon compute_image_mean`: the mean picture of a database, as Caffe's tool of that name."""

from __future__ import annotations

import argparse
from contextlib import closing

from poseidon.caffe.data.databases.cursor import open_cursor
from poseidon.caffe.data.databases.kinds import Backend, require, require_kind
from poseidon.caffe.data.mean import compute_mean, write_mean
from poseidon.cli.progress_bar import progress_bar


def run(arguments: argparse.Namespace) -> int:
    """Compute, print and write; 0 when it is written."""
    backend = require(arguments.input_db)
    if arguments.backend:
        require_kind(arguments.input_db, Backend.parse(arguments.backend), by_flag=True)
    with closing(open_cursor(arguments.input_db, backend)) as cursor:
        print(f"Processed {len(cursor)} files.")
        with progress_bar(arguments.progress) as report:
            mean = compute_mean(cursor, report=report)
    for channel, value in enumerate(mean.mean(axis=(1, 2))):
        print(f"mean_value channel [{channel}]: {value:g}")
    if arguments.output_file is not None:
        write_mean(arguments.output_file, mean)
        print(f"Wrote {arguments.output_file}.")
    return 0
