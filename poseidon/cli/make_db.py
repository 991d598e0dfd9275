"""`poseidon make_db`: picture files, or a drawn set, into a database for Caffe2 or Caffe."""

from __future__ import annotations

import argparse
from pathlib import Path

from poseidon.caffe.data.databases.writer import refuse_existing
from poseidon.caffe.data.prepare.imageset import Conversion
from poseidon.caffe2.images.pictures import find_pictures, make_database, make_two_class
from poseidon.cli.progress_bar import progress_bar

MESSAGES = {"caffe2": "TensorProtos", "caffe": "Datums"}


def run(arguments: argparse.Namespace) -> int:
    """Make the database; 0 when it is in place."""
    return _draw(arguments) if arguments.generate else _convert(arguments)


def _convert(arguments: argparse.Namespace) -> int:
    conversion = Conversion(
        gray=arguments.gray,
        size=(arguments.resize_height, arguments.resize_width),
        shorter_side=arguments.shorter_side,
        encoded=not arguments.raw,
        encode_type="" if arguments.raw else arguments.encode_type,
        shuffle=arguments.shuffle,
        seed=arguments.seed,
    )
    refuse_existing(arguments.db_name)
    pictures = find_pictures(arguments.pictures, arguments.root_folder)
    with progress_bar(arguments.progress) as report:
        count = make_database(
            pictures,
            arguments.db_name,
            arguments.backend,
            arguments.format,
            conversion,
            report=report,
        )
    for name, number in pictures.counts().items():
        print(f"label {name}: {number} pictures")
    _print_written(arguments, arguments.db_name, count)
    return 0


def _draw(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.pictures
    parts = {"train": (arguments.count, 0), "val": (arguments.test_count, arguments.count)}
    targets = {part: folder / f"{arguments.generate}_{part}" for part in parts}
    for target in targets.values():
        refuse_existing(target)
    for part, (count, first) in parts.items():
        with progress_bar(arguments.progress) as report:
            make_two_class(
                targets[part],
                arguments.backend,
                arguments.format,
                count,
                seed=arguments.seed,
                first=first,
                report=report,
            )
        _print_written(arguments, targets[part], count)
    return 0


def _print_written(arguments: argparse.Namespace, path: Path, count: int) -> None:
    print(f"Wrote {count} records to {path} ({arguments.backend}, {MESSAGES[arguments.format]}).")
