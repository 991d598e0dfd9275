"""Messages to frames and back.

A message is one header frame and then its raw frames; a packet is one or more messages, one after
the other:

    header   msgpack array: [PROTOCOL_VERSION, kind, number of frames, field, field, ...]
    frames   arrays, little endian, or opaque payloads; never copied by this module. Arrays are of
             float32, except in Push and Value, whose header ends with their precision;
             `encoded` ones are bytes of a codec or of packed rows. Numbers of rows are of uint32

The header has the fields of the message in order, save those that are frames. A store and a row
table are bytes of msgpack in it, by the types of their fields (`json_fields.py`).

Law: `decode` accepts exactly what `encode` makes. Types, ranges and sizes are checked here, before
any state is touched; whatever else arrives is a `RemoteProtocolError`. Nothing is unpickled or
evaluated. The state machines decide whether a value is legal *now* (this chunk, this clock, this
sender).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import msgpack

import ps_server.codecs.registry  # noqa: F401 - a store has codecs
from ps_server.errors import RemoteProtocolError
from ps_server.json_fields import listed, value_of
from ps_server.protocol import messages as m
from ps_server.protocol.fields import PRECISIONS, Buffer, Fields, Header, raw_bytes
from ps_server.protocol.row_settings import RowTableSpec
from ps_server.protocol.settings import MAX_CLOCK, MAX_TABLES, StoreSpec

PROTOCOL_VERSION = 4
MAX_HEADER_BYTES = 16 * 2**20
"""A header is some tens of bytes, save Create's: 65,536 tables of 150 bytes stay below this."""
FIRST_HEADER_BYTES = 256
"""Of a packer; it takes more for a longer header."""
MAX_FRAMES = 8_192

S = TypeVar("S")

if sys.byteorder != "little":  # pragma: no cover - no such machine is supported
    raise ImportError("ps_server sends little-endian floats and does not swap bytes")


class Received(NamedTuple):
    """A message, and the frames that it came in."""

    message: m.Message
    frames: Sequence[Buffer]


def encode(*messages: m.Message) -> list[Buffer]:
    """Turn messages into the frames of a packet.

    Arrays are passed on as views of their own memory.
    """
    packet: list[Buffer] = []
    for message in messages:
        kind = type(message)
        fields, frames = _WRITERS[kind](message)
        packet.append(_pack([PROTOCOL_VERSION, _NUMBERS[kind], len(frames), *fields]))
        packet.extend(frames)
    return packet


def _pack(header: Header) -> bytes:
    """Pack a header. Threads encode at the same time, so none shares its packer; one with a small
    buffer is made in 60 ns. A reason can quote the name of a file.
    """
    packer = msgpack.Packer(unicode_errors="backslashreplace", buf_size=FIRST_HEADER_BYTES)
    packed: bytes = packer.pack(header)
    return packed


def decode(frames: Sequence[Buffer]) -> list[Received]:
    """Turn the frames of a packet into its messages. Arrays are views of the frames.

    Raises:
        RemoteProtocolError: the frames are not a packet that `encode` could have made.
    """
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise RemoteProtocolError(f"a packet has {len(frames)} frames; expected 1 to {MAX_FRAMES}")
    messages = []
    at = 0
    while at < len(frames):
        header = _header(frames[at])
        end = at + 1 + header[2]
        if end > len(frames):
            raise RemoteProtocolError(
                f"a header announces {header[2]} frames; {len(frames) - at - 1} came"
            )
        messages.append(Received(_message(header, frames[at + 1 : end]), frames[at:end]))
        at = end
    return messages


def _header(frame: Buffer) -> Header:
    if memoryview(frame).nbytes > MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"a header is longer than {MAX_HEADER_BYTES} bytes")
    header = _unpack(frame)
    if not isinstance(header, list) or len(header) < 3 or header[0] != PROTOCOL_VERSION:
        version = header[0] if isinstance(header, list) and header else header
        raise RemoteProtocolError(
            f"the peer uses version {version!r:.40} of the protocol; expected {PROTOCOL_VERSION}"
        )
    if type(header[2]) is not int or not 0 <= header[2] < MAX_FRAMES:
        raise RemoteProtocolError(f"a header announces {header[2]!r:.40} frames")
    return header


