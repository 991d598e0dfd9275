"""`poseidon convert_imageset`: picture files into a database, as Caffe's tool of that name."""

from __future__ import annotations

import argparse
from pathlib import Path

from poseidon.cli.progress import progress_bar
from poseidon.data.database import Backend
from poseidon.data.imageset import Conversion, convert_imageset

SWITCHES = {
    "gray": "read pictures as grey ones",
    "shuffle": "change the order of the pictures",
    "check_size": "make sure that all pictures have as many values",
    "encoded": "keep the pictures in their file format",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags, which are those of Caffe's tool."""
    parser = subparsers.add_parser(
        "convert_imageset",
        help="convert picture files into a database",
        description=(
            "Writes the pictures that LISTFILE names, a line each with path and label, into the new database DB_NAME. "
            "ROOTFOLDER is put before each path as it is, so it ends with a slash."
        ),
    )
    for name, text in SWITCHES.items():
        add_switch(parser, name, text)
    parser.add_argument(
        "--backend",
        "-backend",
        type=str.lower,
        choices=[backend.suffix for backend in Backend],
        default=Backend.LMDB.suffix,
        help="kind of the database (default: %(default)s)",
    )
    for side in ("width", "height"):
        parser.add_argument(
            f"--resize_{side}",
            f"-resize_{side}",
            type=int,
            default=0,
            metavar="PIXELS",
            help=f"{side} to give each picture (default: its own)",
        )
    parser.add_argument(
        "--encode_type",
        "-encode_type",
        default="",
        metavar="FORMAT",
        help="keep the pictures in this format: png, jpg, ...",
    )
    parser.add_argument("--seed", "-seed", type=int, default=0, help="of the shuffle (default: %(default)s)")
    parser.add_argument("root_folder", metavar="ROOTFOLDER")
    parser.add_argument("list_file", metavar="LISTFILE", type=Path)
    parser.add_argument("db_name", metavar="DB_NAME", type=Path)
    parser.set_defaults(run=run)


def add_switch(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """A flag that is on or off, spelled as gflags lets one: -shuffle, --shuffle=true, --noshuffle, ..."""
    parser.add_argument(f"--{name}", f"-{name}", action="store_true", help=text)
    # argparse takes a word that it knows whole before it looks for a value in it.
    on = [f"{dash}{name}={word}" for dash in ("-", "--") for word in ("true", "1")]
    off = [f"{dash}{name}={word}" for dash in ("-", "--") for word in ("false", "0")]
    off += [f"-no{name}", f"--no{name}"]
    parser.add_argument(*on, dest=name, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(*off, dest=name, action="store_false", help=argparse.SUPPRESS)


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
    with progress_bar() as report:
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
