"""Moving through a database by record number when it can only be stepped in key order.

Law: record numbers never end. Record r of a database of n records is record r mod n, as Caffe's cursor goes
back to the first record after the last. Stepping touches keys only, never values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path


class SteppingCursor(ABC):
    """A cursor on a non-empty database, standing on its first record when made.

    Args:
        path: the database, for messages.
        length: number of records if that is cheap to know, else None: then it is learnt at the first wrap.
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
        """Number of the record under the cursor, 0 <= position < len."""
        return self._position

    def seek(self, record: int) -> None:
        """Stand on record number `record` >= 0, taken modulo the number of records."""
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
        """Move `count` >= 0 records forward, from the last to the first."""
        self.seek(self._position + count)

    def _rewind(self) -> None:
        self._first()
        self._position = 0

    @abstractmethod
    def _first(self) -> None:
        """Stand on the first record."""

    @abstractmethod
    def _advance(self, count: int) -> int:
        """Stand `count` records further on; returns how many steps there were.

        Fewer than `count` means that the last record was reached, where the cursor need not be left standing.
        """

    @abstractmethod
    def _count(self) -> int:
        """Count the records; the cursor does not move."""
