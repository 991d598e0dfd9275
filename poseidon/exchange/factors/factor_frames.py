"""The messages between workers as frames: a msgpack header, then u and v as raw float32, never
copied here, and an end.

    header   [VERSION, "Join", rank, token]                      the first message of a connection
             [VERSION, "Leave"]                                  the last one: its connection may end now
             [VERSION, "Factors", table, clock, rows] u v ""

The last frame is empty: the sender's transport begins it only when the kernel has all of v, whereas
an encrypted frame counts as sent from its beginning.

Law: `decode` accepts exactly what `encode` makes; everything else is a RemoteProtocolError. Sizes
are checked against the tables here, legality at this moment by `FactorSession`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgpack
import numpy as np

from poseidon.exchange.factors.factor_rounds import Array, Factors, FactorTable, Pair
from ps_server import RemoteProtocolError

VERSION = 1
MAX_HEADER_BYTES = 1_024
MAX_ROWS = 2**24

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Join:
    """Worker -> worker: the sender's rank, and the job's secret."""

    rank: int
    token: bytes


@dataclass(frozen=True, slots=True)
class Leave:
    """Worker -> worker: the sender needs nothing more and has sent all its factors."""


def encode(message: Join | Leave | Factors) -> list[Buffer]:
    """Turn a message into frames; arrays are passed on as views of their own memory."""
    if isinstance(message, Leave):
        return [msgpack.packb([VERSION, "Leave"])]
    if isinstance(message, Join):
        return [msgpack.packb([VERSION, "Join", message.rank, message.token])]
    u, v = message.pair
    header = [VERSION, "Factors", message.table, message.clock, len(u)]
    return [msgpack.packb(header), _raw(u), _raw(v), b""]


def decode(frames: Sequence[Buffer], tables: Sequence[FactorTable]) -> Join | Leave | Factors:
    """Turn frames into a message; arrays are views of the frames.

    Raises:
        RemoteProtocolError: the frames are not a message that `encode` could have made for these
            tables.
    """
    match _header(frames):
        case [int(), "Join", int(rank), bytes(token)] if len(frames) == 1:
            return Join(rank, token)
        case [int(), "Leave"] if len(frames) == 1:
            return Leave()
        case [int(), "Factors", int(table), int(clock), int(rows)] if len(frames) == 4 and not len(
            frames[3]
        ):
            if not (0 <= table < len(tables) and clock >= 0 and 0 <= rows <= MAX_ROWS):
                raise RemoteProtocolError(
                    "factors name a table, clock or number of rows that cannot be"
                )
            spec = tables[table]
            return Factors(
                table,
                clock,
                Pair(_matrix(frames[1], rows, spec.outputs), _matrix(frames[2], rows, spec.inputs)),
            )
        case _:
            raise RemoteProtocolError(
                "a peer sent something that is neither join, leave nor factors"
            )


def _header(frames: Sequence[Buffer]) -> list[object]:
    if not frames or memoryview(frames[0]).nbytes > MAX_HEADER_BYTES:
        raise RemoteProtocolError("a peer's header is missing or too long")
    try:
        header = msgpack.unpackb(frames[0], max_ext_len=0, max_map_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise RemoteProtocolError("a peer's header is not msgpack") from error
    if (
        not isinstance(header, list)
        or not header
        or type(header[0]) is not int
        or header[0] != VERSION
    ):
        raise RemoteProtocolError(
            f"a peer uses another version of the factors' protocol than {VERSION}"
        )
    return header


def _matrix(frame: Buffer, rows: int, columns: int) -> Array:
    if memoryview(frame).nbytes != 4 * rows * columns:
        raise RemoteProtocolError(
            f"a factor of {rows} x {columns} has {memoryview(frame).nbytes} bytes"
        )
    return np.frombuffer(frame, dtype="<f4").reshape(rows, columns)


def _raw(array: Array) -> memoryview:
    return np.ascontiguousarray(array, dtype="<f4").reshape(-1).data.cast("B")
