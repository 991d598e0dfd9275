"""Messages to frames and back.

A message is one header frame and then its raw frames; a packet is one or more messages, one after
the other:

    header   msgpack array: [PROTOCOL_VERSION, kind, number of frames, field, field, ...]
    frames   arrays, little endian, or opaque payloads; never copied by this module. Arrays are of
             float32, except in Push and Value, whose header ends with their precision;
             `encoded` ones are bytes of a codec or of packed rows. Numbers of rows are of uint32

A store and a row table are described by bytes of msgpack within the header, by the types of their
fields (`json_fields.py`).

Law: `decode` accepts exactly what `encode` makes. Types, ranges and sizes are checked here, before
any state is touched; whatever else arrives is a `RemoteProtocolError`. Nothing is unpickled or
evaluated. The state machines decide whether a value is legal *now* (this chunk, this clock, this
sender).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgpack

import ps_server.codecs.registry  # noqa: F401 - a store has codecs
from ps_server.errors import RemoteProtocolError
from ps_server.json_fields import listed, value_of
from ps_server.protocol import messages as m
from ps_server.protocol.fields import PRECISIONS, Buffer, Fields, Header, raw_bytes
from ps_server.protocol.row_settings import MAX_ROW_TABLES, MAX_ROWS, RowTableSpec
from ps_server.protocol.settings import MAX_CLOCK, MAX_TABLES, MAX_WORKERS, StoreSpec

PROTOCOL_VERSION = 3
MAX_SUMS = 2**10
MAX_HEADER_BYTES = 16 * 2**20
"""A header is some tens of bytes, save Create's: 65,536 tables of 150 bytes stay below this."""
FIRST_HEADER_BYTES = 256
"""Of a packer; it takes more for a longer header."""
MAX_FRAMES = 8_192
MAX_CHUNKS = 2**31
MAX_ELEMENTS = 2**44
"""The most elements of the history of a chunk."""
MAX_SLOTS = 2**20
MAX_SLOT_BYTES = 2**31

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
        kind, write = _WRITERS[type(message)]
        fields, frames = write(message)
        packet.append(_pack([PROTOCOL_VERSION, kind, len(frames), *fields]))
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
    reader = _READERS.get(header[1]) if isinstance(header[1], int) else None
    if reader is None:
        raise RemoteProtocolError(f"a header names the unknown kind {header[1]!r:.40}")
    try:
        message = reader(fields := Fields(header[3:], frames))
    except ValueError as error:
        raise RemoteProtocolError(str(error)) from error
    fields.end()
    return message


Written = tuple[Header, Sequence[Buffer]]


# All workers send all shards the same description, so each process packs and reads it once.


@lru_cache(maxsize=4)
def _packed(spec: StoreSpec | RowTableSpec) -> bytes:
    packed: bytes = msgpack.packb(spec, default=listed)
    return packed


@lru_cache(maxsize=4)
def _unpacked(kind: type[S], packed: bytes) -> S:
    return value_of(kind, _unpack(packed))


def _table(f: Fields) -> int:
    return f.integer(MAX_TABLES)


def _row_table(f: Fields) -> int:
    return f.integer(MAX_ROW_TABLES)


def _chunk(f: Fields) -> int:
    return f.integer(MAX_CHUNKS)


def _clock(f: Fields) -> int:
    return f.integer(MAX_CLOCK)


