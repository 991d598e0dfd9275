"""Every message survives the wire; nothing else gets through."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_server.codecs.registry import CodecPair
from ps_server.codecs.segments import TopK
from ps_server.errors import RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.fields import Buffer
from ps_server.protocol.frames import KINDS, PROTOCOL_VERSION, decode, encode
from ps_server.protocol.row_settings import RowInit, RowRule, RowRuleKind, RowTableSpec
from ps_server.protocol.settings import (
    Consistency,
    Keeping,
    NewtonSchulz,
    Precision,
    Regularization,
    Rule,
    RuleKind,
    StoreSpec,
    TableSpec,
)
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.support.threads import on_threads

ONES = np.ones(3, dtype=np.float32)
MUON = Rule(
    kind=RuleKind.MUON,
    nesterov=True,
    matrix=NewtonSchulz(columns=3, coefficients=(1.5, -2.0, 0.5), steps=4, rate_factor=0.25),
)
STORE = StoreSpec(
    workers=2,
    shards=3,
    tables=(
        TableSpec(name="conv1.0", size=12, rule=Rule(kind=RuleKind.ADAM, momentum=0.9, decay=0.1)),
        TableSpec(
            name="ip", size=5, staleness=2, rows=4, rule=Rule(regularization=Regularization.L1)
        ),
        TableSpec(name="seen", size=7, keeping=Keeping.AVERAGE),
        TableSpec(name="sgd", size=7, rule=Rule(kind=RuleKind.TORCH_SGD, dampening=0.25)),
        TableSpec(name="fc", size=6, rule=MUON, row_elements=3),
        TableSpec(name="small", size=5, parts=(2, 3)),
    ),
    consistency=Consistency.SSP,
    clip=35.0,
    gradient_scale=0.5,
    start_clock=7,
    loads=(1, 2, 1),
    chunks=5,
    outside_norm=(0,),
    precision=Precision.FLOAT16,
    trial=True,
)
LOSSY = StoreSpec(
    workers=2,
    virtual_workers=VirtualWorkers((0, 3, 4)),
    shards=1,
    tables=(
        TableSpec(name="ip", size=5, codec=CodecPair(TopK(0.015), None)),
        TableSpec(name="half", size=5, held_as=Precision.BFLOAT16),
    ),
)
QUORUM = StoreSpec(
    workers=3, shards=1, tables=(TableSpec(name="ip", size=5),), quorum=2, grace_s=0.5
)
HOSTS = StoreSpec(
    workers=5,
    shards=1,
    tables=(TableSpec(name="ip", size=5), TableSpec(name="fc", size=6, plane=1)),
    clip=1.0,
    outside_norm=(0, 1),
    hosts=(3, 2),
)
ROW_TABLE = RowTableSpec(
    name="users",
    rows=10,
    dim=3,
    rule=RowRule(kind=RowRuleKind.ADAM, beta1=0.5, beta2=0.75, eps=1e-6),
    init=RowInit.NORMAL,
    scale=0.25,
    seed=2**62,
    staleness=2,
)
ROWS = np.array([1, 7], np.uint32)
MESSAGES = [
    m.Hello(1, b"secret"),
    m.Welcome(2),
    m.Create(STORE),
    m.Create(LOSSY),
    m.Create(HOSTS),
    m.MemoryOffer(4711, 9, b"0123456789abcdef", 12, 2**21),
    m.MemoryAnswer(True),
    m.Initial(0, 1, [ONES, 2 * ONES]),
    m.Initial(0, 1, [np.ones(3, dtype=np.uint16), ONES]),
    m.Push(3, 2, 9, 0.25, ONES),
    m.Push(3, 2, 9, 0.25, ONES, 4),
    m.Push(3, 2, 9, 0.25, np.ones(3, dtype=np.float16)),
    m.Push(3, 2, 9, 0.25, np.ones(3, dtype=np.uint16)),
    m.Push(3, 2, 9, 0.25, np.ones(3, dtype=np.uint8)),
    m.Clock(4),
    m.Get(1, 0, 5),
    m.Value(1, 0, 5, 4, ONES),
    m.Value(1, 0, 5, 4, np.ones(3, dtype=np.float16)),
    m.Fresh(6),
    m.PartialNorm(3, (1.5, 0.0)),
    m.OutsideNorm(1, 3, (1.5, 0.0)),
    m.TotalNorm(3, 1.5),
    m.GetHistory(0, 0),
    m.History(0, 0, 8, 3, ONES),
    m.Gather(2, b"part"),
    m.Gather(3, b"", keeps=False),
    m.Gather(2, b"part", whole=False),
    m.Gathered(2, (b"one", b"")),
    m.Gathered(3, ()),
    m.Gathered(2, (b"one",), whole=False),
    m.Signal(m.SignalKind.STOP, 12),
    m.Leave(),
    m.Fault("no such chunk"),
    m.Gone(1, 7),
    m.Part(4, 12.0, whole=True, payload=b"to all"),
    m.Taken(4),
    m.Awaited(4),
    m.Round(4, (0, 2), (12.0, 3.0), (b"to all", b"")),
    m.Create(QUORUM),
    m.CreateRows(1, 2, ROW_TABLE),
    m.PushRows(1, 5, 0.5, ROWS, np.ones(6, dtype=np.float32)),
    m.PushRows(1, 5, 0.5, ROWS[:0], ONES[:0]),
    m.GetRows(1, 9, 5, ROWS),
    m.Rows(1, 9, np.ones(6, dtype=np.float32)),
    m.ReadRows(1, 100, 50),
    m.KeptRows(1, 5, ROWS, [np.ones(6, dtype=np.float32), np.ones(2, dtype=np.float32)]),
]


def same(a: object, b: object) -> bool:
    """Equality of messages, arrays by their bytes."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dataclass_fields__") and type(a) is type(b):
        return all(same(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)
    return a == b


def messages(frames: Sequence[Buffer]) -> list[m.Message]:
    return [received.message for received in decode(frames)]


def test_the_case_list_names_every_message() -> None:
    assert {type(message) for message in MESSAGES} == set(m.Message.__args__)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda x: type(x).__name__)
