"""Preparation of the CIFAR-10 example's databases.

Law: real data takes precedence. The order is: existing databases; CIFAR-10 on this host; a download
of CIFAR-10; the built-in pictures. A marker file beside the databases names their source, and
databases of built-in pictures are replaced as soon as real data is found. Incomplete files are
never left behind.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from poseidon.base.paths import own_command, repository_root, short_path
from poseidon.caffe.data.cursor import open_cursor, open_writer, records, translated_writes
from poseidon.caffe.data.databases import Backend, detect
from poseidon.caffe.data.leveldb_cursor import require_leveldb
from poseidon.caffe.data.mean import compute_mean, write_mean
from poseidon.caffe.data.prepare.cifar10_source import (
    URL,
    URL_MD5,
    Cifar10,
    find_cifar10,
    read_cifar10,
)
from poseidon.caffe.data.prepare.convert import write_labelled
from poseidon.caffe.data.prepare.download import download
from poseidon.caffe.data.prepare.procedural import draw_images
from poseidon.caffe.data.prepare.split import existing_parts, partition_data
from poseidon.caffe.data.staging import Report, Staging, recover, silent, staging
from poseidon.errors import DataError

MEAN_NAME = "mean.binaryproto"
MARKER_NAME = "SOURCE.txt"
BUILT_IN = "built-in pictures"
BUILT_IN_TRAIN, BUILT_IN_TEST = 10_000, 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCifar10:
    """The prepared data set.

    Args:
        origin: a description of the source; empty for databases that this project did not create.
        reason: why no real data was used; empty if it was.
    """

    train: Path
    test: Path
    mean: Path
    origin: str
    reason: str = ""

    @property
    def built_in(self) -> bool:
        """Whether these are the built-in pictures and not CIFAR-10."""
        return _is_built_in(self.origin)

    @property
    def warning(self) -> str | None:
        """The warning for a user of the built-in pictures, else None."""
        if not self.built_in:
            return None
        because = f" ({self.reason})" if self.reason else ""
        folder = self.train.parent
        usual = folder.absolute() == default_folder()
        where = "" if usual else f"--folder={shlex.quote(short_path(folder))} "
        return (
            f"*** THIS IS NOT CIFAR-10 *** but pictures that Poseidon draws{because}; for the real "
            f"data: {own_command()} prepare_cifar10 {where}--data=DIR"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cifar10Request:
    """The data set to prepare.

    Args:
        folder: the folder for the databases, examples/cifar10 of the checkout by default.
        clients: with LevelDB, which cannot be shared, the number of parts to create too; 1: none.
        data: the user's path to CIFAR-10: an archive, or a folder that holds it, also in
            `cifar10/`.
        hint: another folder that may hold it ($POSEIDON_DATA).
        url: the URL to download it from; empty: no download.
        url_md5: the checksum of the download.
    """

    folder: Path
    backend: Backend = Backend.LMDB
    clients: int = 1
    data: Path | None = None
    hint: Path | None = None
    url: str = URL
    url_md5: str = URL_MD5

    @property
    def downloads(self) -> Path:
        """The folder of downloaded archives."""
        return self.folder / "data"

    def database(self, part: str, backend: Backend | None = None) -> Path:
        """Return the database of `train` or `test`."""
        # `backend or` would be wrong: LevelDB is 0.
        kind = self.backend if backend is None else backend
        return self.folder / f"cifar10_{part}_{kind.suffix}"


def default_folder() -> Path:
    """Return the default folder of databases: the example's in the checkout."""
    return repository_root() / "examples" / "cifar10"


def prepare(request: Cifar10Request, *, report: Report = silent) -> PreparedCifar10:
    """Create the databases, the mean file and the parts that are missing.

    Raises:
        DataError: `data` does not hold CIFAR-10, the data is damaged, another process is preparing
            the same folder, a write fails, or LevelDB is not installed.
    """
    if request.backend is Backend.LEVELDB:
        require_leveldb()
    recover(_stage_name(request))
    found = _find(request)
    reason = ""
    if not _complete(request, request.backend) or (
        found is not None and _read_marker(request).startswith(BUILT_IN)
    ):
        reason = _make_databases(request, found, report)
    if not (request.folder / MEAN_NAME).exists():
        _make_mean(request)
    if request.backend is Backend.LEVELDB and request.clients > 1:
        for part in ("train", "test"):
            if len(existing_parts(request.database(part))) != request.clients:
                partition_data(request.database(part), request.clients, replace=True, report=report)
    return PreparedCifar10(
        train=request.database("train"),
        test=request.database("test"),
        mean=request.folder / MEAN_NAME,
        origin=_read_marker(request),
        reason=reason,
    )


