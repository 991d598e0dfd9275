"""What launcher and agent say: it arrives as it was sent, and nothing else is taken for it."""

from __future__ import annotations

import json
import random

import pytest

from poseidon.cluster.agent.messages import (
    EventReport,
    Exited,
    Heartbeat,
    Hello,
    OutputReport,
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
)
from poseidon.cluster.agent.wire import REPORTS, REQUESTS, WireError
from poseidon.cluster.plan import ProcessName, Role
from poseidon.cluster.process import OutputStream

NAME = ProcessName(role=Role.SHARD, index=2, client=1, host="node1")
SENT: list[Request] = [
    Hello(protocol=1, version="0.1.0", record={"job": "j"}, silence_s=20.0, grace_s=5.0),
    Start(
        id=1,
        name=NAME,
        argv=("", "-m", "x", "line\nend"),
        environment={"A": "b"},
        first_line='{"a": "é"}',
    ),
    SendLine(id=1, line="x" * 100_000),
    SendSignal(id=1, signal=ProcessSignal.KILL),
    Heartbeat(),
    Shutdown(),
]
ANSWERED: list[Report] = [
    Welcome(protocol=1, version="0.1.0", pid=7, cores=8, scratch="/tmp/x"),
    Started(id=1, pid=7, created_s=1.5e9),
    Refused(id=-1, message="why"),
    EventReport(id=1, event={"event": "progress", "iteration": 3}),
    OutputReport(id=1, stream=OutputStream.STDOUT, text="\x1b[0m text \u2028 \udc80\r\n"),
    Exited(id=1, status=-9),
    Heartbeat(),
]


def test_requests_and_reports_arrive_as_they_were_sent() -> None:
    assert [REQUESTS.decode(REQUESTS.encode(request)) for request in SENT] == SENT
    assert [REPORTS.decode(REPORTS.encode(report)) for report in ANSWERED] == ANSWERED
    lines = [*map(REQUESTS.encode, SENT), *map(REPORTS.encode, ANSWERED)]
    assert not any(b"\n" in line for line in lines)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b"null", b'"Heartbeat"', b"{}", b'{"kind": "Dance"}', b'{"kind": ["Heartbeat"]}', b"\xff\xfe", b"[" * 100_000,
        b'{"kind": "Start", "id": 1}',
        b'{"kind": "SendLine", "id": true, "line": ""}',
        b'{"kind": "SendLine", "id": "1", "line": ""}',
        b'{"kind": "SendLine", "id": 1, "line": 5}',
        b'{"kind": "SendSignal", "id": 1, "signal": "stop"}',
        b'{"kind": "SendSignal", "id": 1, "signal": []}',
        b'{"kind": "Hello", "protocol": 1, "version": "1", "record": {}, "silence_s": NaN, '
b'"grace_s": 1}',
        b'{"kind": "Hello", "protocol": 1, "version": "1", "record": [], "silence_s": 1, '
b'"grace_s": 1}',
        b'{"kind": "Hello", "protocol": 1, "version": "1", "record": {}, "silence_s": -1, '
b'"grace_s": 1}',
    ],
)  # fmt: skip
def test_what_is_not_a_request(line: bytes) -> None:
    with pytest.raises(WireError):
        REQUESTS.decode(line)


def test_a_line_has_the_names_of_the_class_and_its_fields() -> None:
    line = {"kind": "SendSignal", "id": 1, "signal": "kill"}
    assert json.loads(REQUESTS.encode(SendSignal(id=1, signal=ProcessSignal.KILL))) == line
    with pytest.raises(WireError, match="SendSignal has 'stop' as its signal"):
        REQUESTS.decode(json.dumps({**line, "signal": "stop"}).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("argv", []), ("argv", "ls"), ("argv", [1]), ("environment", []), ("environment", {"A": 1}), ("name", {}),
        ("name", {"role": "king", "index": 0, "client": 0, "host": "h"}), ("first_line", None), ("id", 1.5), ("own_stdout", 1),
    ],
)  # fmt: skip
def test_a_start_is_checked_field_by_field(field: str, value: object) -> None:
    fields = json.loads(REQUESTS.encode(SENT[1]))
    with pytest.raises(WireError):
        REQUESTS.decode(json.dumps({**fields, field: value}).encode())


def test_damaged_lines_are_refused_or_legal_and_nothing_else() -> None:
    chance = random.Random(5)
    lines = [REQUESTS.encode(request)[:300] for request in SENT]
    lines += [REPORTS.encode(report) for report in ANSWERED]
    for _ in range(20_000):
        line = bytearray(chance.choice(lines))
        for _ in range(chance.randrange(1, 4)):
            line[chance.randrange(len(line))] = chance.randrange(256)
        for decode in (REQUESTS.decode, REPORTS.decode):
            try:
                decode(bytes(line))
            except WireError:
                continue
