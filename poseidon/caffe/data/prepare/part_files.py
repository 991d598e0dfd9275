"""The files of one part of a divided database or list.

Law: this module writes nothing. The file by which a part is recognized (`data.mdb`, `CURRENT`, the
list) is the last, so that a part that is copied in order is recognized only when it is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from poseidon.caffe.data.batches.partition import part_path
from poseidon.caffe.data.databases.kinds import Backend, require
from poseidon.caffe.data.prepare.split import existing_parts
from poseidon.caffe.data.prepare.split_list import ROWS, ListKind, list_kind, listed_images
from poseidon.errors import DataError

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