def fetch(request: Cifar10Request, *, report: Report = silent) -> Path:
    """Download the published archive unless it exists. Return its path.

    Raises:
        ConnectionError: the network or the server cannot be reached.
    """
    archive = request.downloads / Path(request.url).name
    if not archive.exists():
        download(request.url, archive, md5=request.url_md5, report=report)
    return archive


def _find(request: Cifar10Request) -> Path | None:
    """Return the path of real data on this host, or None.

    Raises:
        DataError: the user's path holds none, and no real data was prepared earlier.
    """
    made_earlier = _complete(request, request.backend) and not _is_built_in(_read_marker(request))
    for path in (request.data, request.hint, request.downloads, request.folder):
        found = find_cifar10(path) if path is not None else None
        if found is not None:
            return found
        if path is not None and path is request.data and not made_earlier:
            raise DataError(
                f"no CIFAR-10 at {path}: expected an archive like cifar-10-binary.tar.gz or an "
                "unpacked folder like cifar-10-batches-bin, there or in its folder cifar10/"
            )
    return None


def _complete(request: Cifar10Request, backend: Backend) -> bool:
    """Return whether both databases of this kind exist. They appear only when complete."""
    return all(detect(request.database(part, backend)) is backend for part in ("train", "test"))


def _read_marker(request: Cifar10Request) -> str:
    marker = request.folder / MARKER_NAME
    return marker.read_text(encoding="utf-8").strip() if marker.exists() else ""


def _is_built_in(origin: str) -> bool:
    return origin.startswith(BUILT_IN)


def _stage_name(request: Cifar10Request) -> Path:
    return request.folder / "cifar10"


def _make_databases(request: Cifar10Request, found: Path | None, report: Report) -> str:
    """Create both databases. Return why they do not hold real data, or an empty string."""
    reason = ""
    with translated_writes(request.folder), staging(_stage_name(request)) as stage:
        other = Backend(1 - request.backend)
        stale = found is not None and _is_built_in(_read_marker(request))
        if _complete(request, other) and not stale:
            _copy(request, other, stage, report)
            stage.publish(_names(request))
            return ""
        data, reason = _obtain(request, found, report)
        for part, labelled in (("train", data.train), ("test", data.test)):
            target = stage.folder / request.database(part).name
            write_labelled(
                target,
                request.backend,
                labelled,
                key_digits=5,
                report=report,
                activity=f"writing {part}",
            )
        (stage.folder / MARKER_NAME).write_text(data.origin + "\n", encoding="utf-8")
        # Everything made of other data is removed at the same time.
        stage.publish([*_names(request), MARKER_NAME], remove=list(_outdated(request)))
    return reason


def _names(request: Cifar10Request) -> list[str]:
    return [request.database(part).name for part in ("train", "test")]


def _outdated(request: Cifar10Request) -> Iterator[str]:
    """Yield the names of all files of both kinds that this module creates."""
    yield MEAN_NAME
    for backend in Backend:
        for part in ("train", "test"):
            database = request.database(part, backend)
            yield database.name
            yield from (path.name for path in existing_parts(database))


def _copy(request: Cifar10Request, other: Backend, stage: Staging, report: Report) -> None:
    """Copy existing databases of the other kind record by record."""
    for part in ("train", "test"):
        target = stage.folder / request.database(part).name
        with closing(open_cursor(request.database(part, other), other)) as cursor:
            length = len(cursor)
            with closing(open_writer(target, request.backend)) as writer:
                for number, (key, value) in enumerate(records(cursor)):
                    writer.put(key, bytes(value))
                    report(f"copying {part}", number + 1, length)


def _obtain(request: Cifar10Request, found: Path | None, report: Report) -> tuple[Cifar10, str]:
    """Return the data for the databases, and why it is not real; an empty string if it is."""
    if found is not None:
        return read_cifar10(found), ""
    reason = "CIFAR-10 was not found"
    if request.url:
        try:
            return read_cifar10(fetch(request, report=report)), ""
        except ConnectionError as error:
            reason = str(error)
    train = draw_images(BUILT_IN_TRAIN, seed=1, report=report)
    return Cifar10(
        train=train, test=draw_images(BUILT_IN_TEST, seed=2), origin=f"{BUILT_IN}, not CIFAR-10"
    ), reason


def _make_mean(request: Cifar10Request) -> None:
    with closing(open_cursor(request.database("train"), request.backend)) as cursor:
        mean = compute_mean(cursor)
    write_mean(request.folder / MEAN_NAME, mean)
