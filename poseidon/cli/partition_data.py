"""`poseidon partition_data`: divide a database among clients that share no file system."""

from __future__ import annotations

import argparse
from pathlib import Path

from poseidon.cli.progress import progress_bar
from poseidon.data.database import Backend, require_kind
from poseidon.data.split import partition_data


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "partition_data",
        help="divide a database or a list into <DB_PATH>_0, <DB_PATH>_1, ... for clients without a shared file system",
        description=(
            "Record i of DB_PATH (of a database in key order, of a list of pictures or HDF5 files its line i) goes to <DB_PATH>_(i mod n). Client k of a job whose data layer "
            "says shared_file_system: false reads <DB_PATH>_k. Nothing is overwritten."
        ),
    )
    parser.add_argument(
        "--backend",
        "-backend",
        type=str.lower,
        choices=[backend.suffix for backend in Backend],
        help="kind of the database (default: what the folder holds)",
    )
    parser.add_argument(
        "--num_partitions",
        "-num_partitions",
        type=int,
        default=2,
        metavar="N",
        help="number of parts, one for each client (default: %(default)s)",
    )
    parser.add_argument("db_path", metavar="DB_PATH", type=Path, help="folder of the database, or list file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Divide the database; 0 when all parts are in place."""
    # A trailing slash would end up inside the names of the parts.
    source = Path(str(arguments.db_path).rstrip("/") or "/")
    if arguments.backend is not None:
        require_kind(source, Backend.parse(arguments.backend))
    with progress_bar() as report:
        count = partition_data(source, arguments.num_partitions, report=report)
    print(f"Processed {count} files.")
    print(f"Done: {source}_0 to {source}_{arguments.num_partitions - 1}.")
    return 0
