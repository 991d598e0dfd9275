"""Lossy codecs: their bytes by hand, what must hold for all numbers, and what a peer may send."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_server import CodecSpec, RemoteProtocolError, SpecError
from ps_server.protocol.codecs import BLOCK, Encoded, Key, codec_of, drawn
from ps_server.protocol.messages import Array
from ps_server.protocol.placement import Chunk
from ps_server.protocol.precision import Compressor
from ps_server.protocol.settings import SEGMENT_ELEMENTS

CODECS = ["int8", "int4", "sign", "topk:0.25", "topk:0.001", "randomk:0.25", "randomk:0.001"]
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
KEY = Key(3, 0, 7)


def encoded(name: str, exact: Array, key: Key = KEY) -> Encoded:
    codec = codec_of(CodecSpec.parse(name))
    out = np.full(codec.size(exact.size), 0xEE, np.uint8)
    with np.errstate(all="ignore"):
        codec.compress(np.zeros_like(exact), exact, out, key)
    return out


def decoded(name: str, data: Encoded, elements: int, key: Key = KEY) -> Array:
    codec = codec_of(CodecSpec.parse(name))
    out = np.zeros(elements, np.float32)
    codec.check(data, elements)
    codec.add(out, data, key)
    return out


def numbers(size: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def test_int8_has_a_scale_and_rounds_to_even() -> None:
    exact = np.array([127, -127, 1.5, 2.5, -0.5, 0.4], np.float32)
    data = encoded("int8", exact)
    assert data[:4].view("<f4") == 1.0
    assert data[4:10].view(np.int8).tolist() == [127, -127, 2, 2, 0, 0]
    assert data[10:].tolist() == [0, 0]  # to a multiple of 4
    assert decoded("int8", data, 6).tolist() == [127, -127, 2, 2, 0, 0]


def test_each_block_of_int8_has_its_own_scale() -> None:
    exact = np.repeat(np.array([1e6, 1e-6, 0], np.float32), [BLOCK, BLOCK, 2])
    data = encoded("int8", exact)
    np.testing.assert_allclose(data[:12].view("<f4"), [1e6 / 127, 1e-6 / 127, 0], rtol=1e-6)
    np.testing.assert_allclose(decoded("int8", data, exact.size), exact, rtol=1e-6)


def test_int4_has_a_scale_and_two_elements_in_a_byte() -> None:
    exact = np.array([7, -7, 1.5, 2.5, -0.5], np.float32)
    data = encoded("int4", exact)
    assert data[:4].view("<f4") == 1.0
    assert data[4:].tolist() == [0x1F, 0xAA, 0x08, 0]  # 8 is 0
    assert decoded("int4", data, 5).tolist() == [7, -7, 2, 2, 0]


def test_each_block_of_int4_has_its_own_scale() -> None:
    exact = np.repeat(np.array([7e6, 7e-6, 0], np.float32), [64, 64, 3])
    data = encoded("int4", exact)
    np.testing.assert_allclose(data[:12].view("<f4"), [1e6, 1e-6, 0], rtol=1e-6)
    np.testing.assert_allclose(decoded("int4", data, exact.size), exact, rtol=1e-6)


def test_sign_has_a_bit_and_the_mean_magnitude() -> None:
    exact = np.array([4, -2, 0, -6, 1, 1, 1, 1, -8], np.float32)
    data = encoded("sign", exact)
    assert data[:4].view("<f4") == 24 / 9
    assert data[4:].tolist() == [0b1010, 1, 0, 0]
    mean = float(np.float32(24 / 9))
    assert decoded("sign", data, 9).tolist() == [mean * s for s in (1, -1, 1, -1, 1, 1, 1, 1, -1)]


def test_topk_has_positions_and_elements_and_the_lower_of_equal_ones() -> None:
    exact = np.array([0, -3, 1, 3, 3, 0, -3, 2], np.float32)
    data = encoded("topk:0.375", exact)
    assert data[:6].view("<u2").tolist() == [1, 3, 4]
    assert data[6:8].tolist() == [0, 0]
    assert data[8:].view("<f4").tolist() == [-3, 3, 3]
    assert decoded("topk:0.375", data, 8).tolist() == [0, -3, 0, 3, 3, 0, 0, 0]


def test_each_segment_has_its_own_largest() -> None:
    exact = np.zeros(2 * SEGMENT_ELEMENTS + 1_000, np.float32)
    places = [5, SEGMENT_ELEMENTS + 6, 2 * SEGMENT_ELEMENTS + 7]
    exact[places] = [1e-3, 1, -1e3]
    assert (
        np.flatnonzero(decoded("topk:0.0001", encoded("topk:0.0001", exact), exact.size)).tolist()
        == places
    )


def test_randomk_sends_what_both_draw() -> None:
    exact = numbers(1_000)
    got = decoded("randomk:0.1", encoded("randomk:0.1", exact), 1_000)
    positions = drawn((1, 1_000), 100, KEY)[0]
    assert np.flatnonzero(got).tolist() == positions.tolist()
    assert got[positions].tobytes() == exact[positions].tobytes()
    assert [p // 10 for p in positions.tolist()] == list(range(100))  # one of each equal part


def test_positions_never_change() -> None:
    """They are part of the protocol: these were computed by hand-written integers of Python."""
    mask = 2**64 - 1

    def mixed(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    state = mixed((mixed(3) + 7) & mask)
    expected = [
        [
            100 * i + mixed((state + segment * SEGMENT_ELEMENTS + i) & mask) % 100
            for i in range(SEGMENT_ELEMENTS // 100)
        ]
        for segment in (2, 3)
    ]
    length = SEGMENT_ELEMENTS // 100 * 100
    assert drawn((2, length), SEGMENT_ELEMENTS // 100, Key(3, 2, 7)).tolist() == expected


def test_every_element_is_drawn_in_time() -> None:
    seen = np.zeros(1_000, bool)
    for clock in range(100):
        seen[drawn((1, 1_000), 100, Key(0, 0, clock))[0]] = True
    assert seen.all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CODECS)
def test_the_size_follows_from_the_elements_and_every_byte_is_written(name: str, size: int) -> None:
    data = encoded(name, numbers(size))
    again = np.zeros_like(data)
    codec_of(CodecSpec.parse(name)).compress(np.zeros(size, np.float32), numbers(size), again, KEY)
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
        codec_of(CodecSpec.parse(name)).compress(np.zeros_like(moved), moved, data, KEY)
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
    codec = codec_of(CodecSpec.parse(name))
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
    compressor = Compressor(
        [Chunk(table=0, index=0, start=0, stop=1_000, shard=0)], codec_of(CodecSpec.parse(name))
    )
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
    codec = codec_of(CodecSpec.parse(name))
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


@pytest.mark.parametrize(
    "positions",
    [[3, 3], [4, 3], [3, 8], [65_535, 3], [0, 65_535]],
    ids=["twice", "back", "outside", "far first", "far last"],
)
def test_positions_that_no_encoder_sends_are_refused(positions: list[int]) -> None:
    data = encoded("topk:0.25", numbers(8))
    data[:4].view("<u2")[:] = positions
    with pytest.raises(RemoteProtocolError, match="do not increase"):
        decoded("topk:0.25", data, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "int2",
            "'int2' is not a codec; expected int8, int4, sign, topk:FRACTION, randomk:FRACTION",
        ),
        ("topk", "'topk' is not a codec; expected a fraction, such as topk:0.01"),
        ("topk:0", "topk:0 is not a codec"),
        ("topk:0.6", "topk:0.6 is not a codec"),
        ("topk:nan", "expected a fraction"),
        ("topk:much", "expected a number after 'topk:'"),
        ("int8:3", "int8 has no fraction"),
        ("", "'' is not a codec"),
    ],
)
def test_what_is_no_codec_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        CodecSpec.parse(text)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_is_its_text(name: str) -> None:
    assert str(CodecSpec.parse(name)) == name
