"""Messages to frames and back.

A message is one header frame and then its raw frames; a packet is one or more messages, one after
the other:

    header   msgpack array: [PROTOCOL_VERSION, kind, number of frames, field, field, ...]
    frames   arrays, little endian, or opaque payloads; never copied by this module. Arrays are of
             float32, except the one of Push and Value and the first one of Initial, whose headers
             end with its precision; `encoded` ones are bytes of a codec or of packed rows. Numbers
             of rows are of uint32

The header has the fields of the message in order, save those that are frames, and then that
precision. A store and a row table are bytes of msgpack in it, by the types of their fields
(`json_fields.py`).

Law: `decode` accepts exactly what `encode` makes. Types, ranges and sizes are checked here, before
any state is touched; whatever else arrives is a `RemoteProtocolError`. Nothing is unpickled or
evaluated. The state machines decide whether a value is legal *now* (this chunk, this clock, this
sender).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import msgpack

import ps_server.codecs.registry  # noqa: F401 - a store has codecs
from ps_server.errors import RemoteProtocolError
from ps_server.json_fields import listed, value_of
from ps_server.protocol import messages as m
from ps_server.protocol.fields import (
    PLAIN,
    PRECISIONS,
    Buffer,
    Header,
    finite,
    numbers,
    ranks,
    raw,
    take_array,
    take_arrays,
    take_payload,
    take_payloads,
    take_rows,
)
from ps_server.protocol.row_settings import RowTableSpec
from ps_server.protocol.settings import StoreSpec

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
        fields, frames = _FORMS[kind].write(message)
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
        return _FORMS[KINDS[kind - 1]].read(header[3:], frames)
    except ValueError as error:
        raise RemoteProtocolError(str(error)) from error


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
        head: type of its value in the header; None: it has none.
        write: makes that value; None: it is the field's own.
        read: returns the field from that value; None: it is that value.
        legal: the range of a whole number.
        frames: returns its frames; None: it has none.
        take: takes it from the frames of a message that are left, which have a precision.
        part: attribute of the field that its value in the header is made of.
    """

    head: type | None = None
    write: Callable[[Any], object] | None = None
    read: Callable[[Any], object] | None = None
    legal: range | None = None
    frames: Callable[[Any], Sequence[Buffer]] | None = None
    take: Callable[[list[Buffer], str], object] | None = None
    part: str = ""


def _floats(values: Sequence[float]) -> list[float]:
    return [float(value) for value in values]


def _raw(arrays: Sequence[m.Payload]) -> list[Buffer]:
    return [frame for array in arrays for frame in raw(array)]


def _precision(arrays: Sequence[m.Payload]) -> str:
    return PRECISIONS[arrays[0].dtype]


_FIELDS: dict[Any, _Field] = {
    bool: _Field(bool),
    str: _Field(str),
    bytes: _Field(bytes),
    float: _Field(float, float, finite),
    m.AnyFloat: _Field(float, float),
    tuple[float, ...]: _Field(list, _floats, numbers),
    tuple[int, ...]: _Field(list, list, ranks),
    m.SignalKind: _Field(int, None, m.SignalKind, part="value"),
    StoreSpec: _Field(bytes, _packed, partial(_unpacked, StoreSpec)),
    RowTableSpec: _Field(bytes, _packed, partial(_unpacked, RowTableSpec)),
    m.Opaque: _Field(frames=lambda payload: [payload], take=take_payload),
    tuple[m.Opaque, ...]: _Field(frames=list, take=take_payloads),
    m.RowIds: _Field(frames=raw, take=take_rows),
    m.Array: _Field(frames=raw, take=take_array),
    m.Payload: _Field(str, PRECISIONS.__getitem__, frames=raw, take=take_array, part="dtype"),
    Sequence[m.Array]: _Field(frames=_raw, take=take_arrays),
    Sequence[m.Payload]: _Field(str, _precision, frames=_raw, take=take_arrays),
}
"""By the type of the field; a whole number has the range of its type."""


def _field_of(hint: Any) -> _Field:
    legal = [legal for legal in getattr(hint, "__metadata__", ()) if isinstance(legal, range)]
    return _Field(int, legal=legal[0]) if legal else _FIELDS[hint]


def _names(kinds: Iterable[type]) -> str:
    return ", ".join(kind.__name__ for kind in kinds) or "none"


class _Form:
    """The form in which messages of a kind travel. A field costs no call, save where it must."""

    def __init__(self, kind: type[m.Message]) -> None:
        hints = get_type_hints(kind, include_extras=True)
        fields = {name: _field_of(hint) for name, hint in hints.items()}
        in_head = [(name, field) for name, field in fields.items() if field.head]
        in_head.sort(key=lambda each: each[1].take is not None)  # the precision is the last
        self._kind = kind
        self._heads = tuple(field.head for _, field in in_head)
        paths = [f"{name}.{field.part}".rstrip(".") for name, field in in_head]
        self._values = attrgetter("__class__", "__class__", *paths)  # a tuple of any length
        self._writes = [(at, f.write) for at, (_, f) in enumerate(in_head) if f.write]
        self._reads = [(at, f.read) for at, (_, f) in enumerate(in_head) if f.read]
        self._ranges = [(at, f.legal) for at, (_, f) in enumerate(in_head) if f.legal]
        self._frames = [(name, f.frames) for name, f in fields.items() if f.frames]
        self._takes = [(at, f.take) for at, f in enumerate(fields.values()) if f.take]
        self._names_precision = any(field.head and field.take for field in fields.values())

    def write(self, message: m.Message) -> tuple[Header, list[Buffer]]:
        """Return what a message has in its header, and its frames."""
        head = [*self._values(message)[2:]]
        frames: list[Buffer] = []
        for at, made in self._writes:
            head[at] = made(head[at])
        for name, frames_of in self._frames:
            frames += frames_of(getattr(message, name))
        return head, frames

    def read(self, values: Header, frames: Sequence[Buffer]) -> m.Message:
        """Return the message."""
        if tuple(map(type, values)) != self._heads:
            raise RemoteProtocolError(
                f"a {self._kind.__name__} has the fields {_names(map(type, values)):.100}; expected "
                f"{_names(filter(None, self._heads))}"
            )
        for at, legal in self._ranges:
            if values[at] not in legal:
                raise RemoteProtocolError(
                    f"field {at} of a {self._kind.__name__} is {values[at]}; "
                    f"expected {legal[0]} to {legal[-1]}"
                )
        for at, made in self._reads:
            values[at] = made(values[at])
        precision, left = values.pop() if self._names_precision else PLAIN, [*frames]
        for at, take in self._takes:
            values.insert(at, take(left, precision))
        if left:
            raise RemoteProtocolError("a message has more fields or frames than its kind")
        return self._kind(*values)


KINDS: tuple[type[m.Message], ...] = get_args(m.Message)
"""A kind's number on the wire is its place here, from 1."""
_FORMS = {kind: _Form(kind) for kind in KINDS}
_NUMBERS = {kind: number for number, kind in enumerate(KINDS, 1)}
