"""The fields of a message's header and its frames, each checked as it is read.

Law: whatever does not fit is a `RemoteProtocolError`. Nothing is copied, save opaque payloads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

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
T = TypeVar("T")


class Fields:
    """The fields and frames of one message.

    They are taken one by one, each checked; `end` refuses those that are left.

    Args:
        fields: of the header, after its kind and number of frames.
        frames: the data frames of the message.
    """

    def __init__(self, fields: Header, frames: Sequence[Buffer]) -> None:
        self._fields = fields
        self._frames = frames
        self._next = 0

    def _take(self, kind: type[T]) -> T:
        if self._next >= len(self._fields):
            raise RemoteProtocolError(f"a header ends after {self._next} fields")
        value = self._fields[self._next]
        self._next += 1
        if type(value) is not kind:
            raise RemoteProtocolError(f"header field {self._next} is not a {kind.__name__}")
        return value

    def leading(self, kinds: tuple[type, ...]) -> Header:
        """Return the next fields, of these types; the caller checks their ranges."""
        values = self._fields[: len(kinds)]
        if tuple(map(type, values)) != kinds:
            for kind in kinds:
                self._take(kind)  # names the field
        self._next = len(kinds)
        return values

    def integer(self, legal: range) -> int:
        """Return the next field, a whole number of a range."""
        value = self._take(int)
        if value not in legal:
            raise RemoteProtocolError(
                f"header field {self._next} is {value}; expected {legal[0]} to {legal[-1]}"
            )
        return value

    def integers(self) -> tuple[int, ...]:
        """Return the next field, ranks of workers."""
        values = self._take(list)
        if len(values) > MAX_WORKERS or any(
            type(value) is not int or not 0 <= value < MAX_WORKERS for value in values
        ):
            raise RemoteProtocolError(f"header field {self._next} is not a list of whole numbers")
        return tuple(values)

    def flag(self) -> bool:
        """Return the next field, a truth value."""
        return self._take(bool)

    def number(self) -> float:
        """Return the next field, a finite number."""
        value = self._take(float)
        if not math.isfinite(value):
            raise RemoteProtocolError(
                f"header field {self._next} is {value}; expected a finite number"
            )
        return value

    def any_numbers(self) -> tuple[float, ...]:
        """Return the next field, numbers that need not be finite."""
        values = self._take(list)
        if len(values) > MAX_NUMBERS or any(type(value) is not float for value in values):
            raise RemoteProtocolError(f"header field {self._next} is not a list of numbers")
        return tuple(values)

    def any_number(self) -> float:
        """Return the next field, a number that need not be finite."""
        return self._take(float)

    def text(self) -> str:
        """Return the next field, a text."""
        return self._take(str)

    def data(self) -> bytes:
        """Return the next field, bytes."""
        return self._take(bytes)

    def rows(self) -> m.RowIds:
        """Return the next frame as numbers of rows, in increasing order."""
        rows = np.asarray(_array(self._first_frame(), np.dtype(np.uint32)), np.uint32)
        if not np.all(rows[1:] > rows[:-1]):
            raise RemoteProtocolError("a message has numbers of rows that do not increase")
        return rows

    def arrays(self) -> list[m.Array]:
        """Return all frames as arrays of float32."""
        return [_float32_array(frame) for frame in self._take_frames()]

    def array(self) -> m.Array:
        """Return the only frame as an array of float32."""
        (frame,) = self._take_frames(1)
        return _float32_array(frame)

    def payload(self, precision: str) -> m.Payload:
        """Return the only frame as an array of a precision."""
        kind = _array_type(precision)
        (frame,) = self._take_frames(1)
        return _array(frame, kind)

    def first_array(self, precision: str) -> m.Payload:
        """Return the next frame as an array of a precision."""
        kind = _array_type(precision)
        return _array(self._first_frame(), kind)

    def opaque(self) -> bytes:
        """Return the only frame as an opaque payload."""
        payloads = self.payloads()
        if len(payloads) != 1:
            raise RemoteProtocolError(f"a message has {len(payloads)} data frames; expected 1")
        return payloads[0]

    def payloads(self) -> tuple[bytes, ...]:
        """Return all frames as opaque payloads."""
        frames = self._take_frames()
        if any(memoryview(frame).nbytes > MAX_PAYLOAD_BYTES for frame in frames):
            raise RemoteProtocolError(f"a payload is longer than {MAX_PAYLOAD_BYTES} bytes")
        return tuple(bytes(frame) for frame in frames)

    def _first_frame(self) -> Buffer:
        if not self._frames:
            raise RemoteProtocolError("a message has 0 data frames; expected 1 or more")
        frame, self._frames = self._frames[0], self._frames[1:]
        return frame

    def _take_frames(self, count: int | None = None) -> Sequence[Buffer]:
        if count is not None and len(self._frames) != count:
            raise RemoteProtocolError(
                f"a message has {len(self._frames)} data frames; expected {count}"
            )
        frames, self._frames = self._frames, ()
        return frames

    def end(self) -> None:
        """Refuse fields and frames that are left."""
        if self._next != len(self._fields) or self._frames:
            raise RemoteProtocolError("a message has more fields or frames than its kind")


def _array_type(precision: str) -> np.dtype[Any]:
    kind = _ARRAY_TYPES.get(precision)
    if kind is None:
        raise RemoteProtocolError(f"{precision!r:.40} is not a precision of arrays")
    return kind


def _float32_array(frame: Buffer) -> m.Array:
    return np.asarray(_array(frame, NUMPY_TYPES[Precision.FLOAT32]), np.float32)


def _array(frame: Buffer, kind: np.dtype[Any]) -> m.Payload:
    try:
        array: m.Payload = np.frombuffer(frame, dtype=kind)
    except ValueError:
        raise RemoteProtocolError(
            f"a frame of {memoryview(frame).nbytes} bytes is not made of {kind.name}"
        ) from None
    return array


def raw_bytes(array: m.Payload) -> memoryview:
    """Return the memory of an array, a copy if it is not contiguous."""
    return np.ascontiguousarray(array).data.cast("B")


ENCODED = "encoded"
"""The precision of arrays that a codec made, or that have some rows (`packed_rows.py`)."""
_ARRAY_TYPES: dict[str, np.dtype[Any]] = {
    **{precision.value: kind for precision, kind in NUMPY_TYPES.items()},
    ENCODED: np.dtype(np.uint8),
}
PRECISIONS = {kind: name for name, kind in _ARRAY_TYPES.items()}
