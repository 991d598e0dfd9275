"""What launcher and agent say: it arrives as it was sent, and nothing else is taken for it."""

from __future__ import annotations

import json
import random
from typing import get_args

import pytest

from poseidon.cluster.agent.messages import (
    AGENT_ITSELF,
    REPORTS,
    REQUESTS,
    AgentHello,
    AgentWelcome,
    Answer,
    Ask,
    Content,
    EndAll,
    EventReport,
    Exited,
    Heartbeat,
    Join,
    KilledByUser,
    OutputReport,
    PeerSilence,
    ProcessSignal,
    Put,
    ReadFile,
    Refused,
    Register,
    Report,
    Request,
    SendSignal,
    Service,
    Shutdown,
    Signaled,
    Started,
    StartProcess,
    WireError,
    WriteLine,
)
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess
from poseidon.cluster.machinefile import Host, HostRole
from poseidon.cluster.process import OutputStream, ProcessSpec

LIMIT_S = 10.0


def _looks_until_lost(wait_s: float, beat_s: float = float("inf"), most: int = 1000) -> int | None:
    """Return after how many looks a process counts as lost; None: it never does.

    Args:
        wait_s: between two looks, which should be 1.
        beat_s: between two messages of the other process; infinite: it is dead.
        most: looks.
    """
    silence = PeerSilence(1.0, 0.0)
    next_s = beat_s
    for number in range(1, most):
        now_s = number * wait_s
        if next_s <= now_s:  # this process has been given a processor, and takes what has come
            silence.heard_s = now_s
            next_s = now_s + beat_s
        if silence.look(now_s) > LIMIT_S:
            return number
    return None


@pytest.mark.parametrize(("wait_s", "looks"), [(0.25, 41), (1.0, 11), (3.0, 11), (60.0, 11)])
def test_a_death_is_found_after_as_many_waits_however_late_they_are(
    wait_s: float, looks: int
) -> None:
    assert _looks_until_lost(wait_s) == looks


@pytest.mark.parametrize("wait_s", [0.1, 1.0, 4.0, 15.0, 3600.0])
def test_one_that_sends_is_never_lost(wait_s: float) -> None:
    """At 15 s a wait all its messages come later than the limit."""
    assert _looks_until_lost(wait_s, beat_s=2.0) is None


def test_a_silence_begins_with_the_last_message() -> None:
    silence = PeerSilence(1.0, 0.0)
    assert [silence.look(1.0), silence.look(1.5), silence.look(9.0)] == [1.0, 1.5, 2.5]
    silence.heard_s = 9.25
    assert [silence.look(9.5), silence.look(10.5)] == [0.25, 1.25]


def test_a_message_that_came_after_the_clock_was_read() -> None:
    silence = PeerSilence(1.0, 0.0)
    silence.heard_s = 5.1
    assert silence.look(5.0) == 0.0


