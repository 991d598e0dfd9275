"""`poseidon prepare_cifar10`: databases and mean file of the CIFAR-10 example."""

from __future__ import annotations

import argparse
import sys

from poseidon.base.hints import own_command
from poseidon.base.settings import read_settings
from poseidon.caffe.data.databases.kinds import Backend
from poseidon.caffe.data.prepare.cifar10 import (
    Cifar10Request,
    PreparedCifar10,
    default_folder,
    fetch,
    prepare,
)
from poseidon.caffe.data.prepare.cifar10_source import URL, URL_MD5
from poseidon.cli.progress_bar import progress_bar
from poseidon.errors import DataError, UsageError


def prepare_and_print(request: Cifar10Request, progress: str = "auto") -> PreparedCifar10:
    """Prepare with a progress bar, and print what was prepared, or the warning that it is not
    CIFAR-10.
    """
    opening = f"preparing CIFAR-10 in {request.folder}: two databases and their mean; this may take minutes"
    with progress_bar(progress, opening=opening) as report:
        prepared = prepare(request, report=report)
    if prepared.warning is not None:
        print(prepared.warning, file=sys.stderr, flush=True)
    else:
        print(f"CIFAR-10 is ready: {prepared.train}, {prepared.test}, {prepared.mean}", flush=True)
    return prepared


def run(arguments: argparse.Namespace) -> int:
    """Prepare, or only download; 0 when it is there."""
    if arguments.clients < 1:
        raise UsageError(f"--clients={arguments.clients}: expected 1 or more")
    request = Cifar10Request(
        folder=arguments.folder or default_folder(),
        backend=Backend.parse(arguments.backend),
        clients=arguments.clients,
        data=arguments.data,
        hint=read_settings().data_folder,
        url=URL if arguments.url is None else arguments.url,
        url_md5=arguments.md5 or URL_MD5,
    )
    if arguments.download_only or arguments.url:
        _download(request, arguments.progress)
    if not arguments.download_only:
        prepare_and_print(request, arguments.progress)
    return 0


def _download(request: Cifar10Request, progress: str) -> None:
    """Download what the user asks for: here no pictures are drawn in its place.

    Raises:
        DataError: it cannot be downloaded.
    """
    try:
        with progress_bar(
            progress, opening=f"downloading CIFAR-10 to {request.downloads}"
        ) as report:
            print(f"CIFAR-10 is at {fetch(request, report=report)}")
    except ConnectionError as error:
        raise DataError(
            f"{error}; if you have CIFAR-10: {own_command()} prepare_cifar10 --data=DIR"
        ) from error
