"""`poseidon convert_mnist_siamese`: random pairs of MNIST's digits in two databases, for nets that compare."""

from __future__ import annotations

import argparse
from pathlib import Path

from poseidon.cli.progress import progress_bar
from poseidon.data.convert import convert_mnist_siamese
from poseidon.data.database import Backend
from poseidon.proto.paths import repository_root


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "convert_mnist_siamese",
        help="make databases of random pairs of MNIST's digits",
        description="Makes mnist_siamese_train_<kind> and mnist_siamese_test_<kind>; nothing is overwritten. A record is a "
        "pair of digits as two channels, its label 1 if they are of one class and 0 if not.",
    )
    parser.add_argument(
        "input_folder", metavar="INPUT_FOLDER", type=Path, help="folder of the four .gz files"
    )
    parser.add_argument(
        "--folder",
        "-folder",
        type=Path,
        default=repository_root() / "examples" / "siamese",
        help="where they go (default: examples/siamese of the checkout, or of the current folder)",
    )
    parser.add_argument(
        "--backend",
        "-backend",
        type=str.lower,
        choices=[backend.suffix for backend in Backend],
        default="lmdb",
        help="kind of the databases (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", "-seed", type=seed, default=0, help="of the random pairs (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def seed(text: str) -> int:
    """A seed, 0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is no seed, expected 0 or more")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Convert; 0 when both databases are in place."""
    with progress_bar() as report:
        made = convert_mnist_siamese(
            arguments.input_folder,
            arguments.folder,
            Backend.parse(arguments.backend),
            seed=arguments.seed,
            report=report,
        )
    print(f"The pairs are ready: {made[0]}, {made[1]}")
    return 0
