"""`poseidon prepare_cifar10`: databases and mean file of the CIFAR-10 example."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from poseidon.cli.progress import progress_bar
from poseidon.data.cifar10 import Prepared, Request, fetch, prepare
from poseidon.data.cifar10_source import URL, URL_MD5
from poseidon.data.database import Backend
from poseidon.errors import DataError
from poseidon.proto.paths import repository_root
from poseidon.settings import read_settings


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "prepare_cifar10",
        help="make the databases and the mean file of the CIFAR-10 example",
        description=(
            "Uses, in this order: databases made earlier; CIFAR-10 under --data or $POSEIDON_DATA; a download; and "
            "without a network a small built-in set of drawn pictures, saying loudly that it is not CIFAR-10."
        ),
    )
    add_data_flags(parser)
    parser.add_argument(
        "--clients",
        "-clients",
        type=int,
        default=1,
        metavar="N",
        help="with leveldb, which cannot be shared: make the parts _0 to _<N-1> as well (default: %(default)s)",
    )
    parser.add_argument(
        "--folder",
        "-folder",
        type=Path,
        default=repository_root() / "examples" / "cifar10",
        help="where they go (default: examples/cifar10 of the checkout, or of the current folder)",
    )
    parser.add_argument(
        "--url", "-url", default=URL, help="where to fetch the archive (default: %(default)s)"
    )
    parser.add_argument(
        "--md5", "-md5", default=URL_MD5, help="checksum of the archive (default: that of the published one)"
    )
    parser.add_argument(
        "--download_only", "-download_only", action="store_true", help="fetch the archive and stop"
    )
    parser.set_defaults(run=run)


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Declare --data and --backend, as every command of the example has them."""
    parser.add_argument(
        "--data", "-data", type=Path, metavar="DIR", help="CIFAR-10: an archive, or a folder that holds it"
    )
    parser.add_argument(
        "--backend",
        "-backend",
        type=str.lower,
        choices=[backend.suffix for backend in Backend],
        default="lmdb",
        help="kind of the databases (default: %(default)s)",
    )


def prepare_and_tell(request: Request) -> Prepared:
    """Prepare with a progress bar, and print what was prepared, or the warning that it is not CIFAR-10."""
    with progress_bar() as report:
        prepared = prepare(request, report=report)
    if prepared.warning is not None:
        print(prepared.warning, file=sys.stderr, flush=True)
    else:
        print(f"CIFAR-10 is ready: {prepared.train}, {prepared.test}, {prepared.mean}", flush=True)
    return prepared


def run(arguments: argparse.Namespace) -> int:
    """Prepare, or only download; 0 when it is there."""
    request = Request(
        folder=arguments.folder,
        backend=Backend.parse(arguments.backend),
        clients=arguments.clients,
        data=arguments.data,
        hint=read_settings().data_folder,
        url=arguments.url,
        url_md5=arguments.md5,
    )
    if not arguments.download_only:
        prepare_and_tell(request)
        return 0
    try:
        with progress_bar() as report:
            print(f"CIFAR-10 is at {fetch(request, report=report)}")
    except ConnectionError as error:
        raise DataError(str(error)) from error
    return 0
