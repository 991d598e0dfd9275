"""The history of a table on its way to a worker that has asked for it.

Law: the worker gets the history at one clock, the request's, although the shards continue: they do
not write to memory that they send (`Cell.lend`), and no shard can end an iteration without the
pushes that the worker sends after its request. The history of a table of another plane is at the
clock of its first piece. The caller sees to it that the table's worker on its own host does not push
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ps_server.errors import RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.placement import Chunk


class AskedHistory:
    """The arrays of a table's history, which are filled piece by piece.

    Args:
        chunks: of the table.
        arrays: flat float32 of the table's size, to be written to.
        clock: whose history it is; None: that of the first piece.
    """

    def __init__(
        self, chunks: Sequence[Chunk], arrays: Sequence[m.Array], clock: int | None
    ) -> None:
        self._chunks = chunks
        self._arrays = arrays
        self._clock = clock
        self._came = [0] * len(chunks)  # elements of each chunk, over all arrays
        self._left = sum(chunk.size for chunk in chunks) * len(arrays)

    @property
    def arrays(self) -> Sequence[m.Array] | None:
        """All arrays; None while pieces are missing."""
        return None if self._left else self._arrays

    def has(self, chunk: int) -> bool:
        """Return whether all pieces of a chunk have come."""
        return self._came[chunk] == self._chunks[chunk].size * len(self._arrays)

    def put(self, piece: m.History) -> None:
        """Write a piece to its place: the next one of its chunk.

        Raises:
            RemoteProtocolError: it is not the next one, or of a different clock.
        """
        chunk = self._chunks[piece.chunk]
        number, start = divmod(piece.start, chunk.size)
        stop = start + piece.array.size
        if (
            piece.clock != (piece.clock if self._clock is None else self._clock)
            or piece.start != self._came[piece.chunk]
            or number >= len(self._arrays)
            or not start < stop <= chunk.size
        ):
            raise RemoteProtocolError(
                f"shard {chunk.shard} sent a history that does not fit chunk {chunk.index}"
            )
        self._clock = piece.clock
        np.copyto(self._arrays[number][chunk.start + start : chunk.start + stop], piece.array)
        self._came[piece.chunk] += piece.array.size
        self._left -= piece.array.size
