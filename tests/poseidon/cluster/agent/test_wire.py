"""What launcher and agent say: it arrives as it was sent, and nothing else is taken for it."""

from __future__ import annotations

import json
import random

import pytest

from poseidon.cluster.agent.wire import (
    EventReport,
    Exited,
    Heartbeat,
    Hello,
    LogReport,
    ProcessSignal,
    Refused,
    Report,
    Request,
    SendLine,
    SendSignal,
    Shutdown,
    Start,
    Started,
    Welcome,
    WireError,
    decode_report,
    decode_request,
    encode_report,
    encode_request,
)
from poseidon.cluster.plan import ProcessName, Role

NAME = ProcessName(role=Role.SHARD, index=2, client=1, host="node1")
ORDERS: list[Request] = [
    Hello(protocol=1, version="0.1.0", record={"job": "j"}, silence_s=20.0, grace_s=5.0),
    Start(
        id=1, name=NAME, argv=("", "-m", "x", "line\nend"), environment={"A": "b"}, first_line='{"a": "é"}'
    ),
    SendLine(id=1, line="x" * 100_000),
    SendSignal(id=1, signal=ProcessSignal.KILL),
    Heartbeat(),
    Shutdown(),
]
REPORTS: list[Report] = [
    Welcome(protocol=1, version="0.1.0", pid=7, cores=8, scratch="/tmp/x"),
    Started(id=1, pid=7, created_s=1.5e9),
    Refused(id=-1, message="why"),
    EventReport(id=1, event={"event": "progress", "iteration": 3}),
    LogReport(id=1, line="\x1b[0m text \u2028"),
    Exited(id=1, status=-9),
    Heartbeat(),
]


def test_orders_and_reports_arrive_as_they_were_sent() -> None:
    assert [decode_request(encode_request(order)) for order in ORDERS] == ORDERS
    assert [decode_report(encode_report(report)) for report in REPORTS] == REPORTS
    lines = [*map(encode_request, ORDERS), *map(encode_report, REPORTS)]
    assert not any(b"\n" in line for line in lines)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b"null", b'"beat"', b"{}", b'{"do": "dance"}', b'{"do": ["beat"]}', b"\xff\xfe", b"[" * 100_000,
        b'{"do": "start", "id": 1}',
        b'{"do": "send", "id": true, "line": ""}',
        b'{"do": "send", "id": "1", "line": ""}',
        b'{"do": "send", "id": 1, "line": 5}',
        b'{"do": "signal", "id": 1, "signal": "stop"}',
        b'{"do": "signal", "id": 1, "signal": []}',
        b'{"do": "greet", "protocol": 1, "version": "1", "record": {}, "silence_s": NaN, "grace_s": 1}',
        b'{"do": "greet", "protocol": 1, "version": "1", "record": [], "silence_s": 1, "grace_s": 1}',
        b'{"do": "greet", "protocol": 1, "version": "1", "record": {}, "silence_s": -1, "grace_s": 1}',
    ],
)  # fmt: skip
def test_what_is_no_order(line: bytes) -> None:
    with pytest.raises(WireError):
        decode_request(line)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("argv", []), ("argv", "ls"), ("argv", [1]), ("environment", []), ("environment", {"A": 1}), ("name", {}),
        ("name", {"role": "king", "index": 0, "client": 0, "host": "h"}), ("first_line", None), ("id", 1.5),
    ],
)  # fmt: skip
def test_a_start_is_checked_field_by_field(field: str, value: object) -> None:
    fields = json.loads(encode_request(ORDERS[1]))
    with pytest.raises(WireError):
        decode_request(json.dumps({**fields, field: value}).encode())


def test_damaged_lines_are_refused_or_legal_and_nothing_else() -> None:
    chance = random.Random(5)
    lines = [encode_request(order)[:300] for order in ORDERS] + [encode_report(report) for report in REPORTS]
    for _ in range(20_000):
        line = bytearray(chance.choice(lines))
        for _ in range(chance.randrange(1, 4)):
            line[chance.randrange(len(line))] = chance.randrange(256)
        for decode in (decode_request, decode_report):
            try:
                decode(bytes(line))
            except WireError:
                continue
