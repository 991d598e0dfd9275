"""What scripts take from `workspace.C`, the compiled part of Caffe2."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import torch

from poseidon.caffe2.operators import registry
from poseidon.caffe2.runtime import databases
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.values import as_bytes
from poseidon.caffe2.runtime.views import WorkspaceView
from poseidon.caffe2.runtime.workspace import Workspace as RuntimeWorkspace
from poseidon.caffe2.workspace import current


class _WithCurrent(type):
    @property
    def current(cls) -> WorkspaceView:
        return WorkspaceView(current.current())


class Workspace(WorkspaceView, metaclass=_WithCurrent):
    """A workspace of its own, or inside one whose blobs it sees; see `Workspace.current`."""

    def __init__(self, parent: WorkspaceView | None = None) -> None:
        super().__init__(RuntimeWorkspace(parent=None if parent is None else parent._workspace))


use_mkldnn = torch.backends.mkldnn.is_available()
has_fbgemm = False


def nearby_opnames(name: str) -> list[str]:
    """Return the names of operators that are most like a name."""
    return registry.nearest(name)


def registered_operators() -> list[str]:
    return registry.registered()


def is_numa_enabled() -> bool:
    """Return False: blobs are not bound to NUMA nodes."""
    return False


def get_stats() -> dict[str, Any]:
    """Return an empty dictionary: there are no counters."""
    return {}


class Mode(enum.Enum):
    """How a database is opened."""

    read = 0
    """It exists and is read."""
    write = 1
    """It is written from its beginning."""
    new = 2
    """It must not exist, and is written."""


class Transaction:
    """Records that are put into a database."""

    def __init__(self, database: DB) -> None:
        self._database = database

    def put(self, key: bytes, value: bytes) -> None:
        self._database._pairs.append((as_bytes(key), as_bytes(value)))

    def commit(self) -> None:
        """Do nothing: the database is written when it is closed."""


class DBCursor:
    """A place among the records of a database, from the first to behind the last."""

    def __init__(self, pairs: list[tuple[bytes, bytes]]) -> None:
        self._pairs, self._place = pairs, 0

    def valid(self) -> bool:
        """Return whether there is a record."""
        return self._place < len(self._pairs)

    def supports_seek(self) -> bool:
        return True

    def seek_to_first(self) -> None:
        self._place = 0

    def seek(self, key: bytes) -> None:
        """Go to the first record whose key is not less than this one."""
        keys = [known for known, _ in self._pairs]
        self._place = next(
            (at for at, known in enumerate(keys) if known >= as_bytes(key)), len(keys)
        )

    def next(self) -> None:
        self._place += 1

    def key(self) -> bytes:
        return self._pairs[self._place][0]

    def value(self) -> bytes:
        return self._pairs[self._place][1]


class DB:
    """A database that is read, or written when it is closed or forgotten."""

    def __init__(self, db_type: str, path: str, mode: Mode) -> None:
        self._type, self._path, self._mode = db_type, path, mode
        self._pairs: list[tuple[bytes, bytes]] = []
        if mode is Mode.read:
            self._pairs = list(databases.records(path, db_type))
        elif mode is Mode.new and Path(path).exists():
            raise EnforceNotMet(f"The database {path} exists already")
        self._open = True

    def new_transaction(self) -> Transaction:
        """Return a transaction.

        Raises:
            RuntimeError: the database is only read.
        """
        if self._mode is Mode.read:
            raise EnforceNotMet(f"The database {self._path} is open for reading")
        return Transaction(self)

    def new_cursor(self) -> DBCursor:
        """Return a cursor at the first record."""
        return DBCursor(self._pairs)

    def close(self) -> None:
        """Write the records; once."""
        written, self._open = self._open and self._mode is not Mode.read, False
        if written:
            databases.write_records(self._path, self._type, self._pairs)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()


def create_db(db_type: str, path: str, mode: Mode) -> DB:
    """Return a database of a type (`registered_dbs`)."""
    return DB(db_type, path, mode)


def registered_dbs() -> list[str]:
    """Return the types of databases, in both spellings of Caffe2."""
    return ["LMDB", "LevelDB", "MiniDB", "leveldb", "lmdb", "minidb"]


has_cuda_support = current.has_cuda_support
has_hip_support = current.has_hip_support
has_gpu_support = current.has_gpu_support
num_cuda_devices = current.NumCudaDevices()
cuda_version = current.GetCUDAVersion()