def test_round_trip(message: m.Message) -> None:
    frames = [bytes(frame) for frame in encode(message)]
    assert same(messages(frames), [message])
    assert m.frame_bytes(message) == [len(frame) for frame in frames[1:]]


def test_threads_may_encode_at_once() -> None:
    def encode_often(thread: int) -> list[bytes]:
        message = m.Fault(f"{thread}" * 1000)
        return [bytes(encode(message)[0]) for _ in range(100)]

    for thread, frames in enumerate(on_threads(4, encode_often)):
        assert messages(frames) == [m.Fault(f"{thread}" * 1000)] * 100


def test_a_reason_may_quote_a_name_that_is_not_utf_8() -> None:
    frames = [bytes(frame) for frame in encode(m.Fault("no \udce9.jpg"))]
    assert messages(frames) == [m.Fault("no \\udce9.jpg")]


def test_arrays_are_not_copied() -> None:
    array = np.arange(1000, dtype=np.float32)
    frames = encode(m.Push(0, 0, 0, 0.1, array))
    assert np.shares_memory(np.frombuffer(frames[1], dtype=np.float32), array)
    (back,) = messages(frames)
    assert isinstance(back, m.Push)
    assert np.shares_memory(back.array, array)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda x: type(x).__name__)
def test_every_truncation_and_addition_is_refused(message: m.Message) -> None:
    frames = [bytes(frame) for frame in encode(message)]
    for cut in range(len(frames[0])):
        with pytest.raises(RemoteProtocolError):
            decode([frames[0][:cut], *frames[1:]])
    with pytest.raises(RemoteProtocolError):
        decode([frames[0] + b"\x00", *frames[1:]])
    extra = msgpack.packb([*msgpack.unpackb(frames[0]), 1])
    with pytest.raises(RemoteProtocolError):
        decode([extra, *frames[1:]])
    with pytest.raises(RemoteProtocolError):
        decode([*frames, b"1234"])
    if len(frames) > 1:
        with pytest.raises(RemoteProtocolError):
            decode(frames[:-1])


def test_messages_travel_together() -> None:
    frames = [bytes(frame) for frame in encode(*MESSAGES)]
    assert same(messages(frames), MESSAGES)
    assert [frame for received in decode(frames) for frame in received.frames] == frames


def header(kind: object, *fields: object, frames: object = 0) -> bytes:
    number = KINDS.index(kind) + 1 if isinstance(kind, type) else kind
    return bytes(msgpack.packb([PROTOCOL_VERSION, number, frames, *fields]))


