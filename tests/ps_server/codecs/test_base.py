"""What must hold of every codec, for all numbers, and what a peer may send."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_server import RemoteProtocolError
from ps_server.codecs import registry
from ps_server.codecs.base import SEGMENT_ELEMENTS, Coder, Key
from ps_server.codecs.registry import codec_of
from ps_server.protocol.placement import Chunk
from ps_server.protocol.precision import Compressor
from tests.support.codecs import KEY, decoded, encoded, numbers
from tests.support.steps_codec import Steps

CODECS = [
    "steps:0.25",
    "int8",
    "int4",
    "sign",
    "topk:0.25",
    "topk:0.001",
    "randomk:0.25",
    "randomk:0.001",
]
SIZES = [
    1,
    3,
    255,
    256,
    257,
    1_000,
    SEGMENT_ELEMENTS,
    SEGMENT_ELEMENTS + 1,
    5 * SEGMENT_ELEMENTS + 777,
]


@pytest.fixture(autouse=True, scope="module")
def own_registry() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(registry, "_CODECS", dict(registry._CODECS))
        registry.register_codec(Steps)
        yield


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CODECS)
def test_the_size_follows_from_the_elements_and_every_byte_is_written(name: str, size: int) -> None:
    data = encoded(name, numbers(size))
    again = np.zeros_like(data)
    Coder(codec_of(name)).compress(np.zeros(size, np.float32), numbers(size), again, KEY)
    assert data.size % 4 == 0
    assert data.tobytes() == again.tobytes()


@pytest.mark.parametrize("name", CODECS)
def test_chunks_change_no_bit(name: str) -> None:
    size = 3 * SEGMENT_ELEMENTS + 500
    exact = numbers(size)
    whole = decoded(name, encoded(name, exact), size)
    cut = SEGMENT_ELEMENTS
    key = KEY._replace(segment=1)
    parts = [
        decoded(name, encoded(name, exact[:cut]), cut),
        decoded(name, encoded(name, exact[cut:], key), size - cut, key),
    ]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", CODECS)
def test_alignment_changes_no_bit(name: str) -> None:
    size = 2 * SEGMENT_ELEMENTS + 11
    exact = numbers(size)
    expected = encoded(name, exact)
    for shift in (1, 2, 3, 5):
        moved = np.zeros(size + shift, np.float32)[shift:]
        moved[:] = exact
        data = np.zeros(expected.size + 4 * shift, np.uint8)[4 * shift :]
        Coder(codec_of(name)).compress(np.zeros_like(moved), moved, data, KEY)
        assert data.tobytes() == expected.tobytes()


@given(
    name=st.sampled_from(CODECS),
    size=st.sampled_from(SIZES[:7]),
    seed=st.integers(0, 2**16),
    exponents=st.integers(0, 30),
)
def test_what_was_sent_and_what_is_held_back_is_what_was_given(
    name: str, size: int, seed: int, exponents: int
) -> None:
    rng = np.random.default_rng(seed)
    codec = codec_of(name)
    compressor = Compressor([Chunk(table=3, index=0, start=0, stop=size, shard=0)], codec)
    received, total = np.zeros(size), np.zeros(size)
    largest = 0.0
    for clock in range(5):
        exact = (rng.standard_normal(size) * 2.0 ** rng.integers(-exponents, 1, size)).astype(
            np.float32
        )
        part = np.zeros(size, np.float32)
        codec.add(part, compressor.encode(exact, clock), Key(3, 0, clock))
        received += part
        total += exact
        largest = max(largest, np.abs(total).max(), np.abs(received).max())
    np.testing.assert_allclose(
        received + compressor.held_back, total, atol=5 * 2**-22 * max(largest, 1.0), rtol=0
    )


@pytest.mark.parametrize("name", ["topk:0.25", "randomk:0.25"])
def test_what_a_sparse_codec_sends_is_exact(name: str) -> None:
    compressor = Compressor([Chunk(table=0, index=0, start=0, stop=1_000, shard=0)], codec_of(name))
    exact = numbers(1_000)
    part = decoded(name, compressor.encode(exact, 0), 1_000, Key(0, 0, 0))
    assert (part + compressor.held_back).tobytes() == exact.tobytes()
    assert np.count_nonzero(compressor.held_back) == 750


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["int8", "int4", "sign", "topk:0.001"])
def test_a_number_that_is_not_finite_arrives_as_one(name: str, number: float) -> None:
    exact = numbers(2 * SEGMENT_ELEMENTS)
    exact[SEGMENT_ELEMENTS + 3] = number
    got = decoded(name, encoded(name, exact), exact.size)
    assert not np.isfinite(got[SEGMENT_ELEMENTS:]).all()
    assert np.isfinite(got[:SEGMENT_ELEMENTS]).all()


@pytest.mark.parametrize("name", CODECS)
def test_zeros_and_tiny_numbers_do_no_harm(name: str) -> None:
    for exact in (
        np.zeros(600, np.float32),
        np.full(600, 1e-42, np.float32),
        np.full(600, -3e-38, np.float32),
    ):
        got = decoded(name, encoded(name, exact), 600)
        assert np.abs(got - exact).max() <= np.abs(exact).max()


@given(name=st.sampled_from(CODECS), size=st.sampled_from(SIZES[:8]), seed=st.integers(0, 2**16))
def test_any_bytes_are_refused_or_stay_within_the_chunk(name: str, size: int, seed: int) -> None:
    codec = codec_of(name)
    data = np.random.default_rng(seed).integers(0, 256, codec.size(size), np.uint8)
    around = np.full(size + 200, 0.5, np.float32)
    try:
        codec.check(data, size)
    except RemoteProtocolError:
        return
    with np.errstate(all="ignore"):
        codec.add(around[100:-100], data, KEY)
    assert (around[:100] == 0.5).all()
    assert (around[-100:] == 0.5).all()
