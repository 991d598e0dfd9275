"""Which files make up one part of a divided database or list: what its client needs to have.

Law: only names and order are thought about here; nothing is written. What a part is known by (`data.mdb`, `CURRENT`, the list
itself) is the last of its files, so that a part that is copied in order is there when it is whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from poseidon.data.batches.partition import part_path
from poseidon.data.databases.kinds import Backend, require
from poseidon.data.prepare.split import existing_parts
from poseidon.data.prepare.split_list import ROWS, ListKind, list_kind, listed_pictures
from poseidon.errors import DataError

KNOWN_BY = {Backend.LMDB: "data.mdb", Backend.LEVELDB: "CURRENT"}
# They belong to whoever has the database open, not to its records.
PASSING = ("lock.mdb", "LOCK", "LOG", "LOG.old")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFiles:
    """The files of one part.

    Attributes:
        files: as the source and its list name them, absolute or not.
        folders: that hold nothing but files of this part.
    """

    files: tuple[Path, ...]
    folders: tuple[Path, ...]


def part_files(source: Path, part: int, *, root: str = "") -> PartFiles:
    """Return the files of part number `part` of the divided `source`.

    Args:
        source: the database or list that was divided.
        part: its number.
        root: of a list of pictures, what stands before each path (`root_folder`).

    Raises:
        DataError: the part is not there or is damaged.
    """
    mine = part_path(source, part)
    if source.is_dir():
        known_by = KNOWN_BY[require(mine)]
        names = sorted(path.name for path in mine.iterdir() if path.is_file() and path.name not in PASSING)
        names.sort(key=lambda name: name == known_by)
        return PartFiles(files=tuple(mine / name for name in names), folders=(mine,))
    if not mine.is_file():
        raise DataError(f"the part {mine} does not exist")
    if list_kind(source) is ListKind.ROWS:
        rows = mine.with_name(mine.name + ROWS)
        return PartFiles(files=(*sorted(rows.iterdir()), mine), folders=(rows,))
    return PartFiles(files=(*listed_pictures(mine, root), mine), folders=())


def is_divided(source: Path, parts: int) -> bool:
    """Return whether `source` lies there in just this many parts, none older than itself.

    Raises:
        DataError: it is divided in another way, or has changed since.
    """
    there = existing_parts(source) if source.exists() else []
    if not there:
        return False
    if [path.name for path in there] != [part_path(source, part).name for part in range(parts)]:
        raise DataError(
            f"{source} lies there in {len(there)} parts, not in {parts}: remove them, or add --replace to divide it again"
        )
    if any(_changed_s(path) < _changed_s(source) for path in there):
        raise DataError(f"{source} has changed since it was divided: add --replace to divide it again")
    return True


def _changed_s(path: Path) -> float:
    """When the records of a database or list last changed."""
    files = [file for file in path.iterdir() if file.name not in PASSING] if path.is_dir() else [path]
    return max((file.stat().st_mtime for file in files), default=0.0)
