"""Division of a database or a list (`split_list.py`) among clients that share no file system.

Law: record i (in key order) goes to part i mod n unchanged. The parts appear beside the source as
`<name>_0` to `<name>_<n-1>`, all of them or none. Nothing is overwritten.

The files of one part of a divided database or list.

Law: this module writes nothing. The file by which a part is recognized (`data.mdb`, `CURRENT`, the
list) is the last, so that a part that is copied in order is recognized only when it is complete.

Division of a list of images, HDF5 files or windows among clients that share no file system.

Law: record i goes to part i mod n unchanged. Record i is the i-th line of a list of images, the
i-th row of all HDF5 files in their order, or the i-th image of a window file with its windows. Part
k appears beside the source as the list `<name>_k`, for HDF5 also the folder `<name>_k.rows` that
the list names, so that both can move to another host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import h5py
import numpy as np

from poseidon.caffe.data.batches.hdf5_rows import HDF5_ERRORS, read_file_list
from poseidon.caffe.data.batches.images import read_list
from poseidon.caffe.data.batches.lists import read_lines, window_blocks
from poseidon.caffe.data.batches.numbered import part_path
from poseidon.caffe.data.cursor import (
    Cursor,
    open_cursor,
    open_writer,
    records,
    refuse_existing,
    translated_writes,
)
from poseidon.caffe.data.databases import Backend, require
from poseidon.caffe.data.staging import Report, silent, staging
from poseidon.errors import DataError, UsageError

ROWS = ".rows"
# The bytes of a dataset that are in memory at a time.
BLOCK_BYTES = 1 << 26


class ListKind(Enum):
    """The kind of a list."""

    IMAGES = "images"
    """A line has a path and a label (ImageData)."""
    ROWS = "rows"
    """A line has the path of an HDF5 file (HDF5Data)."""
    WINDOWS = "windows"
    """A block has an image and its windows (WindowData)."""


def list_kind(source: Path) -> ListKind:
    """Return the kind of a list, by its first line.

    Raises:
        DataError: the file is not text or is empty.
    """
    first = _lines(source)[0].strip()
    if first.startswith("#"):
        return ListKind.WINDOWS
    named = listed_file(source, first)
    if named.suffix in (".h5", ".hdf5") or (named.is_file() and h5py.is_hdf5(named)):
        return ListKind.ROWS
    return ListKind.IMAGES


def listed_file(source: Path, line: str) -> Path:
    """Resolve an HDF5 file's path in a list: beside the list, else in the current folder."""
    beside = source.parent / line
    return beside if beside.exists() else Path(line)


def listed_images(source: Path, root: str) -> list[Path]:
    """Return the images in a list of images or a window file, without duplicates.

    Args:
        root: the prefix of each path (`root_folder`).

    Raises:
        DataError: a line is wrong.
    """
    if list_kind(source) is ListKind.WINDOWS:
        found = [Path(root + path) for path, _ in window_blocks(source, _lines(source))]
    else:
        found = [Path(line.path) for line in read_list(source, root)]
    return list(dict.fromkeys(found))


def part_names(source: Path, part: int, kind: ListKind) -> list[str]:
    """Return the names of the files of one part, in the order in which they appear."""
    name = part_path(source, part).name
    return [name + ROWS, name] if kind is ListKind.ROWS else [name]


def divide_list(source: Path, parts: int, folder: Path, report: Report) -> int:
    """Write the parts of a list into a folder. Return the number of records.

    Args:
        parts: the number of parts, at least 1.
        folder: the folder for the files of all parts; see `part_names`.
        report: called with the number of records written.

    Raises:
        UsageError: there are more parts than records.
        DataError: the list or a file in it is wrong or missing.
    """
    kind = list_kind(source)
    if kind is ListKind.ROWS:
        return _divide_rows(source, parts, folder, report)
    if kind is ListKind.WINDOWS:
        records = [text for _, text in window_blocks(source, _lines(source))]
    else:
        read_list(source, "")  # checks every line
        records = [f"{line}\n" for line in _lines(source)]
    _check_count(source, parts, len(records), "images" if kind is ListKind.WINDOWS else "lines")
    for part in range(parts):
        target = folder / part_path(source, part).name
        target.write_text("".join(records[part::parts]), encoding="utf-8", errors="surrogateescape")
    report("dividing", len(records), len(records))
    return len(records)


def _lines(source: Path) -> list[str]:
    try:
        lines = [line for line in read_lines(source, "list") if line.strip()]
    except DataError as error:
        raise DataError(f"{source} is neither a database nor a list of lines of text") from error
    if not lines:
        raise DataError(f"the list {source} is empty")
    return lines


def _check_count(source: Path, parts: int, count: int, what: str) -> None:
    if parts > count:
        raise UsageError(f"cannot divide {source} into {parts} parts: it has only {count} {what}")