_WRITERS: dict[type, tuple[int, Callable[[Any], Written]]] = {
    m.Hello: (1, lambda x: ([x.worker, x.token], ())),
    m.Welcome: (2, lambda x: ([x.shard], ())),
    m.Create: (3, lambda x: ([_packed(x.store)], ())),
    m.Initial: (
        4,
        lambda x: (
            [x.table, x.chunk, PRECISIONS[x.arrays[0].dtype]],
            [raw_bytes(a) for a in x.arrays],
        ),
    ),
    m.Push: (
        5,
        lambda x: (
            [x.table, x.chunk, x.clock, float(x.rate), x.count, PRECISIONS[x.array.dtype]],
            [raw_bytes(x.array)],
        ),
    ),
    m.Clock: (6, lambda x: ([x.clock], ())),
    m.Get: (7, lambda x: ([x.table, x.chunk, x.clock], ())),
    m.Value: (
        8,
        lambda x: (
            [x.table, x.chunk, x.clock, x.own, PRECISIONS[x.array.dtype]],
            [raw_bytes(x.array)],
        ),
    ),
    m.Fresh: (9, lambda x: ([x.clock], ())),
    m.PartialNorm: (10, lambda x: ([x.clock, [float(s) for s in x.sums]], ())),
    m.TotalNorm: (11, lambda x: ([x.clock, float(x.total)], ())),
    m.GetHistory: (12, lambda x: ([x.table, x.chunk], ())),
    m.History: (13, lambda x: ([x.table, x.chunk, x.clock, x.start], [raw_bytes(x.array)])),
    m.Gather: (14, lambda x: ([x.tag, x.keeps, x.whole], [x.payload])),
    m.Gathered: (15, lambda x: ([x.tag, x.whole], list(x.payloads))),
    m.Signal: (16, lambda x: ([x.kind.value, x.clock], ())),
    m.Leave: (17, lambda _: ([], ())),
    m.Fault: (18, lambda x: ([x.reason], ())),
    m.Round: (
        19,
        lambda x: (
            [x.clock, list(x.workers), [float(weight) for weight in x.weights]],
            list(x.payloads),
        ),
    ),
    m.Gone: (20, lambda x: ([x.worker, x.iterations], ())),
    m.MemoryOffer: (21, lambda x: ([x.process, x.file, x.nonce, x.slots, x.slot_bytes], ())),
    m.MemoryAnswer: (22, lambda x: ([x.opened], ())),
    m.CreateRows: (23, lambda x: ([x.row_table, x.shards, _packed(x.spec)], ())),
    m.PushRows: (
        24,
        lambda x: (
            [x.row_table, x.clock, float(x.rate)],
            [raw_bytes(x.rows), raw_bytes(x.array)],
        ),
    ),
    m.GetRows: (25, lambda x: ([x.row_table, x.number, x.clock], [raw_bytes(x.rows)])),
    m.Rows: (26, lambda x: ([x.row_table, x.number], [raw_bytes(x.array)])),
    m.ReadRows: (27, lambda x: ([x.row_table, x.first, x.count], ())),
    m.KeptRows: (
        28,
        lambda x: (
            [x.row_table, x.clock],
            [raw_bytes(x.rows), *(raw_bytes(a) for a in x.arrays)],
        ),
    ),
    m.Part: (29, lambda x: ([x.clock, float(x.weight), x.whole], [x.payload])),
    m.Taken: (30, lambda x: ([x.clock], ())),
    m.Awaited: (31, lambda x: ([x.clock], ())),
    m.OutsideNorm: (32, lambda x: ([x.plane, x.clock, [float(s) for s in x.sums]], ())),
}


def _payload(f: Fields) -> bytes:
    payloads = f.payloads()
    if len(payloads) != 1:
        raise RemoteProtocolError(f"a message has {len(payloads)} data frames; expected 1")
    return payloads[0]


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
    if not (0 <= table < MAX_TABLES and 0 <= chunk < MAX_CHUNKS and 0 <= clock < MAX_CLOCK):
        raise RemoteProtocolError(f"there is no chunk {chunk} of table {table} at clock {clock}")


def _read_total_norm(f: Fields) -> m.TotalNorm:
    clock, total = _clock(f), f.any_number()
    if total < 0:
        raise RemoteProtocolError(f"a sum of squares is {total}; expected 0 or more")
    return m.TotalNorm(clock, total)


def _read_part(f: Fields) -> m.Part:
    clock, weight, whole = _clock(f), f.number(), f.flag()
    if weight < 0:
        raise RemoteProtocolError(f"a part of weight {weight}; expected 0 or more")
    return m.Part(clock, weight, whole, _payload(f))


