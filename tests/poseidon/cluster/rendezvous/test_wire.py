"""Messages there and back; everything else is refused."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.cluster.rendezvous.wire import (
    Kind,
    Message,
    MessageError,
    TaskInfo,
    decode,
    decode_task_info,
    encode,
)

MESSAGES = st.builds(
    Message,
    kind=st.sampled_from(Kind),
    program=st.integers(0, 1 << 30),
    status=st.integers(-(1 << 30), 1 << 30),
    arguments=st.lists(st.text(max_size=20), max_size=6).map(tuple),
    payload=st.binary(max_size=100),
)


@settings(max_examples=200, deadline=None)
@given(message=MESSAGES)
def test_there_and_back(message: Message) -> None:
    assert decode(encode(message)) == message


def test_the_names_in_a_header() -> None:
    message = Message(kind=Kind.START, program=1, status=2, arguments=("a", "b"))
    header = {"kind": "start", "program": 1, "status": 2, "arguments": ["a", "b"]}
    assert json.loads(encode(message)[0]) == header


def test_arrivals_there_and_back() -> None:
    arrival = TaskInfo(
        version="1",
        rank=3,
        size=4,
        local_rank=1,
        address="10.0.0.1",
        host="node 1",
        python="/p",
        folder="/f",
    )
    assert decode_task_info(decode(encode(arrival.message()))) == arrival


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"{}", b"", b""],
        [b"", b""],
        [b"[1]", b""],
        [b"{}", b""],
        [b'{"kind": "nothing"}', b""],
        [b'{"kind": ["here"]}', b""],
        [b'{"kind": "here", "arguments": [1]}', b""],
        [b'{"kind": "here", "program": true}', b""],
        [b'{"kind": "here", "status": 1e3}', b""],
        [b'{"kind": "here", "program": 99999999999}', b""],
        [b'{"kind": "here"' + b" " * (1 << 20) + b"}", b""],
        [b"[" * 100_000, b""],
    ],
)
def test_what_is_no_message(frames: list[bytes]) -> None:
    with pytest.raises(MessageError):
        decode(frames)


@settings(max_examples=300, deadline=None)
@given(head=st.binary(max_size=60), payload=st.binary(max_size=5))
def test_noise_is_refused_or_decoded(head: bytes, payload: bytes) -> None:
    with contextlib.suppress(MessageError):
        decode([head, payload])


@pytest.mark.parametrize(
    "arguments", [(), ("1", "0", "1", "0", "a"), ("1", "x", "1", "0", "a", "h", "p", "f")]
)
def test_a_join_without_a_task(arguments: tuple[str, ...]) -> None:
    with pytest.raises(MessageError):
        decode_task_info(Message(kind=Kind.JOIN, arguments=arguments))
