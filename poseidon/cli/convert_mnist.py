"""`poseidon convert_mnist`: the four published idx files of MNIST into two databases."""

from __future__ import annotations

import argparse

from poseidon.base.paths import repository_root
from poseidon.caffe.data.databases.kinds import Backend
from poseidon.caffe.data.prepare.convert import convert_mnist
from poseidon.cli.progress_bar import progress_bar


def run(arguments: argparse.Namespace) -> int:
    """Convert; 0 when both databases are in place."""
    folder = arguments.folder or repository_root() / "examples" / "mnist"
    opening = f"preparing MNIST in {folder}: two databases; this may take minutes"
    with progress_bar(arguments.progress, opening=opening) as report:
        made = convert_mnist(
            arguments.input_folder,
            folder,
            Backend.parse(arguments.backend),
            report=report,
        )
    print(f"MNIST is ready: {made[0]}, {made[1]}")
    return 0
