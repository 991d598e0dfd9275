"""Division of a database or a list (`split_list.py`) among clients that share no file system.

Law: record i (in key order) goes to part i mod n unchanged. The parts appear beside the source as
`<name>_0` to `<name>_<n-1>`, all of them or none. Nothing is overwritten.

The files of one part of a divided database or list.

Law: this module writes nothing. The file by which a part is recognized (`data.mdb`, `CURRENT`, the
list) is the last, so that a part that is copied in order is recognized only when it is complete.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from poseidon.caffe.data.batches.partition import part_path
from poseidon.caffe.data.databases.cursor import Cursor, open_cursor, records
from poseidon.caffe.data.databases.kinds import Backend, require
from poseidon.caffe.data.databases.writer import open_writer, refuse_existing, translated_writes
from poseidon.caffe.data.prepare.split_list import (
    ROWS,
    ListKind,
    divide_list,
    list_kind,
    listed_images,
    part_names,
)
from poseidon.caffe.data.progress_reports import Report, silent
from poseidon.caffe.data.staging import staging
from poseidon.errors import DataError, UsageError


def partition_data(
    source: Path, parts: int, *, replace: bool = False, report: Report = silent
) -> int:
    """Divide the database `source` into `parts` >= 1 databases of the same kind.

    Args:
        source: an LMDB or LevelDB folder, or a list file. It is only read; no other process may
            have a LevelDB open.
        parts: the number of parts. Their sizes differ by at most one record.
        replace: remove earlier parts, whatever their number.
        report: called with the number of records written, for a progress bar.

    Returns:
        the number of records.

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
        source: the database or list that was divided.
        part: the number of the part.
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
