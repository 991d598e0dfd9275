"""`poseidon convert_cifar`: published CIFAR-10 into databases elsewhere than in the example's folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from poseidon.cli.prepare_cifar10 import prepare_and_tell
from poseidon.data.cifar10 import Request
from poseidon.data.database import Backend


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its arguments, which are those of Caffe's convert_cifar_data."""
    parser = subparsers.add_parser(
        "convert_cifar",
        help="convert published CIFAR-10 into databases",
        description="Makes OUTPUT_FOLDER/cifar10_train_<kind>, cifar10_test_<kind> and mean.binaryproto.",
    )
    parser.add_argument("input", metavar="INPUT", type=Path, help="archive, or folder that holds it")
    parser.add_argument("output_folder", metavar="OUTPUT_FOLDER", type=Path)
    parser.add_argument(
        "db_type", metavar="DB_TYPE", type=str.lower, choices=[backend.suffix for backend in Backend]
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Convert; 0 when the databases are in place."""
    backend = Backend.parse(arguments.db_type)
    prepare_and_tell(Request(folder=arguments.output_folder, backend=backend, data=arguments.input, url=""))
    return 0
