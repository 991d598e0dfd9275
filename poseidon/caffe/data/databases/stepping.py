"""Access by record number for databases that can only be stepped in key order.

Law: record numbers are unbounded. Record r of a database with n records is record r mod n, as
Caffe's cursor returns to the first record after the last. Stepping reads keys only, never values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path


class SteppingCursor(ABC):
    """A cursor on a database with at least one record, initially on the first.

    Args:
        path: the database, for error messages.
        length: the number of records, or None if it is expensive to compute; then it is known after
            the first wrap.
    """

    def __init__(self, path: Path, length: int | None) -> None:
        self.path = path
        self._length = length
        self._position = 0

    def __len__(self) -> int:
        if self._length is None:
            self._length = self._count()
        return self._length

    @property
    def position(self) -> int:
        """The number of the current record, 0 <= position < len."""
        return self._position

    def seek(self, record: int) -> None:
        """Move to record number `record` >= 0, modulo the number of records."""
        if self._length is not None:
            record %= self._length
        if record < self._position:
            self._rewind()
        while self._position < record:
            wanted = record - self._position
            made = self._advance(wanted)
            self._position += made
            if made < wanted:
                self._length = self._position + 1
                self._rewind()
                record %= self._length

    def skip(self, count: int) -> None:
        """Move forward by `count` >= 0 records, from the last to the first."""
        self.seek(self._position + count)

    def _rewind(self) -> None:
        self._first()
        self._position = 0

    @abstractmethod
    def _first(self) -> None:
        """Move to the first record."""

    @abstractmethod
    def _advance(self, count: int) -> int:
        """Move forward by up to `count` records and return the number of steps made.

        Fewer than `count` steps mean that the last record was reached; the cursor's position is
        then undefined.
        """

    @abstractmethod
    def _count(self) -> int:
        """Count the records without moving the cursor."""
