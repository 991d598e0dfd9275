"""`poseidon convert_imageset`: picture files into a database, as Caffe's tool of that name."""

from __future__ import annotations

import argparse

from poseidon.caffe.data.databases.kinds import Backend
from poseidon.caffe.data.prepare.imageset import Conversion, convert_imageset
from poseidon.cli.progress_bar import progress_bar


def run(arguments: argparse.Namespace) -> int:
    """Convert; 0 when the database is in place."""
    conversion = Conversion(
        gray=arguments.gray,
        size=(max(0, arguments.resize_height), max(0, arguments.resize_width)),
        encoded=arguments.encoded,
        encode_type=arguments.encode_type,
        check_size=arguments.check_size,
        shuffle=arguments.shuffle,
        seed=arguments.seed,
    )
    with progress_bar(arguments.progress) as report:
        count = convert_imageset(
            arguments.root_folder,
            arguments.list_file,
            arguments.db_name,
            Backend.parse(arguments.backend),
            conversion,
            report=report,
        )
    print(f"Processed {count} files.")
    return 0