def _read_round(f: Fields) -> m.Round:
    clock, workers = _clock(f), f.integers(MAX_WORKERS, MAX_WORKERS)
    weights, payloads = f.any_numbers(MAX_WORKERS), f.payloads()
    in_order = list(workers) == sorted(set(workers))
    if not (in_order and len(workers) == len(weights) == len(payloads)):
        raise RemoteProtocolError(f"a round of workers {list(workers)[:8]} does not fit its parts")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise RemoteProtocolError("a round has a weight that is not a finite number above 0")
    return m.Round(clock, workers, weights, payloads)


_READ: dict[type, Callable[[Fields], m.Message]] = {
    m.Hello: lambda f: m.Hello(f.integer(MAX_WORKERS), f.data()),
    m.Welcome: lambda f: m.Welcome(f.integer(MAX_WORKERS)),
    m.Create: lambda f: m.Create(_unpacked(StoreSpec, f.data())),
    m.Initial: lambda f: m.Initial(_table(f), _chunk(f), [f.first_array(f.text()), *f.arrays()]),
    m.Push: _read_push,
    m.Clock: lambda f: m.Clock(_clock(f)),
    m.Get: lambda f: m.Get(_table(f), _chunk(f), _clock(f)),
    m.Value: _read_value,
    m.Fresh: lambda f: m.Fresh(_clock(f)),
    m.PartialNorm: lambda f: m.PartialNorm(_clock(f), f.any_numbers(MAX_SUMS)),
    m.OutsideNorm: lambda f: m.OutsideNorm(
        f.integer(MAX_WORKERS), _clock(f), f.any_numbers(MAX_SUMS)
    ),
    m.TotalNorm: _read_total_norm,
    m.GetHistory: lambda f: m.GetHistory(_table(f), _chunk(f)),
    m.History: lambda f: m.History(
        _table(f), _chunk(f), _clock(f), f.integer(MAX_ELEMENTS), f.array()
    ),
    m.Gather: lambda f: m.Gather(f.integer(MAX_CLOCK), _payload(f), f.flag(), f.flag()),
    m.Gathered: lambda f: m.Gathered(f.integer(MAX_CLOCK), f.payloads(), f.flag()),
    m.Signal: lambda f: m.Signal(m.SignalKind(f.integer(256)), _clock(f)),
    m.Leave: lambda f: m.Leave(),
    m.Fault: lambda f: m.Fault(f.text()),
    m.Gone: lambda f: m.Gone(f.integer(MAX_WORKERS), _clock(f)),
    m.MemoryOffer: lambda f: m.MemoryOffer(
        f.integer(2**31),
        f.integer(2**31),
        f.data(),
        f.integer(MAX_SLOTS, least=1),
        f.integer(MAX_SLOT_BYTES),
    ),
    m.Part: _read_part,
    m.Taken: lambda f: m.Taken(_clock(f)),
    m.Awaited: lambda f: m.Awaited(_clock(f)),
    m.Round: _read_round,
    m.MemoryAnswer: lambda f: m.MemoryAnswer(f.flag()),
    m.CreateRows: lambda f: m.CreateRows(
        _row_table(f), f.integer(MAX_WORKERS + 1, least=1), _unpacked(RowTableSpec, f.data())
    ),
    m.PushRows: lambda f: m.PushRows(_row_table(f), _clock(f), f.number(), f.rows(1), *f.arrays(1)),
    m.GetRows: lambda f: m.GetRows(_row_table(f), f.integer(MAX_CLOCK), _clock(f), f.rows(0)),
    m.Rows: lambda f: m.Rows(_row_table(f), f.integer(MAX_CLOCK), f.array()),
    m.ReadRows: lambda f: m.ReadRows(_row_table(f), f.integer(MAX_ROWS + 1), f.integer(MAX_ROWS)),
    m.KeptRows: lambda f: m.KeptRows(_row_table(f), _clock(f), f.rows(), f.arrays()),
}


_READERS = {code: _READ[kind] for kind, (code, _) in _WRITERS.items()}
