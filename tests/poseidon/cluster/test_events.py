"""Event lines: what is one, what it means, and what is only text."""

from __future__ import annotations

import json

import pytest

from poseidon.base.call_names import LoopPosition
from poseidon.cluster.events import (
    AddressRound,
    Alive,
    Among,
    Bound,
    Connecting,
    Done,
    Event,
    Failed,
    Paused,
    Progress,
    Ready,
    Saved,
    decode_line,
    encode_command,
    parse_event,
)


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ('{"event": "listening", "address": '
'"tcp://127.0.0.1:40123"}', Bound(address="tcp://127.0.0.1:40123")),
        ('{"event": "listening"}', Alive()),
        ('{"event": "listening", "address": "a", "round": 2, "among": "workers"}',
         Bound(address="a", round=AddressRound(among=Among.WORKERS, number=2))),
        ('{"event": "connecting", "round": 1}', Connecting(round=AddressRound(number=1))),
        ('{"event": "connecting", "round": 1, "among": 3}', Alive()),
        ('{"event": "ready"}', Ready()),
        ('{"event": "alive"}', Alive()),
        ('{"event": "alive", "still_s": 1, "position": {"iterations": 6, "collections": 2}}',
         Alive(still_s=1.0, position=LoopPosition(iterations=6, collections=2))),
        ('{"event": "alive", "position": {"iterations": 6, "collections": null}}', Alive()),
        ('{"event": "progress", "iteration": 12, "loss": NaN}', Progress(iteration=12)),
        ('{"event": "progress", "iteration": true}', Alive()),
        ('{"event": "progress", "iteration": 1.5}', Alive()),
        ('{"event": "snapshot", "state": "/s", "iteration": 10}', Saved(iteration=10)),
        ('{"event": "snapshot", "state": "/s"}', Alive()),
        ('{"event": "done"}', Done()),
        ('{"event": "done", "joined": false}', Done(joined=False)),
        ('{"event": "error", "message": "m", "exit_code": '
'2}', Failed(message="m", exit_code=2, peer_lost=False)),
        ('{"event": "error", "message": "m", "peer_lost": '
'true}', Failed(message="m", exit_code=1, peer_lost=True)),
        ('{"event": "error", "message": "m", "peer_lost": true, "unreachable": '
'true}', Failed(message="m", exit_code=1, peer_lost=True, unreachable=True)),
        ('{"event": "error", "exit_code": '
'0}', Failed(message="failed without a "
"message", exit_code=1, peer_lost=False)),
        ('{"event": "paused", "snapshot": 120, "is_part": true, "regrouped": true}',
         Paused(snapshot=120, is_part=True, regrouped=True)),
        ('{"event": "paused", "snapshot": null, "message": "worker 1 is lost"}',
         Paused(message="worker 1 is lost")),
        ('{"event": "paused", "snapshot": 1, "message": 3, "regrouped": 1}', Alive()),
        ('{"event": "new in a later version"}', Alive()),
    ],
)  # fmt: skip
def test_events(line: str, event: Event) -> None:
    fields = decode_line(line.encode())
    assert fields is not None
    assert parse_event(fields) == event


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"hello\n",
        b"{",
        b"{}",
        b"[1]",
        b'{"event": 1}',
        b'"event"',
        b"\xff\xfe",
        b'{"event": "\xff"}',
        b"{" * 99999,
    ],
)
def test_text(line: bytes) -> None:
    assert decode_line(line) is None


def test_commands() -> None:
    line = encode_command("connect", addresses=["a\nb"])
    assert b"\n" not in line
    assert json.loads(line) == {"do": "connect", "addresses": ["a\nb"]}
