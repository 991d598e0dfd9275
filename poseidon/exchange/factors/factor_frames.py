"""Factors as frames between workers: a msgpack header, then u and v as raw float32, never copied
here, and an end. `poseidon.exchange.worker_links` has the connections.

    [VERSION, "Factors", table, clock, rows] u v ""

The last frame is empty: the sender's transport begins it only when the kernel has all of v, whereas
an encrypted frame counts as sent from its beginning.

Law: `decode` accepts exactly what `encode` makes; everything else is a RemoteProtocolError. Sizes
are checked against the tables here, legality at this moment by `FactorSession`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgpack
import numpy as np

from poseidon.exchange.base import Array
from poseidon.exchange.factors.factor_rounds import Factors, FactorTable, Pair
from poseidon.exchange.worker_links import VERSION, read_header
from ps_server import RemoteProtocolError
from ps_server.transport.base import Buffer

MAX_ROWS = 2**24


def encode(message: Factors) -> list[Buffer]:
    """Turn a message into frames; arrays are passed on as views of their own memory."""
    u, v = message.pair
    header = [VERSION, "Factors", message.table, message.clock, len(u)]
    return [msgpack.packb(header), _raw(u), _raw(v), b""]


def decode(frames: Sequence[Buffer], tables: Sequence[FactorTable]) -> Factors:
    """Turn frames into a message; arrays are views of the frames.

    Raises:
        RemoteProtocolError: the frames are not a message that `encode` could have made for these
            tables.
    """
    match read_header(frames[0]), len(frames):
        case [int(), "Factors", int(table), int(clock), int(rows)], 4 if not len(frames[3]):
            if not (0 <= table < len(tables) and clock >= 0 and 0 <= rows <= MAX_ROWS):
                raise RemoteProtocolError(
                    "factors name a table, clock or number of rows that cannot be"
                )
            spec = tables[table]
            u, v = _matrix(frames[1], rows, spec.outputs), _matrix(frames[2], rows, spec.inputs)
            return Factors(table, clock, Pair(u, v))
        case _:
            raise RemoteProtocolError("a peer sent something that is not factors")


def _matrix(frame: Buffer, rows: int, columns: int) -> Array:
    if memoryview(frame).nbytes != 4 * rows * columns:
        raise RemoteProtocolError(
            f"a factor of {rows} x {columns} has {memoryview(frame).nbytes} bytes"
        )
    return np.frombuffer(frame, dtype="<f4").reshape(rows, columns)


def _raw(array: Array) -> memoryview:
    return np.ascontiguousarray(array, dtype="<f4").reshape(-1).data.cast("B")