def _unpack(packed: Buffer) -> Any:
    try:
        return msgpack.unpackb(packed, raw=False, strict_map_key=True, max_ext_len=0, max_map_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise RemoteProtocolError("a message is not msgpack") from error


def _message(header: Header, frames: Sequence[Buffer]) -> m.Message:
    kind = header[1]
    if not (isinstance(kind, int) and 1 <= kind <= len(KINDS)):
        raise RemoteProtocolError(f"a header names the unknown kind {kind!r:.40}")
    try:
        message = _READERS[KINDS[kind - 1]](fields := Fields(header[3:], frames))
    except ValueError as error:
        raise RemoteProtocolError(str(error)) from error
    fields.end()
    return message


Written = tuple[Sequence[object], Sequence[Buffer]]


# All workers send all shards the same description, so each process packs and reads it once.


@lru_cache(maxsize=4)
def _packed(spec: StoreSpec | RowTableSpec) -> bytes:
    packed: bytes = msgpack.packb(spec, default=listed)
    return packed


@lru_cache(maxsize=4)
def _unpacked(kind: type[S], packed: bytes) -> S:
    return value_of(kind, _unpack(packed))


class _Field(NamedTuple):
    """How a field of a message travels.

    Attributes:
        read: takes it from a message.
        head: returns its value in the header; None: it has none.
        frames: returns its frames; None: it has none.
    """

    read: Callable[[Fields], Any]
    head: Callable[[Any], object] | None = None
    frames: Callable[[Any], Sequence[Buffer]] | None = None


def _same(value: object) -> object:
    return value


def _floats(values: Sequence[float]) -> list[float]:
    return [float(value) for value in values]


def _raw(arrays: Sequence[m.Payload]) -> list[Buffer]:
    return [raw_bytes(array) for array in arrays]


def _precision(arrays: Sequence[m.Payload]) -> str:
    return PRECISIONS[arrays[0].dtype]


_FIELDS: dict[Any, _Field] = {
    bool: _Field(Fields.flag, _same),
    str: _Field(Fields.text, _same),
    bytes: _Field(Fields.data, _same),
    float: _Field(Fields.number, float),
    m.AnyFloat: _Field(Fields.any_number, float),
    tuple[float, ...]: _Field(Fields.any_numbers, _floats),
    tuple[int, ...]: _Field(Fields.integers, list),
    m.SignalKind: _Field(lambda f: m.SignalKind(f.integer(range(256))), lambda kind: kind.value),
    StoreSpec: _Field(lambda f: _unpacked(StoreSpec, f.data()), _packed),
    RowTableSpec: _Field(lambda f: _unpacked(RowTableSpec, f.data()), _packed),
    m.Opaque: _Field(Fields.opaque, None, lambda payload: [payload]),
    tuple[m.Opaque, ...]: _Field(Fields.payloads, None, list),
    m.RowIds: _Field(Fields.rows, None, lambda rows: [raw_bytes(rows)]),
    m.Array: _Field(Fields.array, None, lambda array: [raw_bytes(array)]),
    Sequence[m.Array]: _Field(Fields.arrays, None, _raw),
    Sequence[m.Payload]: _Field(lambda f: [f.first_array(f.text()), *f.arrays()], _precision, _raw),
}
"""By the type of the field; a whole number has the range of its type."""


def _field_of(hint: Any) -> _Field:
    legal = [legal for legal in getattr(hint, "__metadata__", ()) if isinstance(legal, range)]
    return _Field(partial(Fields.integer, legal=legal[0]), _same) if legal else _FIELDS[hint]


def _writer(fields: Mapping[str, _Field]) -> Callable[[Any], Written]:
    heads = [(name, field.head) for name, field in fields.items() if field.head]
    frames = [(name, field.frames) for name, field in fields.items() if field.frames]
    if fields and all(made is _same for _, made in heads) and not frames:  # without a call a field
        get = attrgetter(*fields)
        return lambda message: (get(message) if len(heads) > 1 else (get(message),), ())

    def write(message: Any) -> Written:
        head = [made(getattr(message, name)) for name, made in heads]
        return head, [frame for name, made in frames for frame in made(getattr(message, name))]

    return write


def _reader(kind: type[m.Message], fields: Mapping[str, _Field]) -> Callable[[Fields], m.Message]:
    reads = [field.read for field in fields.values()]
    return lambda f: kind(*[read(f) for read in reads])


def _write_push(push: m.Push) -> Written:
    head = [push.table, push.chunk, push.clock, float(push.rate), push.count]
    return [*head, PRECISIONS[push.array.dtype]], [raw_bytes(push.array)]


def _write_value(value: m.Value) -> Written:
    head = [value.table, value.chunk, value.clock, value.own]
    return [*head, PRECISIONS[value.array.dtype]], [raw_bytes(value.array)]


_PUSH_FIELDS = (int, int, int, float, int, str)
_VALUE_FIELDS = (int, int, int, int, str)


def _read_push(f: Fields) -> m.Push:
    table, chunk, clock, rate, count, precision = f.leading(_PUSH_FIELDS)
    _check_place(table, chunk, clock)
    if not (math.isfinite(rate) and 1 <= count < 2**31):
        raise RemoteProtocolError(f"a push of {count} iterations at rate {rate}")
    return m.Push(table, chunk, clock, rate, f.payload(precision), count)


def _read_value(f: Fields) -> m.Value:
    table, chunk, clock, own, precision = f.leading(_VALUE_FIELDS)
    _check_place(table, chunk, clock)
    if not 0 <= own < MAX_CLOCK:
        raise RemoteProtocolError(f"a value with {own} pushes of the receiver's own")
    return m.Value(table, chunk, clock, own, f.payload(precision))


def _check_place(table: int, chunk: int, clock: int) -> None:
    if not (0 <= table < MAX_TABLES and 0 <= chunk < m.MAX_CHUNKS and 0 <= clock < MAX_CLOCK):
        raise RemoteProtocolError(f"there is no chunk {chunk} of table {table} at clock {clock}")


KINDS: tuple[type[m.Message], ...] = get_args(m.Message)
"""A kind's number on the wire is its place here, from 1."""
_WRITERS: dict[type, Callable[[Any], Written]] = {m.Push: _write_push, m.Value: _write_value}
_READERS: dict[type, Callable[[Fields], m.Message]] = {m.Push: _read_push, m.Value: _read_value}
"""Those of every step, by hand; all others by the types of their fields."""
for _kind in KINDS:
    if _kind not in _WRITERS:
        _hints = get_type_hints(_kind, include_extras=True)
        _fields = {name: _field_of(hint) for name, hint in _hints.items()}
        _WRITERS[_kind], _READERS[_kind] = _writer(_fields), _reader(_kind, _fields)
_NUMBERS = {kind: number for number, kind in enumerate(KINDS, 1)}
