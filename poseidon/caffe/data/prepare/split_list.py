"""Division of a list of images, HDF5 files or windows among clients that share no file system.

Law: record i goes to part i mod n unchanged. Record i is the i-th line of a list of images, the
i-th row of all HDF5 files in their order, or the i-th image of a window file with its windows. Part
k appears beside the source as the list `<name>_k`, for HDF5 also the folder `<name>_k.rows` that
the list names, so that both can move to another host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

import h5py
import numpy as np

from poseidon.caffe.data.batches.hdf5_rows import HDF5_ERRORS, read_file_list
from poseidon.caffe.data.batches.images import read_list
from poseidon.caffe.data.batches.lists import read_lines
from poseidon.caffe.data.batches.partition import part_path
from poseidon.caffe.data.batches.window_file import window_blocks
from poseidon.caffe.data.progress_reports import Report
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
    """Resolve the path of an HDF5 file in a list: beside the list, else under the current
    folder.
    """
    beside = source.parent / line
    return beside if beside.exists() else Path(line)


def listed_images(source: Path, root: str) -> list[Path]:
    """Return the images in a list of images or a window file, without duplicates.

    Args:
        source: the list.
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
    """Write the parts of a list into a folder.

    Args:
        source: the list.
        parts: the number of parts, at least 1.
        folder: the folder for the files of all parts; see `part_names`.
        report: called with the number of records written.

    Returns:
        the number of records.

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
