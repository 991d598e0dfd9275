"""The values in a message's header and its frames, each checked as it is read.

Law: whatever does not fit is a `RemoteProtocolError`. Nothing is copied, save opaque payloads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ps_server.errors import RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.precision import NUMPY_TYPES
from ps_server.protocol.settings import MAX_WORKERS, Precision

MAX_PAYLOAD_BYTES = 2**30
MAX_NUMBERS = 2**10
"""Most numbers whose exact sum is one."""

Buffer = bytes | bytearray | memoryview
Header = list[Any]

PLAIN = Precision.FLOAT32.value
"""The precision of the arrays of a message that names none."""
ENCODED = "encoded"
"""The precision of arrays that a codec made, or that have some rows (`packed_rows.py`)."""
_ARRAY_TYPES: dict[str, np.dtype[Any]] = {
    **{precision.value: kind for precision, kind in NUMPY_TYPES.items()},
    ENCODED: np.dtype(np.uint8),
}
PRECISIONS = {kind: name for name, kind in _ARRAY_TYPES.items()}


def finite(value: float) -> float:
    """Return a number, which is finite."""
    if not math.isfinite(value):
        raise RemoteProtocolError(f"a header has the number {value}; expected a finite one")
    return value


def numbers(values: Header) -> tuple[float, ...]:
    """Return numbers that need not be finite."""
    if len(values) > MAX_NUMBERS or any(type(value) is not float for value in values):
        raise RemoteProtocolError("a header has a list that is not one of numbers")
    return tuple(values)


def ranks(values: Header) -> tuple[int, ...]:
    """Return ranks of workers."""
    if len(values) > MAX_WORKERS or any(
        type(value) is not int or not 0 <= value < MAX_WORKERS for value in values
    ):
        raise RemoteProtocolError("a header has a list that is not one of whole numbers")
    return tuple(values)


def take_array(frames: list[Buffer], precision: str) -> m.Payload:
    """Take the only frame, an array of a precision."""
    _check_one(frames)
    return _array(frames.pop(), _array_type(precision))


def take_arrays(frames: list[Buffer], precision: str) -> list[m.Payload]:
    """Take all frames: arrays of float32, the first of a precision."""
    kinds = [_array_type(precision), *[_ARRAY_TYPES[PLAIN]] * (len(frames) - 1)]
    found = [_array(frame, kind) for frame, kind in zip(frames, kinds, strict=False)]
    frames.clear()
    return found


def take_rows(frames: list[Buffer], _: str) -> m.RowIds:
    """Take the first frame, numbers of rows in increasing order."""
    if not frames:
        raise RemoteProtocolError("a message has 0 data frames; expected 1 or more")
    rows = np.asarray(_array(frames.pop(0), np.dtype(np.uint32)), np.uint32)
    if not np.all(rows[1:] > rows[:-1]):
        raise RemoteProtocolError("a message has numbers of rows that do not increase")
    return rows


def take_payload(frames: list[Buffer], precision: str) -> bytes:
    """Take the only frame, an opaque payload."""
    _check_one(frames)
    return take_payloads(frames, precision)[0]


def take_payloads(frames: list[Buffer], _: str) -> tuple[bytes, ...]:
    """Take all frames, opaque payloads."""
    if any(memoryview(frame).nbytes > MAX_PAYLOAD_BYTES for frame in frames):
        raise RemoteProtocolError(f"a payload is longer than {MAX_PAYLOAD_BYTES} bytes")
    payloads = tuple(bytes(frame) for frame in frames)
    frames.clear()
    return payloads


def raw(array: m.Payload) -> list[Buffer]:
    """Return the memory of an array as a frame, a copy if it is not contiguous."""
    return [np.ascontiguousarray(array).data.cast("B")]


def _check_one(frames: list[Buffer]) -> None:
    if len(frames) != 1:
        raise RemoteProtocolError(f"a message has {len(frames)} data frames; expected 1")


def _array_type(precision: str) -> np.dtype[Any]:
    kind = _ARRAY_TYPES.get(precision)
    if kind is None:
        raise RemoteProtocolError(f"{precision!r:.40} is not a precision of arrays")
    return kind


def _array(frame: Buffer, kind: np.dtype[Any]) -> m.Payload:
    try:
        array: m.Payload = np.frombuffer(frame, dtype=kind)
    except ValueError:
        raise RemoteProtocolError(
            f"a frame of {memoryview(frame).nbytes} bytes is not made of {kind.name}"
        ) from None
    return array
