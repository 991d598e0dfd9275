"""Sealed packets: whatever is opened is what was sealed, once, whole and in order."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ps_server.errors import PacketsMissing, RemoteProtocolError
from ps_server.transport.base import Frames
from ps_server.transport.sealing import (
    LARGE_BYTES,
    MOST_FRAMES,
    Opener,
    Sealer,
    Suite,
    choose,
    offer,
)

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
AES, CHACHA = Suite.AES_256_GCM, Suite.CHACHA20_POLY1305
LARGE = bytes(range(256)) * (LARGE_BYTES // 256)
Parts = list[bytes]


def packet(sealer: Sealer, *frames: bytes) -> Parts:
    return [bytes(part) for part in sealer.packet(frames)]


def opened(opener: Opener, parts: Parts) -> list[bytes]:
    return [bytes(frame) for frame in opener.open([memoryview(bytearray(p)) for p in parts])]


@pytest.mark.parametrize("suite", Suite)
@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"small", b"", b"more"],
        [LARGE],
        [b"header", LARGE, LARGE[1:], b"", LARGE + b"x", b"end"],
        [b"x"] * 1000,
    ],
)
def test_frames_come_out_as_they_went_in(suite: Suite, frames: Frames) -> None:
    sealer, opener = Sealer(suite, KEY), Opener(suite, KEY)
    for _ in range(3):
        assert opened(opener, packet(sealer, *frames)) == frames


def test_small_frames_are_one_part_and_large_ones_one_each() -> None:
    parts = packet(Sealer(AES, KEY), b"header", LARGE, b"small", LARGE)
    assert [len(part) for part in parts[:3]] == [8, LARGE_BYTES + 16, LARGE_BYTES + 16]
    assert len(parts) == 4


def test_what_comes_out_is_the_memory_that_came_in_and_may_be_written_to() -> None:
    parts = [memoryview(bytearray(part)) for part in packet(Sealer(AES, KEY), LARGE, b"small")]
    large, small = map(memoryview, Opener(AES, KEY).open(parts))
    assert large.obj is parts[1].obj
    assert small.obj is parts[2].obj
    large[0:1] = small[0:1] = b"!"


def swap_parts(parts: Parts) -> Parts:
    return [parts[0], parts[2], parts[1], *parts[3:]]


def flip(place: int) -> Callable[[Parts], Parts]:
    def change(parts: Parts) -> Parts:
        part = parts[place]
        return [*parts[:place], bytes([part[0] ^ 1]) + part[1:], *parts[place:][1:]]

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda _: [],
        lambda parts: parts[:1],
        lambda parts: parts[1:],
        lambda parts: [*parts[:1], *parts[2:]],
        lambda parts: [*parts[:2], *parts[1:]],
        lambda parts: [*parts[:-1], parts[-1][:-1]],
        lambda parts: [*parts[:-1], parts[-1][:15]],
        lambda parts: [*parts[:-1], b""],
        lambda parts: [*parts, b""],
        lambda parts: [parts[0], *[b""] * (MOST_FRAMES + 2)],
        lambda parts: [b"", *parts[1:]],
        swap_parts,
        flip(0),
        flip(1),
        flip(2),
        flip(3),
    ],
)
def test_a_changed_packet_is_refused_and_the_right_one_is_still_taken(
    change: Callable[[Parts], Parts],
) -> None:
    sealer, opener = Sealer(AES, KEY), Opener(AES, KEY)
    whole = packet(sealer, LARGE, LARGE[::-1], b"small")
    with pytest.raises(RemoteProtocolError):
        opened(opener, change(whole))
    assert opened(opener, whole) == [LARGE, LARGE[::-1], b"small"]


@pytest.mark.parametrize("lead", [b"", b"\xff" * 4, struct.pack("<2I", 1, LARGE_BYTES)])
def test_a_lead_that_no_sealer_makes_is_refused(lead: bytes) -> None:
    nonce, bound = struct.pack(">IQ", 0, 0), struct.pack(">QI", 0, 2)
    parts = [bytes(8), AESGCM(KEY).encrypt(nonce, lead, bound)]
    with pytest.raises(RemoteProtocolError, match="lead"):
        opened(Opener(AES, KEY), parts)


def test_a_packet_is_taken_once_and_in_order() -> None:
    sealer, opener = Sealer(AES, KEY), Opener(AES, KEY)
    first, second, third = (packet(sealer, b"%d" % number) for number in range(3))
    for early in (second, third):
        with pytest.raises(PacketsMissing, match=r"^packet 0 is missing$"):
            opened(opener, early)
    assert opened(opener, first) == [b"0"]
    for late in (first, [*first[:1], *second[1:]], [*second[:1], *first[1:]]):
        with pytest.raises(RemoteProtocolError):
            opened(opener, late)
    assert [opened(opener, each) for each in (second, third)] == [[b"1"], [b"2"]]


def test_a_packet_that_is_missing_when_the_key_is_replaced_is_missed() -> None:
    """The packets after it have the next key, and would count as forged ones."""
    sealer, opener = Sealer(AES, KEY, rekey_bytes=1), Opener(AES, KEY, rekey_bytes=1)
    first, second = (packet(sealer, b"%d" % number) for number in range(2))
    with pytest.raises(PacketsMissing, match=r"^packet 0 is missing$"):
        opened(opener, second)
    with pytest.raises(RemoteProtocolError, match="not sealed by the other end"):
        opened(opener, [*second[:1], *first[1:]])
    assert [opened(opener, each) for each in (first, second)] == [[b"0"], [b"1"]]


@pytest.mark.parametrize(
    "opener",
    [Opener(AES, OTHER_KEY), Opener(CHACHA, KEY)],
    ids=["another connection or direction", "another suite"],
)
def test_a_packet_from_elsewhere_is_refused(opener: Opener) -> None:
    with pytest.raises(RemoteProtocolError, match="not sealed by the other end"):
        opened(opener, packet(Sealer(AES, KEY), b"x"))


@pytest.mark.parametrize("suite", Suite)
def test_keys_are_replaced_on_both_sides_at_the_same_packet(suite: Suite) -> None:
    limit = 2 * (LARGE_BYTES + 16)
    sealer, opener = Sealer(suite, KEY, limit), Opener(suite, KEY, limit)
    lasting = Opener(suite, KEY)
    for number in range(9):
        sealed = packet(sealer, LARGE, b"%d" % number)
        assert opened(opener, sealed) == [LARGE, b"%d" % number]
        if number < 2:
            assert opened(lasting, sealed)
        else:
            with pytest.raises(RemoteProtocolError):
                opened(lasting, sealed)


def test_equal_packets_look_different() -> None:
    sealer = Sealer(AES, KEY)
    seen = {part for _ in range(5) for part in packet(sealer, LARGE, LARGE, b"x")[1:]}
    assert len(seen) == 15


@pytest.mark.parametrize(
    ("here", "there", "suite"),
    [(True, True, AES), (True, False, CHACHA), (False, True, CHACHA), (False, False, CHACHA)],
)
def test_aes_is_used_where_both_processors_have_it(here: bool, there: bool, suite: Suite) -> None:
    assert choose(offer(has_aes=there), has_aes=here) is suite