def _divide_rows(source: Path, parts: int, folder: Path, report: Report) -> int:
    """Divide the rows of all files.

    Each file becomes one file in each part that gets rows of it.
    """
    files = [listed_file(source, line) for line in read_file_list(source)]
    counts = [_row_count(path) for path in files]
    total = sum(counts)
    _check_count(source, parts, total, "rows")
    lists: list[list[str]] = [[] for _ in range(parts)]
    for part in range(parts):
        (folder / (part_path(source, part).name + ROWS)).mkdir()
    done = 0
    for number, (path, count) in enumerate(zip(files, counts, strict=True)):
        for part in range(parts):
            first = (part - done) % parts
            if first < count:
                name = f"{part_path(source, part).name}{ROWS}/{number:05d}.h5"
                _copy_rows(path, folder / name, first, parts)
                lists[part].append(name)
        done += count
        report("dividing", done, total)
    for part, names in enumerate(lists):
        text = "".join(f"{name}\n" for name in names)
        (folder / part_path(source, part).name).write_text(
            text, encoding="utf-8", errors="surrogateescape"
        )
    return total


def _copy_rows(path: Path, target: Path, first: int, step: int) -> None:
    """Write a file with rows first, first + step, ... of every dataset."""
    with _opened(path) as file, h5py.File(target, "w") as new:
        for name, dataset in _row_datasets(path, file):
            length = len(range(first, dataset.shape[0], step))
            copy = new.create_dataset(name, (length, *dataset.shape[1:]), dataset.dtype)
            row_bytes = max(
                1, int(np.prod(dataset.shape[1:], dtype=np.int64)) * dataset.dtype.itemsize
            )
            block = max(1, BLOCK_BYTES // (row_bytes * step))
            for start in range(0, length, block):
                count = min(block, length - start)
                begin = first + start * step
                rows = _read_rows(path, dataset, begin, begin + (count - 1) * step + 1)
                copy[start : start + count] = rows[::step]


def _read_rows(
    path: Path, dataset: h5py.Dataset, begin: int, end: int
) -> np.ndarray[tuple[int, ...], np.dtype]:
    try:
        return np.asarray(dataset[begin:end])
    except HDF5_ERRORS as error:
        raise DataError(
            f"{path}: dataset '{dataset.name}' cannot be read: it is damaged"
        ) from error


def _row_count(path: Path) -> int:
    with _opened(path) as file:
        counts = {dataset.shape[0] for _, dataset in _row_datasets(path, file)}
    if len(counts) != 1:
        raise DataError(
            f"{path}: its datasets have {sorted(counts)} rows, expected the same number in each"
        )
    return int(counts.pop())


def _row_datasets(path: Path, file: h5py.File) -> Iterator[tuple[str, h5py.Dataset]]:
    """Yield the datasets of a file by name.

    Raises:
        DataError: the file has no dataset, or holds something other than datasets with rows.
    """
    names: Sequence[str] = sorted(file)
    if not names:
        raise DataError(f"{path} has no dataset")
    for name in names:
        try:
            found = file.get(name)
        except HDF5_ERRORS as error:
            raise DataError(f"{path}: '{name}' cannot be read: it is damaged") from error
        if not isinstance(found, h5py.Dataset) or not found.shape:
            raise DataError(f"{path}: '{name}' is not a dataset of rows and cannot be divided")
        yield name, found


def _opened(path: Path) -> h5py.File:
    if not path.is_file():
        raise DataError(f"there is no HDF5 file {path}")
    try:
        return h5py.File(path, "r")
    except HDF5_ERRORS as error:
        raise DataError(
            f"{path} cannot be read as HDF5: it is damaged, or of a different format"
        ) from error


def partition_data(
    source: Path, parts: int, *, replace: bool = False, report: Report = silent
) -> int:
    """Divide the database `source` into `parts` >= 1 databases of the same kind. Return the number
    of records.

    Args:
        source: an LMDB or LevelDB folder, or a list file. It is only read; no other process may
            have a LevelDB open.
        parts: the number of parts. Their sizes differ by at most one record.
        replace: remove earlier parts, whatever their number.
        report: called with the number of records written, for a progress bar.

    Raises:
        UsageError: `parts` is not positive or exceeds the number of records.
        DataError: the database or list cannot be read, or a part exists already.
    """
    if parts < 1:
        raise UsageError(f"cannot divide {source} into {parts} parts: expected at least 1")
    if source.is_file():
        return _partition_list(source, parts, replace=replace, report=report)
    backend = require(source)
    targets = [part_path(source, part) for part in range(parts)]
    with ExitStack() as stack:
        cursor = stack.enter_context(closing(open_cursor(source, backend)))
        length = len(cursor)
        if parts > length:
            raise UsageError(
                f"cannot divide {source} into {parts} parts: it has only {length} records"
            )
        stack.enter_context(translated_writes(source))
        stage = stack.enter_context(staging(source.with_name(f"{source.name}-parts")))
        old = _replaceable(source, targets, replace=replace)
        _distribute(cursor, [stage.folder / target.name for target in targets], backend, report)
        stage.publish([target.name for target in targets], remove=old)
    return length


def _partition_list(source: Path, parts: int, *, replace: bool, report: Report) -> int:
    """Divide a list into lists. Return the number of its records."""
    kind = list_kind(source)
    names = [name for part in range(parts) for name in part_names(source, part, kind)]
    with translated_writes(source), staging(source.with_name(f"{source.name}-parts")) as stage:
        old = _replaceable(source, [source.with_name(name) for name in names], replace=replace)
        count = divide_list(source, parts, stage.folder, report)
        stage.publish(names, remove=old)
    return count


def _replaceable(source: Path, targets: list[Path], *, replace: bool) -> list[str]:
    """Return the names of earlier parts to remove.

    Raises:
        DataError: a part exists and `replace` is False.
    """
    old = _old_names(source) if replace else []
    for target in targets:
        if target.name not in old:
            refuse_existing(target, "give --replace, or move it first")
    return old


def _old_names(source: Path) -> list[str]:
    names = [part.name for part in existing_parts(source)]
    rows = [name + ROWS for name in names]
    return [*names, *(name for name in rows if source.with_name(name).exists())]


def existing_parts(source: Path) -> list[Path]:
    """Return the existing parts `<source>_<number>` of `source`, by number."""
    prefix = f"{source.name}_"
    numbered = [
        (int(entry.name.removeprefix(prefix)), entry)
        for entry in source.parent.iterdir()
        if entry.name.startswith(prefix) and entry.name.removeprefix(prefix).isdecimal()
    ]
    return [entry for _, entry in sorted(numbered)]


def _distribute(cursor: Cursor, targets: list[Path], backend: Backend, report: Report) -> None:
    """Distribute the records of `cursor` round robin to new databases."""
    length = len(cursor)
    with ExitStack() as stack:
        writers = [stack.enter_context(closing(open_writer(target, backend))) for target in targets]
        for number, (key, value) in enumerate(records(cursor)):
            writers[number % len(writers)].put(key, bytes(value))
            report("dividing", number + 1, length)


RECOGNIZED_BY = {Backend.LMDB: "data.mdb", Backend.LEVELDB: "CURRENT"}
# Files of the process that has the database open; they hold no records.
TRANSIENT = ("lock.mdb", "LOCK", "LOG", "LOG.old")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFiles:
    """The files of one part.

    Attributes:
        files: the paths as in the source and its list, absolute or relative.
        folders: the folders that hold only files of this part.
    """

    files: tuple[Path, ...]
    folders: tuple[Path, ...]


def part_files(source: Path, part: int, *, root: str = "") -> PartFiles:
    """Return the files of part number `part` of the divided `source`.

    Args:
        root: the prefix of each path in a list of images (`root_folder`).

    Raises:
        DataError: the part does not exist or is damaged.
    """
    path = part_path(source, part)
    if source.is_dir():
        last = RECOGNIZED_BY[require(path)]
        names = sorted(
            file.name for file in path.iterdir() if file.is_file() and file.name not in TRANSIENT
        )
        names.sort(key=lambda name: name == last)
        return PartFiles(files=tuple(path / name for name in names), folders=(path,))
    if not path.is_file():
        raise DataError(f"the part {path} does not exist")
    if list_kind(source) is ListKind.ROWS:
        rows = path.with_name(path.name + ROWS)
        return PartFiles(files=(*sorted(rows.iterdir()), path), folders=(rows,))
    return PartFiles(files=(*listed_images(path, root), path), folders=())


def is_divided(source: Path, parts: int) -> bool:
    """Return whether `source` is divided into exactly this many parts, none older than the source.

    Raises:
        DataError: it is divided into a different number of parts, or has changed since.
    """
    found = existing_parts(source) if source.exists() else []
    if not found:
        return False
    if [path.name for path in found] != [part_path(source, part).name for part in range(parts)]:
        raise DataError(
            f"{source} is divided into {len(found)} parts, not into {parts}: remove them, or add "
            "--replace to divide it again"
        )
    if any(_changed_s(path) < _changed_s(source) for path in found):
        raise DataError(
            f"{source} has changed since it was divided: add --replace to divide it again"
        )
    return True


def _changed_s(path: Path) -> float:
    """Return the time of the last change to the records of a database or list, in seconds."""
    files = (
        [file for file in path.iterdir() if file.name not in TRANSIENT] if path.is_dir() else [path]
    )
    return max((file.stat().st_mtime for file in files), default=0.0)
