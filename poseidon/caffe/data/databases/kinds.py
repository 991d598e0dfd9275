"""The backends, and detection of the backend of a database folder.

Law: a backend is recognized by the files in the folder, before any library opens it (LevelDB
creates files even when it fails). A wrong `backend:` in a definition, a missing folder and a folder
of a different kind are different errors.
"""

from __future__ import annotations

import shlex
from enum import IntEnum
from pathlib import Path

from poseidon.base.hints import own_command
from poseidon.errors import DataError, UsageError

IN_README = "the README.md of a folder of `poseidon init` has the command"
"""For an error about data that do not exist yet."""


class Backend(IntEnum):
    """A kind of database, with its number in Caffe's `DataParameter.DB`."""

    LEVELDB = 0
    """A folder that one process at a time can open."""
    LMDB = 1
    """A memory-mapped file that any number of processes can read at the same time."""

    @property
    def title(self) -> str:
        """The name as its project spells it."""
        return "LevelDB" if self is Backend.LEVELDB else "LMDB"

    @property
    def suffix(self) -> str:
        """The suffix of such folders in Caffe's examples: `lmdb` or `leveldb`."""
        return self.name.lower()

    @staticmethod
    def parse(name: str) -> Backend:
        """Return the backend called `lmdb` or `leveldb`, in any case; UsageError for another
        name.
        """
        try:
            return Backend[name.upper()]
        except KeyError:
            raise UsageError(f"unknown backend '{name}': expected lmdb or leveldb") from None


def detect(path: Path) -> Backend | None:
    """Return the kind of database in the folder `path`, or None if it is not a database."""
    if (path / "data.mdb").is_file():
        return Backend.LMDB
    if (path / "CURRENT").is_file():
        return Backend.LEVELDB
    return None


def _maker(name: str) -> str:
    """Return the command that makes a database of this name, by the names of Caffe's examples."""
    makers = {
        "siamese": "convert_mnist_siamese",
        "mnist": "convert_mnist",
        "cifar": "prepare_cifar10",
    }
    known = next((maker for part, maker in makers.items() if part in name), None)
    if known is not None:
        return f"{own_command()} {known} ({IN_README})"
    return (
        f"{own_command()} make_db --format=caffe FOLDER {shlex.quote(name)}, of a folder with a "
        "sub-folder of pictures for each class, or with convert_imageset, of a list"
    )


def require(path: Path) -> Backend:
    """Return the kind of database in the folder `path`.

    Raises:
        DataError: the folder does not exist or is not a database.
    """
    if not path.exists():
        raise DataError(
            f"the database {path} does not exist: create it first with {_maker(path.name)}"
        )
    found = detect(path)
    if found is None:
        raise DataError(
            f"{path} is not a database: expected a folder with data.mdb (LMDB) or CURRENT "
            "(LevelDB) in it"
        )
    return found


def require_kind(path: Path, backend: Backend, *, by_flag: bool = False) -> None:
    """Check that the folder `path` holds a database of the kind `backend`.

    Args:
        path: the folder.
        backend: what a layer names, or a flag.
        by_flag: whether the flag --backend names it.

    Raises:
        DataError: the folder does not exist, is not a database, or is of the other kind.
    """
    found = require(path)
    if found is not backend:
        named = f"--backend={found.suffix}" if by_flag else f"backend: {found.name}"
        raise DataError(
            f"the database {path} is {found.title}, but was named as {backend.title}: write {named}"
        )
