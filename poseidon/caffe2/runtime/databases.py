"""Databases of records: minidb here, LMDB and LevelDB through `poseidon.caffe.data`.

A minidb is one file of records: lengths of key and value (32-bit, little-endian), key, value.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from poseidon.base.durable import replacing
from poseidon.base.paths import own_command
from poseidon.caffe.data.cursor import (
    Cursor,
    DatabaseWriter,
    open_cursor,
    refuse_existing,
    translated_writes,
    write_database,
)
from poseidon.caffe.data.databases import Backend, detect
from poseidon.caffe.data.staging import staging
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.errors import DataError

_LENGTHS = struct.Struct("<ii")


class MinidbCursor:
    """A cursor on a minidb, which is indexed when it is opened."""

    def __init__(self, path: Path) -> None:
        """Open a minidb.

        Raises:
            RuntimeError: the file is missing, empty, or cut off within a record.
        """
        try:
            self._data = path.read_bytes()
        except OSError as error:
            raise EnforceNotMet(f"Cannot open the minidb {path}: {error.strerror}") from error
        self.path = path
        self._records: list[tuple[int, int, int]] = []
        self._index(path)
        self.position = 0

    def _index(self, path: Path) -> None:
        at, end = 0, len(self._data)
        while at < end:
            if at + _LENGTHS.size > end:
                raise EnforceNotMet(f"The minidb {path} is cut off at byte {end}")
            key, value = _LENGTHS.unpack_from(self._data, at)
            at += _LENGTHS.size
            if key < 0 or value < 0 or at + key + value > end:
                raise EnforceNotMet(f"{path} is cut off at byte {end}, or is not a minidb")
            if key == 0:
                break
            self._records.append((at, key, value))
            at += key + value
        if not self._records:
            raise EnforceNotMet(f"The minidb {path} has no records")

    def __len__(self) -> int:
        return len(self._records)

    def key(self) -> bytes:
        at, key, _ = self._records[self.position]
        return self._data[at : at + key]

    def value(self) -> bytes:
        at, key, value = self._records[self.position]
        return self._data[at + key : at + key + value]

    def skip(self, count: int) -> None:
        """Move forward by some records, from the last to the first."""
        self.position = (self.position + count) % len(self._records)

    def seek(self, record: int) -> None:
        """Move to a record."""
        self.position = record % len(self._records)

    def close(self) -> None:
        """Forget the file."""
        self._data = b""


def backend_of(db_type: str) -> Backend | None:
    """Return the kind of a database by Caffe2's name, None for a minidb.

    Raises:
        RuntimeError: there is no such kind.
    """
    name = db_type.lower()
    if name == "minidb":
        return None
    if name.upper() in Backend.__members__:
        return Backend[name.upper()]
    raise EnforceNotMet(f"no databases have the type {db_type}: use minidb, lmdb or leveldb")


def open_database(path: str, db_type: str) -> Cursor:
    """Return a cursor on the first record of a database.

    Raises:
        RuntimeError: the database is missing, empty, of a different kind, or damaged.
    """
    backend = backend_of(db_type)
    found = detect(Path(path))
    if found not in (None, backend):
        raise EnforceNotMet(f"The database {path} is {found.title} ({found.suffix}), not {db_type}")
    if backend is None:
        return MinidbCursor(Path(path))
    if not Path(path).exists():
        raise EnforceNotMet(
            f"The database {path} does not exist: make it first with {own_command()} make_db (its "
            "--help has examples)"
        )
    try:
        return open_cursor(Path(path), backend)
    except DataError as error:
        raise EnforceNotMet(str(error)) from error


def exists(path: str, db_type: str) -> bool:
    backend = backend_of(db_type)
    return Path(path).is_file() if backend is None else Path(path).is_dir()


def count(path: str, db_type: str) -> int:
    """Return the number of records of a database.

    Raises:
        RuntimeError: it cannot be read.
    """
    with closing(open_database(path, db_type)) as cursor:
        return len(cursor)


def records(path: str, db_type: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield key and value of all records of a database.

    Raises:
        RuntimeError: it cannot be read.
    """
    cursor = open_database(path, db_type)
    try:
        last = -1
        while cursor.position > last:
            last = cursor.position
            yield cursor.key(), bytes(cursor.value())
            cursor.skip(1)
    finally:
        cursor.close()


class MinidbWriter:
    """A `DatabaseWriter` of a minidb in a new file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")

    def put(self, key: bytes, value: bytes) -> None:
        self._file.write(_LENGTHS.pack(len(key), len(value)) + key + value)

    def close(self) -> None:
        self._file.close()


@contextmanager
def new_database(path: Path, db_type: str) -> Iterator[DatabaseWriter]:
    """Yield a writer of a new database of any kind; it is at `path` only after success.

    Raises:
        DataError: `path` exists, another process writes it, or a write fails.
    """
    backend = backend_of(db_type)
    if backend is not None:
        with write_database(path, backend) as writer:
            yield writer
        return
    refuse_existing(path)
    with translated_writes(path), staging(path) as stage:
        with closing(MinidbWriter(stage.folder / path.name)) as minidb:
            yield minidb
        stage.publish([path.name])


def write_records(path: str, db_type: str, pairs: Iterable[tuple[bytes, bytes]]) -> None:
    """Write a database; a minidb of that name is replaced when all is written.

    Raises:
        RuntimeError: it cannot be written; an earlier minidb is unchanged.
    """
    backend = backend_of(db_type)
    try:
        if backend is None:
            if not (folder := Path(path).parent).exists():
                folder.mkdir(parents=True)
            with replacing(Path(path)) as file:
                for key, value in pairs:
                    file.write(_LENGTHS.pack(len(key), len(value)) + key + value)
        else:
            with write_database(Path(path), backend) as writer:
                for key, value in pairs:
                    writer.put(key, value)
    except DataError as error:
        raise EnforceNotMet(str(error)) from error
    except OSError as error:
        reason = error.strerror or error
        raise EnforceNotMet(f"Cannot write the database {path}: {reason}") from error
