"""Dividing a list among clients that share no file system: of pictures, of HDF5 files, or of windows in pictures.

Law: record i goes to part i mod n unchanged: of a list of pictures its i-th line, of HDF5 files the i-th row of all of them
in their order, of a window file its i-th picture with its windows. What belongs to part k lies beside the source:
`<name>_k`, and for HDF5 the folder `<name>_k.rows` that the list `<name>_k` names, so that both can move to another host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

import h5py
import numpy as np

from poseidon.data.batches.hdf5_rows import read_file_list
from poseidon.data.batches.partition import part_path
from poseidon.data.batches.pictures import read_list
from poseidon.data.batches.window_file import window_blocks
from poseidon.data.progress import Report
from poseidon.errors import DataError, UsageError

ROWS = ".rows"
# Bytes of a dataset that are in memory at a time.
BLOCK_BYTES = 1 << 26


class ListKind(Enum):
    """What the lines of a list name."""

    PICTURES = "pictures"
    """A path and a label a line (ImageData)."""
    ROWS = "rows"
    """An HDF5 file a line (HDF5Data)."""
    WINDOWS = "windows"
    """Blocks of a picture and its windows (WindowData)."""


def list_kind(source: Path) -> ListKind:
    """What kind of list a file is, by its first line.

    Raises:
        DataError: it is no text, or holds no line.
    """
    first = _lines(source)[0].strip()
    if first.startswith("#"):
        return ListKind.WINDOWS
    named = listed_file(source, first)
    if named.suffix in (".h5", ".hdf5") or (named.is_file() and h5py.is_hdf5(named)):
        return ListKind.ROWS
    return ListKind.PICTURES


def listed_file(source: Path, line: str) -> Path:
    """Return the HDF5 file that a line means: beside the list, else under the current folder."""
    beside = source.parent / line
    return beside if beside.exists() else Path(line)


def listed_pictures(source: Path, root: str) -> list[Path]:
    """Return the pictures that a list of pictures or a window file names, each once.

    Args:
        source: the list.
        root: put before each path as it is (`root_folder`).

    Raises:
        DataError: a line is wrong.
    """
    if list_kind(source) is ListKind.WINDOWS:
        found = [Path(root + path) for path, _ in window_blocks(source, _lines(source))]
    else:
        found = [Path(line.path) for line in read_list(source, root)]
    return list(dict.fromkeys(found))


def part_names(source: Path, part: int, kind: ListKind) -> list[str]:
    """What lies beside the list `source` for one part: the order in which it appears."""
    name = part_path(source, part).name
    return [name + ROWS, name] if kind is ListKind.ROWS else [name]


def deal_list(source: Path, parts: int, folder: Path, report: Report) -> int:
    """Write the parts of a list into a folder.

    Args:
        source: the list.
        parts: how many, at least 1.
        folder: gets the names of `part_names`, of every part.
        report: told how many records are dealt.

    Returns:
        the number of records.

    Raises:
        UsageError: there are more parts than records.
        DataError: the list, or a file that it names, is wrong or missing.
    """
    kind = list_kind(source)
    if kind is ListKind.ROWS:
        return _deal_rows(source, parts, folder, report)
    if kind is ListKind.WINDOWS:
        records = [text for _, text in window_blocks(source, _lines(source))]
    else:
        records = [f"{line}\n" for line in _lines(source)]
    _check_count(source, parts, len(records), "pictures" if kind is ListKind.WINDOWS else "lines")
    for part in range(parts):
        target = folder / part_path(source, part).name
        target.write_text("".join(records[part::parts]), encoding="utf-8")
    report("dividing", len(records), len(records))
    return len(records)


def _lines(source: Path) -> list[str]:
    try:
        lines = [line for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source} is neither a database nor a list of UTF-8 lines") from error
    if not lines:
        raise DataError(f"the list {source} has no lines")
    return lines


def _check_count(source: Path, parts: int, count: int, what: str) -> None:
    if parts > count:
        raise UsageError(f"cannot divide {source} into {parts} parts: it has only {count} {what}")


def _deal_rows(source: Path, parts: int, folder: Path, report: Report) -> int:
    """Deal the rows of all files out; each file becomes one file of each part that gets rows of it."""
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
        (folder / part_path(source, part).name).write_text(text, encoding="utf-8")
    return total


def _copy_rows(path: Path, target: Path, first: int, step: int) -> None:
    """A new file of rows first, first + step, ... of every dataset."""
    with _opened(path) as file, h5py.File(target, "w") as new:
        for name, dataset in _row_datasets(path, file):
            length = len(range(first, dataset.shape[0], step))
            copy = new.create_dataset(name, (length, *dataset.shape[1:]), dataset.dtype)
            row_bytes = max(1, int(np.prod(dataset.shape[1:], dtype=np.int64)) * dataset.dtype.itemsize)
            block = max(1, BLOCK_BYTES // (row_bytes * step))
            for at in range(0, length, block):
                count = min(block, length - at)
                begin = first + at * step
                rows = _read_rows(path, dataset, begin, begin + (count - 1) * step + 1)
                copy[at : at + count] = rows[::step]


def _read_rows(
    path: Path, dataset: h5py.Dataset, begin: int, end: int
) -> np.ndarray[tuple[int, ...], np.dtype]:
    try:
        return np.asarray(dataset[begin:end])
    except OSError as error:
        raise DataError(f"{path}: dataset '{dataset.name}' cannot be read: it is damaged") from error


def _row_count(path: Path) -> int:
    with _opened(path) as file:
        counts = {dataset.shape[0] for _, dataset in _row_datasets(path, file)}
    if len(counts) != 1:
        raise DataError(f"{path}: its datasets have {sorted(counts)} rows, expected as many in each")
    return int(counts.pop())


def _row_datasets(path: Path, file: h5py.File) -> Iterator[tuple[str, h5py.Dataset]]:
    """Yield the datasets of a file by name.

    Raises:
        DataError: there is none, or something else than a dataset with rows.
    """
    names: Sequence[str] = sorted(file)
    if not names:
        raise DataError(f"{path} holds no dataset")
    for name in names:
        found = file.get(name)
        if not isinstance(found, h5py.Dataset) or not found.shape:
            raise DataError(f"{path}: '{name}' is no dataset of rows, so it cannot be divided")
        yield name, found


def _opened(path: Path) -> h5py.File:
    if not path.is_file():
        raise DataError(f"there is no HDF5 file {path}")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"{path} cannot be read as HDF5: it is damaged, or of another format") from error
