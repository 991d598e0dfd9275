"""The commands that make databases: of the sets that Caffe has scripts for, of lists of images; their
means, and their parts for clients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from poseidon.base.paths import own_command, repository_root
from poseidon.base.settings import read_settings
from poseidon.caffe.data.cursor import open_cursor, refuse_existing
from poseidon.caffe.data.databases import Backend, require, require_kind
from poseidon.caffe.data.mean import compute_mean, write_mean
from poseidon.caffe.data.prepare.annoset import AnnotationFormat, Annotations, convert_annoset
from poseidon.caffe.data.prepare.cifar10 import (
    Cifar10Request,
    PreparedCifar10,
    default_folder,
    fetch,
    prepare,
)
from poseidon.caffe.data.prepare.cifar10_source import URL, URL_MD5
from poseidon.caffe.data.prepare.convert import convert_mnist
from poseidon.caffe.data.prepare.imageset import Conversion, convert_imageset
from poseidon.caffe.data.prepare.split import is_divided, partition_data
from poseidon.caffe.data.prepare.voc import VocRequest, convert_voc
from poseidon.caffe.data.staging import Report
from poseidon.caffe.launch.data_distribution import distribute
from poseidon.caffe2.images.pictures import find_pictures, make_database, make_two_class
from poseidon.cli.progress_bar import progress_bar
from poseidon.cluster.machinefile import Host, SshSettings, read_machinefile
from poseidon.errors import DataError, UsageError


def run_compute_image_mean(arguments: argparse.Namespace) -> int:
    """Compute, print and write; 0 when it is written."""
    backend = require(arguments.input_db)
    if arguments.backend:
        require_kind(arguments.input_db, Backend.parse(arguments.backend), by_flag=True)
    with closing(open_cursor(arguments.input_db, backend)) as cursor:
        print(f"Processed {len(cursor)} files.")
        with progress_bar(arguments.progress) as report:
            mean = compute_mean(cursor, report=report)
    for channel, value in enumerate(mean.mean(axis=(1, 2))):
        print(f"mean_value channel [{channel}]: {value:g}")
    if arguments.output_file is not None:
        write_mean(arguments.output_file, mean)
        print(f"Wrote {arguments.output_file}.")
    return 0


def _conversion(arguments: argparse.Namespace, **more: Any) -> Conversion:
    """Return the options of a conversion: those that have flags of their names, and more."""
    names = ("gray", "encoded", "encode_type", "check_size", "shuffle", "seed")
    given = {name: getattr(arguments, name) for name in names if name in arguments}
    size = max(0, arguments.resize_height), max(0, arguments.resize_width)
    return Conversion(size=size, **{**given, **more})


def run_convert_annoset(arguments: argparse.Namespace) -> int:
    """Convert; 0 when the database is in place."""
    detection = arguments.anno_type == "detection"
    form = AnnotationFormat(arguments.label_type) if detection else None
    if form is not None and form.has_names and arguments.label_map_file is None:
        raise UsageError(
            "--label_map_file is missing: it has the label of each name in the annotations"
        )
    limits = {"least_side": arguments.min_dim, "most_side": arguments.max_dim}
    conversion = _conversion(arguments, **limits)
    annotations = Annotations(
        form=form, label_map=arguments.label_map_file, check_label=arguments.check_label
    )
    names = {"name_size_file": arguments.name_size_file}
    return _convert_list(arguments, convert_annoset, conversion, annotations, **names)


def _convert_list(
    arguments: argparse.Namespace, convert: Callable[..., int], *options: object, **more: object
) -> int:
    """Convert the pictures of a list; 0 when the database is in place."""
    files = arguments.root_folder, arguments.list_file, arguments.db_name
    backend = Backend.parse(arguments.backend)
    with progress_bar(arguments.progress) as report:
        count = convert(*files, backend, *options, **more, report=report)
    print(f"Processed {count} files.")
    return 0


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


def run_prepare_cifar10(arguments: argparse.Namespace) -> int:
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


def run_convert_cifar(arguments: argparse.Namespace) -> int:
    """Convert; 0 when the databases are in place."""
    backend = Backend.parse(arguments.db_type)
    request = Cifar10Request(
        folder=arguments.output_folder, backend=backend, data=arguments.input, url=""
    )
    prepare_and_print(request, arguments.progress)
    return 0


def run_convert_imageset(arguments: argparse.Namespace) -> int:
    """Convert; 0 when the database is in place."""
    return _convert_list(arguments, convert_imageset, _conversion(arguments))


def _convert_mnist(
    arguments: argparse.Namespace, name: str, what: str, ready: str, pairs_seed: int | None = None
) -> int:
    folder = arguments.folder or repository_root() / "examples" / name
    backend = Backend.parse(arguments.backend)
    opening = f"preparing {what} in {folder}: two databases; this may take minutes"
    with progress_bar(arguments.progress, opening=opening) as report:
        train, test = convert_mnist(
            arguments.input_folder, folder, backend, pairs_seed=pairs_seed, report=report
        )
    print(f"{ready}: {train}, {test}")
    return 0


def run_convert_mnist(arguments: argparse.Namespace) -> int:
    """Convert; 0 when both databases are in place."""
    return _convert_mnist(arguments, "mnist", "MNIST", "MNIST is ready")


def run_convert_mnist_siamese(arguments: argparse.Namespace) -> int:
    """Convert; 0 when both databases are in place."""
    what, ready = "pairs of MNIST", "The pairs are ready"
    return _convert_mnist(arguments, "siamese", what, ready, pairs_seed=arguments.seed)


def run_convert_voc(arguments: argparse.Namespace) -> int:
    """Convert; 0 when all databases are in place."""
    request = VocRequest(
        root=arguments.voc_folder,
        folder=arguments.output_folder,
        backend=Backend.parse(arguments.backend),
        parts=tuple(part for part in arguments.parts.split(",") if part),
        label_map=arguments.label_map_file,
        seed=arguments.seed,
    )
    with progress_bar(arguments.progress) as report:
        label_map, parts = convert_voc(request, report=report)
    print(f"The label map is {label_map}")
    for part in parts:
        print(f"{part.database}: {part.images} images")
    return 0


MESSAGES = {"caffe2": "TensorProtos", "caffe": "Datums"}


def run_make_db(arguments: argparse.Namespace) -> int:
    """Make the database; 0 when it is in place."""
    return _draw(arguments) if arguments.generate else _convert(arguments)


def _convert(arguments: argparse.Namespace) -> int:
    conversion = _conversion(
        arguments,
        shorter_side=arguments.shorter_side,
        encoded=not arguments.raw,
        encode_type="" if arguments.raw else arguments.encode_type,
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


DEFAULT_PARTS = 2


def run_partition_data(arguments: argparse.Namespace) -> int:
    """Divide, and distribute if asked to; 0 when all parts are in place."""
    # A trailing slash would end up inside the names of the parts.
    source = Path(str(arguments.db_path).rstrip("/") or "/")
    if arguments.backend is not None:
        require_kind(source, Backend.parse(arguments.backend), by_flag=True)
    clients = read_machinefile(Path(arguments.hostfile)) if arguments.hostfile else ()
    parts = _parts(arguments, clients)
    with progress_bar(arguments.progress) as report:
        _divide(source, parts, arguments, report)
        if arguments.distribute:
            root, replace = arguments.root_folder, arguments.replace
            ssh = SshSettings.from_flag(arguments.ssh_config)
            sentences = distribute(
                source, clients, root=root, replace=replace, report=report, ssh=ssh
            )
    if arguments.distribute:
        print("\n".join(sentences))
    print(f"Done: {source}_0 to {source}_{parts - 1}.")
    return 0


def _divide(source: Path, parts: int, arguments: argparse.Namespace, report: Report) -> None:
    if arguments.distribute and not arguments.replace and is_divided(source, parts):
        print(f"{source} is divided already.")
        return
    count = partition_data(source, parts, replace=arguments.replace, report=report)
    print(f"{source} has {count} records.")


def _parts(arguments: argparse.Namespace, clients: Sequence[Host]) -> int:
    asked: int | None = arguments.num_partitions
    if not clients:
        if arguments.distribute:
            raise UsageError("--distribute needs --hostfile=FILE, the hosts to copy to")
        return DEFAULT_PARTS if asked is None else asked
    working = sum(client.works for client in clients)
    if asked not in (None, working):
        raise UsageError(
            f"--num_partitions={asked}, but {arguments.hostfile} has {working} clients with "
            "workers; give the same number"
        )
    return working