HUGE_NUMBER = 2**63 - 1
BROKEN = {
    "no frames": [],
    "empty header": [b""],
    "not a list": [msgpack.packb({1: 2})],
    "other version": [msgpack.packb([PROTOCOL_VERSION + 1, 17])],
    "version as text": [msgpack.packb(["1", 17])],
    "unknown kind": [header(99)],
    "kind as list": [header([1])],
    "bool as clock": [header(m.Clock, True)],
    "float as clock": [header(m.Clock, 1.0)],
    "negative clock": [header(m.Clock, -1)],
    "clock beyond range": [header(m.Clock, HUGE_NUMBER)],
    "worker beyond range": [header(m.Hello, HUGE_NUMBER, b"")],
    "text as token": [header(m.Hello, 0, "x")],
    "half a float": [header(m.Push, 0, 0, 0, 0.1, 1, "float32", frames=1), b"12345"],
    "half a half": [header(m.Push, 0, 0, 0, 0.1, 1, "float16", frames=1), b"123"],
    "unknown precision": [header(m.Push, 0, 0, 0, 0.1, 1, "float8", frames=1), b"1234"],
    "infinite rate": [header(m.Push, 0, 0, 0, float("inf"), 1, "float32", frames=1), b"1234"],
    "rate as integer": [header(m.Push, 0, 0, 0, 1, 1, "float32", frames=1), b"1234"],
    "a push of nothing": [header(m.Push, 0, 0, 0, 0.1, 0, "float32", frames=1), b"1234"],
    "a negative sum of squares": [header(m.TotalNorm, 0, -1.0)],
    "no data": [header(m.Push, 0, 0, 0, 0.1, 1, "float32")],
    "more frames than came": [header(m.Push, 0, 0, 0, 0.1, 1, "float32", frames=2), b"1234"],
    "no number of frames": [header(m.Clock, 1, frames="0")],
    "a negative number of frames": [header(m.Clock, 1, frames=-1)],
    "one good message, one bad": [header(m.Clock, 1), header(m.Clock, -1)],
    "unknown signal": [header(m.Signal, 77, 1)],
    "a store that is a number": [header(m.Create, msgpack.packb(7))],
    "a store of two fields": [header(m.Create, msgpack.packb([1, 1]))],
    "a store of noise": [header(m.Create, b"\xc1")],
    "a store with names": [
        header(m.Create, msgpack.packb({"workers": 1, "shards": 1, "tables": []}))
    ],
    "deep nesting": [b"\x91" * 100_000],
    "a bomb of lengths": [b"\xdd\xff\xff\xff\xff"],
    "an extension": [b"\xc7\x08\x01" + b"x" * 8],
}


@pytest.mark.parametrize("frames", BROKEN.values(), ids=BROKEN.keys())
def test_broken_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(frames)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=4))
def test_noise_never_gets_past(frames: list[bytes]) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decode(frames)


def create(
    *,
    workers: object = 1,
    size: int = 1,
    rule: str = "SGD",
    momentum: object = 0.0,
    regularization: str = "L2",
    keeping: str = "gradients",
    matrix: Sequence[object] | None = None,
    codec: str | None = None,
    parts: Sequence[int] = (),
    bounds: Sequence[int] = (),
    consistency: str = "SSPPush",
    staleness: int = 0,
    row_elements: int = 0,
    held_as: str = "float32",
    start_clock: int = 0,
    chunks: int = 12,
    plane: int = 0,
    hosts: Sequence[int] = (),
) -> bytes:
    """Return the header of `Create` for a store of one table, by the field list of
    docs/internals/wire_protocol.md.
    """
    of_rule = [rule, momentum, 0.9, 1.0, 0.9, 0.0, regularization, 1.0, 0.0, False, matrix]
    table = ["t", size, staleness, 0, of_rule, keeping, codec, list(parts), row_elements]
    store = [
        *(workers, 1, [[*table, held_as, plane]], consistency, None, 1.0, start_clock, [], chunks),
        *([], "float32", False, [list(bounds)] if bounds else None, 0, 0.0, list(hosts)),
    ]
    return header(m.Create, msgpack.packb(store))


