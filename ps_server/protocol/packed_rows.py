"""Some rows of a chunk in place of all its elements: exact, for tables that few indices look up.

    numbers   of the rows that follow, in increasing order, as uint32: 0 is the chunk's first whole
              row
    edges     the elements before the first whole row and after the last one
    rows      the elements of these rows

Laws:

* A push, and a value that is a mean gradient, leaves out rows of which every bit is 0. Another
  value leaves out rows with the same bits as in the value before. So the receiver has the bits of
  the whole array.
* A worker may write to a mean gradient before the next one comes, not to another value.
* The bytes are fewer than the array's; otherwise the array is sent. There are some, because an
  empty array is an iteration that is skipped: where no row is to be sent, the first one is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ps_server.errors import RemoteProtocolError
from ps_server.protocol.messages import Array
from ps_server.protocol.placement import Chunk

Packed = NDArray[np.uint8]
_WORD = 4


class ChunkRows(NamedTuple):
    """The rows in a chunk.

    Attributes:
        before: elements before the first whole row.
        whole: number of whole rows.
        row: elements of a row.
        after: elements after the last whole row.
    """

    before: int
    whole: int
    row: int
    after: int

    @classmethod
    def of(cls, chunk: Chunk, row: int) -> ChunkRows:
        """Return the rows of a chunk of a table whose rows have so many elements."""
        before = min(-chunk.start % row, chunk.size)
        whole, after = divmod(chunk.size - before, row)
        return cls(before, whole, row, after)

    def pack_nonzero(self, array: Array) -> Packed | None:
        """Return the rows of an array that are not zero; None where that is not shorter."""
        bits = self._rows(array).view(np.uint32)
        return self._pack(array, np.flatnonzero(bits.any(axis=1)))

    def pack_changed(self, array: Array, before: Array) -> Packed | None:
        """Return the rows of an array whose bits differ from the array before; None where that is
        not shorter.
        """
        bits, others = self._rows(array).view(np.uint32), self._rows(before).view(np.uint32)
        return self._pack(array, np.flatnonzero((bits != others).any(axis=1)))

    def _pack(self, array: Array, rows: NDArray[np.intp]) -> Packed | None:
        if not (len(rows) or self.before or self.after):
            rows = np.zeros(1, np.intp)
        words = len(rows) * (1 + self.row) + self.before + self.after
        if words >= array.size:
            return None
        packed = np.empty(words, np.float32)
        numbers, edges, chosen = self._split(packed)
        numbers[:] = rows
        edges[: self.before] = array[: self.before]
        edges[self.before :] = array[array.size - self.after :]
        np.take(self._rows(array), rows, axis=0, out=chosen)
        return packed.view(np.uint8)

    def check(self, packed: Packed) -> None:
        """Refuse bytes that `pack_nonzero` and `pack_changed` cannot have made.

        Raises:
            RemoteProtocolError: says why.
        """
        words, rest = divmod(packed.size, _WORD)
        count, more = divmod(words - self.before - self.after, 1 + self.row)
        if not words or rest or more or not 0 <= count <= self.whole:
            raise RemoteProtocolError(
                f"{packed.size} bytes are not some of {self.whole} rows of {self.row} elements"
            )
        numbers, _, _ = self._split(packed.view(np.float32))
        if count and (numbers[-1] >= self.whole or np.any(numbers[1:] <= numbers[:-1])):
            raise RemoteProtocolError("the numbers of rows do not increase within their chunk")

    def unpack(self, packed: Packed, out: Array) -> None:
        """Write the rows that were sent to an array of the chunk's size; the others stay."""
        numbers, edges, chosen = self._split(packed.view(np.float32))
        out[: self.before] = edges[: self.before]
        out[out.size - self.after :] = edges[self.before :]
        self._rows(out)[numbers] = chosen

    def _rows(self, array: Array) -> Array:
        whole = array[self.before : array.size - self.after]
        return whole.reshape(self.whole, self.row)

    def _split(self, words: Array) -> tuple[NDArray[np.uint32], Array, Array]:
        edges = self.before + self.after
        count = (words.size - edges) // (1 + self.row)
        numbers, values = words[:count].view(np.uint32), words[count:]
        return numbers, values[:edges], values[edges:].reshape(count, self.row)
