"""Two ends of lanes: what one lends the other borrows, and each place comes back."""

from __future__ import annotations

import contextlib
import mmap
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_server.errors import RemoteProtocolError
from ps_server.lanes import LEAST_BYTES, Lanes, Layout

PLACE_BYTES = 2 * LEAST_BYTES
MARKER = b"\xc1"


def ends(places: int = 2) -> tuple[Lanes, Lanes]:
    layout = Layout(16, places, PLACE_BYTES)
    memory = mmap.mmap(-1, layout.total_bytes)
    return Lanes(memory, layout, sends=0), Lanes(memory, layout, sends=1)


def large(value: int, size: int = LEAST_BYTES) -> bytes:
    return bytes([value]) * size


def test_large_frames_take_a_place_and_small_ones_stay() -> None:
    one, other = ends()
    frames = [b"head", large(1), b"tail", large(2, PLACE_BYTES), large(3, LEAST_BYTES - 1)]
    sent, taken = one.lend(frames)
    assert len(taken) == 2
    assert sum(map(len, sent)) < LEAST_BYTES + 100
    assert [bytes(frame) for frame in other.borrow(sent)] == frames


def test_both_lanes_are_in_use_at_once() -> None:
    one, other = ends(places=1)
    there, back = one.lend([large(1)])[0], other.lend([large(2)])[0]
    assert bytes(other.borrow(there)[0]) == large(1)
    assert bytes(one.borrow(back)[0]) == large(2)


def test_a_packet_without_large_frames_is_sent_as_it_is() -> None:
    one, other = ends()
    frames = [b"head", b"", b"tail"]
    assert one.lend(frames) == (frames, [])
    assert other.borrow(frames) == frames
    assert other.borrow([]) == []
    assert other.borrow([b""]) == [b""]


def test_a_frame_larger_than_a_place_stays_in_its_packet() -> None:
    one, _ = ends()
    frames = [large(1, PLACE_BYTES + 1)]
    assert one.lend(frames) == (frames, [])


def test_the_receiver_works_on_the_array_where_it_lies() -> None:
    one, other = ends(places=1)
    (frame,) = other.borrow(one.lend([large(0)])[0])
    np.frombuffer(frame, np.uint8)[:] = 7
    del frame
    place = one.lend([large(1)])[0]
    (frame,) = other.borrow(place)
    assert bytes(frame) == large(1)


def test_a_place_comes_back_when_nothing_refers_to_it_any_more() -> None:
    one, other = ends(places=1)
    (frame,) = other.borrow(one.lend([large(1)])[0])
    tensor = torch.from_numpy(np.frombuffer(frame, np.float32))
    rest = tensor[5:]
    del frame, tensor
    assert one.lend([large(2)])[1] == []  # `rest` is still there
    assert rest.view(torch.uint8).unique().tolist() == [1]
    del rest
    assert one.lend([large(3)])[1] == [0]


def test_without_a_free_place_the_frame_stays_in_its_packet() -> None:
    one, other = ends(places=1)
    frames = [large(1), large(2)]
    sent, taken = one.lend(frames)
    assert taken == [0]
    assert [bytes(frame) for frame in other.borrow(sent)] == frames


def test_what_was_not_sent_is_taken_back() -> None:
    one, _ = ends(places=1)
    _, taken = one.lend([large(1)])
    assert one.lend([large(2)])[1] == []
    one.take_back(taken)
    assert one.lend([large(2)])[1] == [0]


@pytest.mark.parametrize(
    "entry",
    [
        (1, 0, LEAST_BYTES),
        (0, 2, LEAST_BYTES),
        (0, 2**32 - 1, LEAST_BYTES),
        (0, 0, PLACE_BYTES + 1),
        (0, 0, 0),
    ],
    ids=["no such frame", "no such place", "far from any place", "larger than a place", "nothing"],
)
def test_what_there_is_not_cannot_be_borrowed(entry: tuple[int, int, int]) -> None:
    _, other = ends()
    with pytest.raises(RemoteProtocolError, match="is not an array"):
        other.borrow([MARKER + struct.pack("<III", *entry), b""])


def test_a_frame_is_lent_or_sent_and_not_both() -> None:
    _, other = ends()
    with pytest.raises(RemoteProtocolError, match="is not an array"):
        other.borrow([MARKER + struct.pack("<III", 0, 0, LEAST_BYTES), b"x"])
    with pytest.raises(RemoteProtocolError, match="is not an array"):
        other.borrow([MARKER + 2 * struct.pack("<III", 0, 0, LEAST_BYTES), b""])


def test_a_list_that_is_cut_short_is_refused() -> None:
    _, other = ends()
    with pytest.raises(RemoteProtocolError, match="cut short"):
        other.borrow([MARKER + struct.pack("<III", 0, 0, LEAST_BYTES)[:-1], b""])


@given(entries=st.binary(max_size=60), frames=st.lists(st.binary(max_size=3), max_size=4))
def test_nonsense_is_refused_or_gives_frames_of_the_lanes_own(entries: bytes, frames: list[bytes]) -> None:
    one, other = ends()
    with contextlib.suppress(RemoteProtocolError):
        found = other.borrow([MARKER + entries, *frames])
        assert len(found) == len(frames)
        assert all(len(frame) <= PLACE_BYTES for frame in found)
    assert bytes(other.borrow(one.lend([large(9)])[0])[0]) == large(9)
