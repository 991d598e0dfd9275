"""`poseidon convert_mnist`: the four published idx files of MNIST into two databases."""

from __future__ import annotations

import argparse
from pathlib import Path

from poseidon.cli.progress import progress_bar
from poseidon.data.convert import convert_mnist
from poseidon.data.database import Backend
from poseidon.proto.paths import repository_root


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "convert_mnist",
        help="convert the published MNIST files into databases",
        description="Makes mnist_train_<kind> and mnist_test_<kind>; nothing is overwritten.",
    )
    parser.add_argument(
        "input_folder", metavar="INPUT_FOLDER", type=Path, help="folder of the four .gz files"
    )
    parser.add_argument(
        "--folder",
        "-folder",
        type=Path,
        default=repository_root() / "examples" / "mnist",
        help="where they go (default: examples/mnist of the checkout, or of the current folder)",
    )
    parser.add_argument(
        "--backend",
        "-backend",
        type=str.lower,
        choices=[backend.suffix for backend in Backend],
        default="lmdb",
        help="kind of the databases (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Convert; 0 when both databases are in place."""
    with progress_bar() as report:
        made = convert_mnist(
            arguments.input_folder, arguments.folder, Backend.parse(arguments.backend), report=report
        )
    print(f"MNIST is ready: {made[0]}, {made[1]}")
    return 0