CONTENT = bytes(range(256)) + b"\n{}\n"
NAME = ProcessName(role=Role.SHARD, index=2, client=1, host="node1")
RECORD = JobRecord(
    job="j",
    launcher=RecordedProcess(name="launcher", host="127.0.0.1", pid=1, created="0.5"),
    hostfile=None,
    hosts=(Host(id=0, address="node1", port=0, role=HostRole.SERVER, ssh_port=22),),
    output="/out",
    started_s=1.5,
)
START = StartProcess(
    id=1,
    spec=ProcessSpec(
        name=NAME,
        argv=("", "-m", "x", "line\nend"),
        environment={"A": "b"},
        first_line='{"a": "é"}'.encode(),
    ),
)
SENT: list[Request] = [
    AgentHello(protocol=1, version="0.1.0", silence_s=20.0, grace_s=5.0),
    Register(record=RECORD),
    START,
    WriteLine(id=1, line=b"x" * 100_000),
    SendSignal(id=1, signal=ProcessSignal.KILL),
    Ask(id=2, service=Service.CHECK, request={"clients": []}),
    Put(id=3, path="/tmp/x/net\n.prototxt", offset=0, content=CONTENT),
    Put(id=3, path="~/empty", offset=0, content=b""),
    ReadFile(id=4, path="x", offset=1 << 40, size=65536),
    EndAll(id=5),
    Heartbeat(),
    Shutdown(),
    Shutdown(status=75, reason="no job"),
]
ANSWERED: list[Report] = [
    Join(version="0.1.0", rank=3, size=4, local_rank=1, address="10.0.0.3", host="node3"),
    AgentWelcome(cores=8, scratch="/tmp/x"),
    Started(id=1, pid=7, created="1.5e9"),
    Refused(id=AGENT_ITSELF, message="why"),
    Answer(id=2, answer={"problems": ["é", None]}),
    Content(id=4, size=1 << 40, content=CONTENT),
    Content(id=4, size=0, content=b""),
    EventReport(id=1, event={"event": "progress", "iteration": 3}),
    OutputReport(id=1, stream=OutputStream.STDOUT, text="\x1b[0m text \u2028 \udc80\r\n"),
    Exited(id=1, status=-9),
    Signaled(signal="SIGTERM"),
    KilledByUser(),
    Heartbeat(),
]


def test_requests_and_reports_arrive_as_they_were_sent() -> None:
    assert [REQUESTS.decode(REQUESTS.encode(request)) for request in SENT] == SENT
    assert [REPORTS.decode(REPORTS.encode(report)) for report in ANSWERED] == ANSWERED
    assert {type(request) for request in SENT} == set(get_args(Request))
    assert {type(report) for report in ANSWERED} == set(get_args(Report))


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b"null", b'"Heartbeat"', b"{}", b'{"kind": "Dance"}', b'{"kind": ["Heartbeat"]}', b"\xff\xfe", b"[" * 100_000,
        b'{"kind": "StartProcess", "id": 1}',
        b'{"kind": "WriteLine", "id": true, "line": ""}',
        b'{"kind": "WriteLine", "id": "1", "line": ""}',
        b'{"kind": "WriteLine", "id": 1, "line": 5}',
        b'{"kind": "SendSignal", "id": 1, "signal": "stop"}',
        b'{"kind": "SendSignal", "id": 1, "signal": []}',
        b'{"kind": "AgentHello", "protocol": 1, "version": "1", "silence_s": NaN, '
b'"grace_s": 1}',
        b'{"kind": "AgentHello", "protocol": 1, "version": "1", "silence_s": -1, '
b'"grace_s": 1}',
        b'{"kind": "Register", "record": []}', b'{"kind": "Register", "record": {}}',
        b'{"kind": "Ask", "id": 1, "service": "shell", "request": {}}',
        b'{"kind": "Put", "id": 1, "path": "x"}\ncontent',
        b'{"kind": "ReadFile", "id": 1, "path": ["x"], "offset": 0, "size": 1}',
        b'{"kind": "Join", "version": "1", "rank": 0, "size": 1, "local_rank": 0, '
b'"address": "a", "host": "h"}',
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
        ("name", {"role": "king", "index": 0, "client": 0, "host": "h"}), ("first_line", None), ("slot", 1.5), ("own_stdout", 1),
    ],
)  # fmt: skip
def test_a_start_is_checked_field_by_field(field: str, value: object) -> None:
    fields = json.loads(REQUESTS.encode(START))
    spec = {**fields["spec"], field: value}
    with pytest.raises(WireError):
        REQUESTS.decode(json.dumps({**fields, "spec": spec}).encode())


def test_the_bytes_of_a_file_follow_the_line_as_they_are() -> None:
    message = REQUESTS.encode(Put(id=3, path="/x", offset=7, content=CONTENT))
    header, _, content = message.partition(b"\n")
    assert json.loads(header) == {"kind": "Put", "id": 3, "path": "/x", "offset": 7}
    assert content == CONTENT


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
