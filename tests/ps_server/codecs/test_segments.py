"""The bytes of topk by hand, and those that no encoder sends; the positions of randomk, which are a
part of the protocol.
"""

from __future__ import annotations

import numpy as np
import pytest

from ps_server import RemoteProtocolError
from ps_server.codecs.base import SEGMENT_ELEMENTS, Key
from ps_server.codecs.segments import drawn
from tests.support.codecs import KEY, decoded, encoded, numbers


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
