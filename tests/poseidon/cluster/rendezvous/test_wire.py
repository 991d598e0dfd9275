"""Messages there and back; everything else is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.cluster.rendezvous.wire import Arrival, Kind, Message, WordError, arrival_in, decode, encode

MESSAGES = st.builds(
    Message,
    kind=st.sampled_from(Kind),
    program=st.integers(0, 1 << 30),
    status=st.integers(-(1 << 30), 1 << 30),
    words=st.lists(st.text(max_size=20), max_size=6).map(tuple),
    payload=st.binary(max_size=100),
)


@settings(max_examples=200, deadline=None)
@given(message=MESSAGES)
def test_there_and_back(message: Message) -> None:
    assert decode(encode(message)) == message


def test_arrivals_there_and_back() -> None:
    arrival = Arrival(
        version="1", rank=3, size=4, local_rank=1, address="10.0.0.1", host="node 1", python="/p", folder="/f"
    )
    assert arrival_in(decode(encode(arrival.message()))) == arrival


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
        [b'{"kind": "here", "words": [1]}', b""],
        [b'{"kind": "here", "program": true}', b""],
        [b'{"kind": "here", "status": 1e3}', b""],
        [b'{"kind": "here", "program": 99999999999}', b""],
        [b'{"kind": "here"' + b" " * (1 << 20) + b"}", b""],
        [b"[" * 100_000, b""],
    ],
)
def test_what_is_no_message(frames: list[bytes]) -> None:
    with pytest.raises(WordError):
        decode(frames)


@settings(max_examples=300, deadline=None)
@given(head=st.binary(max_size=60), payload=st.binary(max_size=5))
def test_noise_is_refused_or_decoded(head: bytes, payload: bytes) -> None:
    with contextlib.suppress(WordError):
        decode([head, payload])


@pytest.mark.parametrize("words", [(), ("1", "0", "1", "0", "a"), ("1", "x", "1", "0", "a", "h", "p", "f")])
def test_what_is_no_arrival(words: tuple[str, ...]) -> None:
    with pytest.raises(WordError):
        arrival_in(Message(kind=Kind.HERE, words=words))
