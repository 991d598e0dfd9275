"""Which kind of database a folder holds.

Law: a database is known by its files, so that a wrong `backend:` in a definition is told apart from a
missing or a foreign folder before any library opens it (LevelDB leaves files behind even when it fails).
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

from poseidon.errors import DataError, UsageError


class Backend(IntEnum):
    """The numbers are those of Caffe's `DataParameter.DB`."""

    LEVELDB = 0
    """A folder that one process at a time may open."""
    LMDB = 1
    """A memory-mapped file that any number of processes may read at once."""

    @property
    def title(self) -> str:
        """How its own project spells it."""
        return "LevelDB" if self is Backend.LEVELDB else "LMDB"

    @property
    def suffix(self) -> str:
        """The ending that Caffe's examples give to folders of this kind: `lmdb` or `leveldb`."""
        return self.name.lower()

    @staticmethod
    def parse(name: str) -> Backend:
        """Return the backend called `lmdb` or `leveldb`, in any case; UsageError for another name."""
        try:
            return Backend[name.upper()]
        except KeyError:
            raise UsageError(f"unknown backend '{name}': expected lmdb or leveldb") from None


def detect(path: Path) -> Backend | None:
    """Return the kind of database in the folder `path`, or None when it holds neither."""
    if (path / "data.mdb").is_file():
        return Backend.LMDB
    if (path / "CURRENT").is_file():
        return Backend.LEVELDB
    return None


def require(path: Path) -> Backend:
    """Return the kind of database in the folder `path`.

    Raises:
        DataError: nothing is there, or it is no database.
    """
    if not path.exists():
        raise DataError(
            f"the database {path} does not exist: make it first, for example with a create script of examples/ "
            "(examples/cifar10/create_cifar10.sh)"
        )
    found = detect(path)
    if found is None:
        raise DataError(
            f"{path} is not a database: expected a folder with data.mdb (LMDB) or CURRENT (LevelDB) in it"
        )
    return found


def require_kind(path: Path, backend: Backend) -> None:
    """Check that the folder `path` holds a database of the kind `backend`.

    Raises:
        DataError: nothing is there, it is no database, or one of the other kind.
    """
    found = require(path)
    if found is not backend:
        raise DataError(
            f"the database {path} is {found.title}, but was named as {backend.title}: "
            f"write backend: {found.name} (--backend={found.suffix})"
        )
