"""Frames of factors: both directions, and whatever is not quite one is refused."""

from __future__ import annotations

import contextlib

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.exchange.factors.factor_rounds import Factors, FactorTable, Pair
from poseidon.exchange.factors.peers import (
    decode,
    encode,
)
from poseidon.exchange.worker_links import MAX_HEADER_BYTES, VERSION
from ps_server import RemoteProtocolError

TABLES = (FactorTable(name="fc6", outputs=3, inputs=2),)
PAIR = Pair(np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 2), np.float32))


def frames_of(*header: object, floats: tuple[int, ...] = ()) -> list[bytes]:
    return [msgpack.packb(list(header)), *(bytes(4 * count) for count in floats)]


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_factors_come_back(rows: int) -> None:
    sent = Factors(0, 7, Pair(PAIR.u[:rows], PAIR.v[:rows]))
    got = decode(encode(sent), TABLES)
    assert (got.table, got.clock) == (0, 7)
    assert np.array_equal(got.pair.u, sent.pair.u)
    assert np.array_equal(got.pair.v, sent.pair.v)


def test_arrays_are_not_copied() -> None:
    frames = encode(Factors(0, 0, PAIR))
    assert np.shares_memory(np.frombuffer(frames[1], np.float32), PAIR.u)
    got = decode(frames, TABLES)
    assert np.shares_memory(got.pair.v, PAIR.v)


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xc1"],
        [b"x" * (MAX_HEADER_BYTES + 1)],
        frames_of(),
        frames_of(VERSION + 1, "Factors", 0, 0, 1, floats=(3, 2, 0)),
        frames_of(True, "Factors", 0, 0, 1, floats=(3, 2, 0)),
        frames_of(VERSION, "Factors", "0", 0, 1, floats=(3, 2, 0)),
        frames_of(VERSION, "other", 0, 0, 1, floats=(3, 2, 0)),
        frames_of(VERSION, "Factors", 1, 0, 1, floats=(3, 2, 0)),
        frames_of(VERSION, "Factors", 0, -1, 1, floats=(3, 2, 0)),
        frames_of(VERSION, "Factors", 0, 0, -1, floats=(3, 2, 0)),
        frames_of(VERSION, "Factors", 0, 0, 2**40, floats=(3, 2, 0)),
        frames_of(VERSION, "Factors", 0, 0, 1, floats=(2, 3, 0)),
        frames_of(VERSION, "Factors", 0, 0, 1, floats=(3, 0)),
        frames_of(VERSION, "Factors", 0, 0, 1, floats=(3, 2)),
        frames_of(VERSION, "Factors", 0, 0, 1, floats=(3, 2, 1)),
    ],
)
def test_what_encode_does_not_make_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(frames, TABLES)


@given(st.lists(st.binary(max_size=60), min_size=2, max_size=4))
def test_bytes_never_do_more_than_be_refused(frames: list[bytes]) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decode(frames, TABLES)