COLUMNS = [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("frame", "named"),
    [
        (create(parts=(1, 1)), "table 't' has parts (1, 1); expected sizes that add up to 1"),
        (create(held_as="bfloat16", staleness=1), "table 't' is bfloat16 on the workers; expected"),
        (create(row_elements=2), "table 't' has rows of 2 elements; expected 1 to 1"),
        (create(bounds=(0, 2, 2)), "the bounds of virtual workers are (0, 2, 2); expected"),
        (
            create(bounds=(0, 2, 4)),
            "4 virtual workers are placed on 2 hosts; expected at most 4096",
        ),
        (create(bounds=(0, 2), staleness=1), "table 't' has staleness 1, and hosts compute for"),
        (create(plane=1), "table 't' belongs to plane 1; expected a number below 1"),
        (create(hosts=(1, 1)), "hosts are (1, 1); expected 1 workers in all"),
        (create(chunks=0), f"chunks is 0; expected 1 to {2**31 - 1}"),
        (create(size=0), "table 't' has size 0; expected 1 to 1099511627776"),
        (create(workers=0), "workers is 0; expected 1 to 4096"),
        (create(workers="1"), "StoreSpec has '1' as its workers"),
        (create(momentum=float("nan")), "Rule has nan as its momentum"),
        (create(momentum="0"), "Rule has '0' as its momentum"),
        (create(momentum=1), "momentum is 1.0; expected 0 <= momentum < 1"),
        (create(start_clock=2**62), f"start_clock is {2**62}; expected 0 to {2**40 - 1}"),
        (create(chunks=2**31), f"chunks is {2**31}; expected 1 to {2**31 - 1}"),
        (create(staleness=-1), f"table 't' has staleness -1; expected 0 to {2**40 - 1}"),
        (create(parts=(2, -1)), "table 't' has parts (2, -1); expected sizes that add up to 1"),
        (create(consistency="BSP"), "StoreSpec has 'BSP' as its consistency"),
        (create(regularization="none"), "Rule has 'none' as its regularization"),
        (create(keeping="sum"), "TableSpec has 'sum' as its keeping"),
        (create(rule="sgd"), "Rule has 'sgd' as its kind"),
        (create(codec="none"), "none/none is not a codec; expected one"),
        (create(rule="Muon"), "the rule Muon has no matrix"),
        (create(matrix=[1, COLUMNS, 5, 1.0]), "the rule SGD has a matrix; expected one for Muon"),
        (create(rule="Muon", size=5, matrix=[3, COLUMNS, 5, 1.0]), "expected whole rows of 3"),
        (create(rule="Muon", matrix=[0, COLUMNS, 5, 1.0]), "columns is 0; expected 1 or more"),
        (create(rule="Muon", matrix=[1, COLUMNS, 100, 1.0]), "ns_steps is 100; expected 0 to 99"),
    ],
)
def test_a_refused_store_names_the_field_and_what_was_expected(frame: bytes, named: str) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        decode([frame])
    assert named in str(raised.value)


def test_the_fields_of_a_store_are_those_of_the_page() -> None:
    store = StoreSpec(
        workers=1,
        shards=1,
        tables=(TableSpec(name="t", size=1, rule=Rule(momentum2=0.9, delta=1.0, rms_decay=0.9)),),
    )
    assert [bytes(frame) for frame in encode(m.Create(store))] == [create()]


def test_whole_numbers_in_a_rule_travel_as_the_floats_they_mean() -> None:
    table = TableSpec(name="t", size=1, rule=Rule(momentum=0, decay=1, rate_factor=2))
    store = StoreSpec(workers=1, shards=1, tables=(table,), clip=3, gradient_scale=1)
    (received,) = decode(encode(m.Create(store)))
    assert received.message == m.Create(store)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([np.array([7, 1], np.uint32)], "do not increase"),
        ([np.array([7, 7], np.uint32)], "do not increase"),
        ([np.array([1], np.uint16)], "2 bytes"),
        ([], "0 data frames"),
        ([ROWS, ROWS], "more fields or frames"),
    ],
)
def test_numbers_of_rows_are_checked(frames: list[np.ndarray], reason: str) -> None:
    head = header(m.GetRows, 1, 9, 5, frames=len(frames))
    with pytest.raises(RemoteProtocolError, match=reason):
        decode([head, *(frame.tobytes() for frame in frames)])
